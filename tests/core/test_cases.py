"""Known answers of other projects' own code: every partition, index, property and refusal in `tests/cases`.

Where a case is marked as the other project's own error, the right answer is worked out here with numpy.
"""

import contextvars
import json
from math import prod
from pathlib import Path

import numpy as np
import pytest

import dualmesh as dm
from dualmesh import importers, presets
from dualmesh.errors import DualmeshError
from dualmesh_sim import rendezvous

PROJECTS = ("veomni", "torchtitan", "megatron")
FILES = {name: json.loads((Path(__file__).parent.parent / "cases" / f"{name}.json").read_text()) for name in PROJECTS}
VEOMNI, TORCHTITAN, MEGATRON = (FILES[name] for name in PROJECTS)


def each(cases):
    return pytest.mark.parametrize("case", cases, ids=[case["id"] for case in cases])


def partition(topology, axis):
    return topology.partition(axis).tolist()


def indices(topology, axis, ranks):
    return [topology.index(axis, rank) for rank in ranks]


def grid_groups(names, sizes, members):
    """The groups of some axes of a row-major grid, in the grid's own order."""
    places = [names.index(name) for name in members]
    rest = [place for place in range(len(names)) if place not in places]
    ranks = np.arange(prod(sizes)).reshape(sizes).transpose(rest + places)
    return ranks.reshape(-1, prod(sizes[place] for place in places)).tolist()


def by_first(groups):
    return sorted(groups, key=min)


# -- VeOmni ------------------------------------------------------------------------------------------------------------


def as_rank(rank, fn):
    """Answer as the simulated rank does."""

    def there():
        rendezvous._PLACE.set(rendezvous.Place(rendezvous.Run([rank], 1.0), rank))
        return fn()

    return contextvars.copy_context().run(there)


def on_every_rank(world, fn):
    return [as_rank(rank, fn) for rank in range(world)]


def is_error(value):
    return isinstance(value, dict) and "error" in value


def seed_sizes(kwargs):
    """The sizes that the seed's arguments mean."""
    total, outer, inner = (kwargs.get(key, 1) for key in ("dp_size", "dp_replicate_size", "dp_shard_size"))
    inner = total if total > 1 and outer == inner == 1 else inner
    rest = (kwargs.get(f"{name}_size", 1) for name in ("pp", "ulysses", "cp", "tp"))
    pp, ulysses, cp, tp = rest
    return {"pp": pp, "dp_replicate": outer, "dp_shard": inner, "ulysses": ulysses, "cp": cp, "tp": tp}


def extra_groups(kwargs, name, size):
    """Fold an extra parallel inside each (pp, tp) coordinate: its own groups, its fsdp groups and its replicas."""
    sizes = seed_sizes(kwargs)
    shard = sizes["dp_shard"] * sizes["ulysses"] * sizes["cp"]
    grid = [sizes["pp"], sizes["dp_replicate"], shard // size, size, sizes["tp"]]
    names = ["pp", f"{name}_replicate", f"{name}_fsdp", name, "tp"]
    return {member: by_first(grid_groups(names, grid, [member])) for member in names[1:4]}


@pytest.fixture(params=["as given", "with the seed's default"])
def arguments(request, case):
    """The case's arguments; the seed's default of dp_size is 1, ours is to derive it."""
    return case["kwargs"] if request.param == "as given" else {"dp_size": 1, **case["kwargs"]}


@each(VEOMNI["cases"])
def test_veomni_partitions_and_indices(case, arguments):
    with dm.session(backend="sim", world_size=case["world"]):
        topology = dm.init_parallel_state(**arguments).topology
    assert [topology.size(name) for name in case["mesh"]["names"]] == case["mesh"]["shape"]
    expected = dict(case["groups"])
    for name, extra in case["extra"].items():
        if extra is not None:
            right = extra_groups(case["kwargs"], name, extra["shape"][-1])
            if extra["covers_world"]:
                assert {axis: expected[axis] for axis in extra["names"]} == {
                    axis: right[axis] for axis in extra["names"]
                }
            expected |= {axis: right[axis] for axis in extra["names"]}
    for axis, groups in expected.items():
        assert by_first(partition(topology, axis)) == groups, axis
        index = {rank: place for group in groups for place, rank in enumerate(group)}
        assert indices(topology, axis, range(case["world"])) == [index[rank] for rank in range(case["world"])], axis
        if None not in case["local_rank"][axis]:
            assert indices(topology, axis, range(case["world"])) == case["local_rank"][axis], axis


@each(VEOMNI["cases"])
def test_veomni_attributes_equal_on_all_ranks(case):
    with dm.session(backend="sim", world_size=case["world"]):
        state = dm.init_parallel_state(**case["kwargs"])
        const = dict(case["const"])
        if is_error(const["ep_fsdp_size"]):
            const["ep_fsdp_size"] = const["fsdp_size"]
        if is_error(const["ep_gradient_divide_factor"]):
            const["ep_gradient_divide_factor"] = const["fsdp_size"]
        assert {name: getattr(state, name) for name in const} == const
        for name, extra in case["extra"].items():
            assert state.extra_parallel_enabled(name) == (extra is not None)
            if extra is not None:
                factor = const["fsdp_size"] if is_error(extra["grad_divide"]) else extra["grad_divide"]
                assert state.extra_parallel_fsdp_size(name) == extra["fsdp_size"]
                assert state.extra_parallel_gradient_divide_factor(name) == factor


@each(VEOMNI["cases"])
def test_veomni_attributes_of_each_rank(case):
    absent = {"is_first_pp_stage": True, "is_last_pp_stage": True}
    with dm.session(backend="sim", world_size=case["world"]):
        state = dm.init_parallel_state(**case["kwargs"])
        for name, expected in case["per_rank"].items():
            found = on_every_rank(case["world"], lambda name=name: getattr(state, name))
            if is_error(expected):
                assert found == [absent.get(name, 0)] * case["world"], name
            elif None in expected:
                axis = name.removesuffix("_rank")
                assert found == indices(state.topology, axis, range(case["world"])), name
            else:
                assert found == expected, name


@each(VEOMNI["cases"])
def test_veomni_groups_are_the_axes_that_the_seed_names(case):
    with dm.session(backend="sim", world_size=case["world"]):
        state = dm.init_parallel_state(**case["kwargs"])
        for name, axis in case["group_of"].items():
            found = on_every_rank(case["world"], lambda name=name: getattr(state, name))
            if axis is None or is_error(axis):
                assert found == [None] * case["world"], name
            else:
                assert found == [state.topology.ranks(axis, rank) for rank in range(case["world"])], name


@each(VEOMNI["cases"])
def test_veomni_meshes(case):
    with dm.session(backend="sim", world_size=case["world"]):
        state = dm.init_parallel_state(**case["kwargs"])
        meshes = on_every_rank(case["world"], lambda: state.fsdp_mesh.ranks.tolist())
        assert sorted(json.loads(text) for text in {json.dumps(mesh) for mesh in meshes}) == sorted(
            case["fsdp_mesh"]["meshes"]
        )
        assert np.shape(meshes[0]) == tuple(case["fsdp_mesh"]["shape"])
        for name, extra in case["extra"].items():
            mesh = as_rank(0, lambda name=name: state.extra_parallel_fsdp_device_mesh.get(name))
            if extra is None:
                assert mesh is None
            else:
                assert list(mesh.axis_names) == extra["names"]
                assert list(mesh.ranks.shape) == extra["shape"]


def works_here(kwargs):
    """The seed refuses ring attention and a flag that changes nothing here; both work."""
    return kwargs.get("cp_size", 1) > 1 or any(kwargs.get("extra_parallel_placement_innermost", ()))


@each(VEOMNI["rejected"])
def test_veomni_refusals(case):
    kwargs = {"dp_size": 1, **case["kwargs"]}
    with dm.session(backend="sim", world_size=case["world"]) as session:
        try:
            state = dm.init_parallel_state(**kwargs)
        except ValueError as error:
            refused = isinstance(error, DualmeshError) and session.states() == []
            if not refused:
                raise
            return
        if "constructor" in case:  # a state without a mesh: here every state has one
            assert state.device_mesh is not None
            return
        assert works_here(kwargs), case["why"]
        sizes = seed_sizes(kwargs)
        for name in sizes:
            assert by_first(partition(state.topology, name)) == by_first(
                grid_groups(list(sizes), list(sizes.values()), [name])
            )


# -- torchtitan --------------------------------------------------------------------------------------------------------


def titan(case):
    kwargs = dict(case["kwargs"])
    return presets.torchtitan(**{key: kwargs[key] for key in kwargs if key != "world_size"}).resolve(
        kwargs["world_size"]
    )


@each(TORCHTITAN["cases"])
def test_torchtitan_partitions_and_indices(case):
    topology = titan(case)
    assert topology.size("dp_shard") == case["dp_shard"]
    for axis, groups in case["groups"].items():
        assert by_first(partition(topology, axis)) == groups, axis
        assert indices(topology, axis, range(topology.world_size)) == case["local_rank"][axis], axis
    for dims, shape in case["meshes"].values():
        assert [topology.size("loss" if dim == "loss_mesh" else dim) for dim in dims] == shape


@each(TORCHTITAN["cases"])
def test_torchtitan_axes_and_flags(case):
    topology = titan(case)
    assert set(case["available"]) <= set(topology.axis_names)
    large = {name for name in case["groups"] if topology.size(name) > 1}
    assert set(case["enabled_1d"]) == large - ({"efsdp"} if topology.size("ep") == 1 else set())
    size = topology.size
    flags = {
        "dp_enabled": size("dp") > 1,
        "dp_replicate_enabled": size("dp_replicate") > 1,
        "dp_shard_enabled": size("dp_shard") > 1,
        "cp_enabled": size("cp") > 1,
        "dp_cp_enabled": size("loss") > 1,
        "fsdp_enabled": size("fsdp") > 1,
        "tp_enabled": size("tp") > 1,
        "pp_enabled": size("pp") > 1,
        "ep_enabled": size("ep") > 1,
        "non_data_parallel_size": size(("pp", "cp", "tp")),
        "seq_len_divisor": 2 * size(("cp", "tp")),
    }
    assert {name: flags[name] for name in case["flags"]} == case["flags"]


@each(TORCHTITAN["cases"])
def test_torchtitan_meshes_of_several_axes(case):
    topology = titan(case)
    for text, mesh in case["multi"].items():
        names = tuple(text.split("+"))
        try:
            groups = topology.partition(names)
        except DualmeshError:
            assert mesh is None or is_error(mesh), text
            continue
        if mesh is not None and not is_error(mesh):
            assert groups.reshape(-1, *mesh["shape"]).tolist() == mesh["meshes"], text
        elif set(names) <= set(topology.base_axes):  # refused or absent there; right here
            sizes = list(topology.sizes.values())
            assert by_first(groups.tolist()) == by_first(grid_groups(list(topology.sizes), sizes, names)), text


@each(TORCHTITAN["rejected"])
def test_torchtitan_refusals(case):
    with pytest.raises(DualmeshError):
        titan(case)


# -- Megatron ----------------------------------------------------------------------------------------------------------

GROUP_AXES = {"dp_cp", "dp", "cp", "mp", "tp", "pp", "tp_dp_cp", "tp_dp", "tp_cp", "ep", "expert_tp", "expert_dp"}
GROUP_AXES |= {"expert_tp_ep", "expert_tp_ep_pp", "intra_dist_opt"}
GROUP_AXES |= {f"{kind}_partial_{name}" for kind in ("intra", "inter") for name in ("dp_cp", "expert_dp")}


def ordered(token, order):
    """The axes of a token, slowest first: the leftmost of the order is fastest."""
    names = set(token.split("-"))
    return tuple(name for name in reversed(order.split("-")) if name in names) or token


@each([case for case in MEGATRON["rank_generator"] if "peer_error" not in case])
def test_megatron_rank_generator(case):
    topology = presets.megatron(**case["kwargs"]).resolve(case["world"])
    for token, groups in case["groups"].items():
        assert partition(topology, ordered(token, case["full_order"])) == groups, token
        for group in groups:
            assert [topology.index(ordered(token, case["full_order"]), rank) for rank in group] == list(
                range(len(group))
            )


@each([case for case in MEGATRON["rank_generator"] if "peer_error" in case])
def test_megatron_rank_generator_that_ignores_something_is_refused(case):
    with pytest.raises(DualmeshError):
        presets.megatron(**case["kwargs"]).resolve(case["world"])


def set_up(case):
    world = case["kwargs"].get("local_world_size") or case["world"]
    return importers.megatron(case["kwargs"]).resolve(world)


@each(MEGATRON["initialize_model_parallel"])
def test_megatron_set_up(case):
    topology = set_up(case)
    lists = presets.megatron_rank_groups(topology)
    first = topology.rank_offset
    for name, groups in case["groups"].items():
        if name in lists:
            assert [list(group) for group in lists[name].partition()] == groups, name
        else:
            assert name in GROUP_AXES, name
            assert partition(topology, name) == groups, name
    for name, places in case["local_rank"].items():
        inside = [place for place in places if place is not None]
        assert indices(topology, name, range(first, first + topology.world_size)) == inside, name
    for name, groups in case["other"].items():
        if name.endswith("PIPELINE_PARALLEL_GROUP_WITH_EGTP"):
            assert partition(topology, "expert_tp_ep_pp") == groups


@each(MEGATRON["initialize_model_parallel"])
def test_megatron_neighbours_and_sources(case):
    topology = set_up(case)
    first, last, stages = topology.rank_offset, topology.rank_offset + topology.world_size, topology.size("pp")
    embedding = presets.megatron_rank_groups(topology)["embd"]

    def stage(rank, step):
        return topology.member("pp", rank, (topology.index("pp", rank) + step) % stages)

    answers = {
        "is_pipeline_first_stage": lambda rank: topology.index("pp", rank) == 0,
        "is_pipeline_last_stage": lambda rank: topology.index("pp", rank) == stages - 1,
        "get_pipeline_model_parallel_next_rank": lambda rank: stage(rank, 1),
        "get_pipeline_model_parallel_prev_rank": lambda rank: stage(rank, -1),
        "get_pipeline_model_parallel_first_rank": lambda rank: topology.ranks("pp", rank)[0],
        "get_pipeline_model_parallel_last_rank": lambda rank: topology.ranks("pp", rank)[-1],
        "get_tensor_model_parallel_src_rank": lambda rank: topology.ranks("tp", rank)[0],
        "get_data_parallel_src_rank": lambda rank: topology.ranks("dp", rank)[0],
        "get_model_parallel_src_rank": lambda rank: topology.ranks("mp", rank)[0],
        "is_rank_in_embedding_group": embedding.is_member,
    }
    for name, expected in case["per_rank"].items():
        found = [answers[name](rank) if first <= rank < last else None for rank in range(len(expected))]
        inside = [want if first <= rank < last else None for rank, want in enumerate(expected)]
        assert found == inside, name


@each(MEGATRON["rejected"])
def test_megatron_refusals(case):
    def attempt():
        if case["what"] != "RankGenerator":
            return set_up(case)
        sizes = [abs(value) or 1 for key, value in case["kwargs"].items() if key not in ("order", "rank_offset")]
        topology = presets.megatron(**case["kwargs"]).resolve(prod(sizes))
        if case["token"] is not None:
            topology.partition(ordered(case["token"], case["kwargs"]["order"]))
        return topology

    if case["error"] is None and case.get("peer_accepts") is True:
        assert attempt().world_size == case["world"]
        return
    with pytest.raises(DualmeshError):
        attempt()


def test_every_file_has_cases():
    for name, data in FILES.items():
        assert sum(len(value) for value in data.values() if isinstance(value, list)) > 20, name
