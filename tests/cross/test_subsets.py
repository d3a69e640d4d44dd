"""Axes in any order, states over any ranks: combined, turned, offset, disjoint and overlapping, on every backend."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dualmesh as dm
from tests.cross import grouped
from tests.worlds import wide_worlds

BACKENDS = ("sim", "torch", "jax")
VERBS = (
    ("all_gather", {"dim": 1}),
    ("reduce_scatter", {"dim": 0, "op": "sum"}),
    ("all_to_all", {"split_dim": 1, "concat_dim": 0}),
    ("broadcast", {"src": 1}),
    ("shift", {"offset": 1}),
)


def rows(sizes, axes, ranks):
    """Return the groups of axes read as one, first = slowest, by reshaping the ranks of a grid."""
    names = list(sizes)
    order = [names.index(name) for name in (*(n for n in names if n not in axes), *axes)]
    length = int(np.prod([sizes[name] for name in axes]))
    return np.array(ranks).reshape(list(sizes.values())).transpose(order).reshape(-1, length).tolist()


def check_axes(spec, sizes, axes, *, world_size, ranks=None, places=None):
    """Run every verb over axes, given with the base axes that they are made of."""
    places = list(range(world_size)) if places is None else places
    partitions = {axis: rows(sizes, made, places) for axis, made in axes.items()}
    grouped.check(spec, partitions, places, 8, VERBS, world_size=world_size, ranks=ranks)


@pytest.mark.parametrize("world_size", [4, 8])
def test_combined_axes_count_in_listed_order_also_against_the_mesh(world_size):
    sizes = {"outer": world_size // 4, "middle": 2, "inner": 2}
    combined = {"with": ("middle", "inner"), "against": ("inner", "middle")}
    axes = {**combined, ("inner", "middle"): ("inner", "middle")}
    if world_size == 8:
        axes |= {("inner", "outer"): ("inner", "outer"), ("middle", "inner", "outer"): ("middle", "inner", "outer")}
    check_axes(dm.TopologySpec(sizes, combined=combined), sizes, axes, world_size=world_size)


def test_base_axes_in_any_order_are_the_users_grid():
    sizes = {"tp": 2, "pp": 1, "dp": 4}
    check_axes(dm.TopologySpec(sizes), sizes, {"tp": ("tp",), "dp": ("dp",)}, world_size=8)


def test_a_state_over_listed_ranks_counts_in_the_order_of_the_list():
    sizes, places = {"a": 2, "b": 2}, [6, 1, 3, 4]
    axes = {"a": ("a",), "b": ("b",), ("b", "a"): ("b", "a")}
    check_axes(dm.TopologySpec(sizes), sizes, axes, world_size=8, ranks=tuple(places), places=places)


def test_a_rank_offset_moves_the_whole_grid():
    sizes = {"a": 2, "b": 2}
    spec = dm.TopologySpec(sizes, rank_offset=3)
    check_axes(spec, sizes, {"a": ("a",), ("b", "a"): ("b", "a")}, world_size=8, places=[3, 4, 5, 6])


def encoder_and_decoder(alone):
    """Use two states on disjoint ranks and one that overlaps both; each rank registers all, or only its own."""
    session = dm.init_distributed()
    states = {
        "encoder": (dm.TopologySpec({"dp": 3}), (0, 1, 2)),
        "decoder": (dm.TopologySpec({"pp": 2, "tp": 2}), (4, 3, 6, 5)),
        "bridge": (dm.TopologySpec({"link": 2, "wide": 2}), (2, 3, 1, 5)),
    }
    found = {}
    for name, (spec, ranks) in states.items():
        if alone and not set(session.local_ranks) & set(ranks):
            continue
        state = dm.init_parallel_state(spec=spec, ranks=ranks, name=name)
        if not state.is_member:
            continue
        blocks = 10.0 ** np.array(ranks)
        for axis in spec.axes:
            with dm.use_parallel_state(name):
                summed = dm.shard_map(lambda x, axis=axis: dm.ops.all_reduce(x, axis), dm.P("world"), dm.P("world"))
                found[name, axis] = dm.to_numpy(summed(dm.distribute(blocks, dm.P("world")))).tolist()
    return found


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_disjoint_and_overlapping_states_registered_by_all_or_by_their_members(backend, alone):
    right = {
        ("encoder", "dp"): [111.0] * 3,
        ("decoder", "pp"): [1010000.0, 101000.0, 1010000.0, 101000.0],
        ("decoder", "tp"): [11000.0, 11000.0, 1100000.0, 1100000.0],
        ("bridge", "link"): [110.0, 101000.0, 110.0, 101000.0],
        ("bridge", "wide"): [1100.0, 1100.0, 100010.0, 100010.0],
    }
    members = {"encoder": {0, 1, 2}, "decoder": {3, 4, 5, 6}, "bridge": {1, 2, 3, 5}}
    for rank, found in enumerate(wide_worlds()[backend](encoder_and_decoder, alone, world_size=8, timeout_s=90)):
        mine = right if backend != "torch" else {key: right[key] for key in right if rank in members[key[0]]}
        assert found == mine


def positions(specs):
    """Return {(spec, axes): ranks as the native mesh has them}, seen by this process (torch: around this rank)."""
    found = []
    for number, spec in enumerate(specs):
        state = dm.init_parallel_state(spec=spec, name=str(number))
        axes = [name for name in (*state.topology.base_axes, *spec.views) if state.size(name) > 1]
        found.append(_seen(state, axes))
        dm.host.barrier()  # gloo: a rank that ends a group while others still connect it breaks their connecting
        dm.clear_parallel_state()
    return found


def _seen(state, axes):
    if state.backend == "torch":
        return {axis: state.submesh(axis).mesh.tolist() for axis in axes}
    ids = {device: rank for rank, device in enumerate(state.mesh.devices.flat)} if state.backend == "jax" else None
    if ids is None:
        return {axis: [list(state.ranks(axis, rank)) for rank in state.members] for axis in axes}
    whole = np.array([state.members[ids[device]] for device in state.mesh.devices.flat])
    grid, names = whole.reshape(state.mesh.devices.shape), state.mesh.axis_names
    seen = {}
    for axis in axes:
        atoms = [names.index(name) for name in state.axes(axis)]
        rest = [place for place in range(len(names)) if place not in atoms]
        seen[axis] = grid.transpose([*rest, *atoms]).reshape(-1, state.size(axis)).tolist()
    return seen


@st.composite
def eights(draw):
    """Draw a spec over 8 ranks: base axes in any order, and a view of some of them under the name of its one axis."""
    sizes = draw(st.sampled_from([(8,), (2, 4), (4, 2), (2, 2, 2), (1, 8), (2, 1, 4)]))
    names = draw(st.permutations("abc"))[: len(sizes)]
    over = draw(st.permutations(names))[: draw(st.integers(1, len(names)))]
    spanned = int(np.prod([size for name, size in zip(names, sizes, strict=True) if name in over]))
    inner = draw(st.sampled_from([size for size in (1, 2, 4, 8) if spanned % size == 0]))
    axes = {"rest": -1, "view": inner} if draw(st.booleans()) else {"view": inner, "rest": -1}
    return dm.TopologySpec(dict(zip(names, sizes, strict=True)), views={"view": dm.View(tuple(over), axes)})


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(eights(), min_size=6, max_size=6))
def test_torch_mesh_jax_device_position_and_numpy_agree(specs):
    seen = {backend: wide_worlds()[backend](positions, specs, world_size=8) for backend in BACKENDS}
    for number, spec in enumerate(specs):
        topology = spec.resolve(8)
        for axis in seen["sim"][0][number]:
            groups = topology.partition(axis).tolist()
            assert seen["sim"][0][number][axis] == [list(topology.ranks(axis, rank)) for rank in range(8)]
            assert sorted(seen["jax"][0][number][axis]) == sorted(groups)
            for rank, found in enumerate(seen["torch"]):
                (group,) = (group for group in groups if rank in group)
                assert found[number][axis] == group
