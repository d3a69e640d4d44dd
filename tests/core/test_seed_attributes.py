"""The seed's attributes on every backend: its values, and answers where its getters fail (see also test_cases)."""

import pytest

import dualmesh as dm
from dualmesh.backend.veomni_attributes import Attribute, VeOmniAttributes
from dualmesh.errors import NoStateError, UnknownAxisError
from dualmesh.runtime.single_process import SingleProcessState
from tests.worlds import torch_world

NAMES = """
dp_group dp_rank dp_size dp_mesh dp_enabled
dp_replicate_group dp_replicate_rank dp_replicate_size dp_replicate_mesh dp_replicate_enabled
dp_shard_group dp_shard_rank dp_shard_size dp_shard_mesh dp_shard_enabled
dp_shard_sp_group dp_shard_sp_rank dp_shard_sp_size dp_shard_sp_mesh dp_shard_sp_enabled
fsdp_group fsdp_rank fsdp_size fsdp_enabled
tp_group tp_rank tp_size tp_mesh tp_enabled
pp_group pp_rank pp_size pp_mesh pp_enabled is_first_pp_stage is_last_pp_stage
ep_group ep_rank ep_size ep_mesh ep_enabled ep_fsdp_size ep_fsdp_mesh ep_gradient_divide_factor
sp_group sp_rank sp_size sp_mesh sp_enabled ulysses_group ulysses_rank ulysses_size ulysses_mesh ulysses_enabled
cp_group cp_rank cp_size cp_mesh cp_enabled
extra_parallel_names extra_parallel_sizes extra_parallel_fsdp_device_mesh any_extra_parallel_enabled
device_mesh dp_mode async_enabled include_sp_in_fsdp is_initialized local_rank global_rank
""".split()
METHODS = ["mesh", "fsdp_mesh", "group", "enabled", "rank", "fsdp_size", "gradient_divide_factor"]


def test_the_table_has_every_attribute_of_the_seed_and_no_other():
    table = {name for name, value in vars(VeOmniAttributes).items() if isinstance(value, Attribute)}
    assert table == set(NAMES)
    assert all(callable(getattr(VeOmniAttributes, f"extra_parallel_{name}")) for name in METHODS)
    assert all(getattr(VeOmniAttributes, name).__doc__ for name in NAMES)


def test_a_state_cannot_be_written():
    with pytest.raises(AttributeError, match="read-only"):
        SingleProcessState().dp_size = 4


def test_a_single_process_answers():
    state = SingleProcessState()
    sizes = {name: getattr(state, name) for name in NAMES if name.endswith("_size")}
    assert set(sizes.values()) == {1}
    assert {name for name in NAMES if name.endswith("_group") and getattr(state, name) is not None} == set()
    assert [name for name in NAMES if name.endswith("_enabled") and getattr(state, name)] == ["dp_shard_enabled"]
    assert (state.dp_rank, state.tp_rank, state.sp_rank, state.cp_rank, state.global_rank) == (0, 0, -1, -1, -1)
    assert (state.is_first_pp_stage, state.is_last_pp_stage) == (True, True)
    assert state.device_mesh is None
    assert state.extra_parallel_fsdp_device_mesh == {"ep": None}
    assert not state.is_initialized


def test_a_single_process_state_has_no_group_in_a_world_of_several(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    for name in ("dp_group", "sp_group", "tp_group", "ep_group"):
        with pytest.raises(NoStateError, match="no parallel state is registered"):
            getattr(SingleProcessState(), name)


def test_the_launcher_says_the_local_rank(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert SingleProcessState().local_rank == 3
    monkeypatch.delenv("LOCAL_RANK")
    assert SingleProcessState().local_rank == -1


def test_what_the_seed_refuses_works(world):
    state = dm.init_parallel_state(dp_size=2, cp_size=2, tp_size=2, ep_size=2)
    assert (state.cp_size, state.sp_size, state.cp_enabled, state.fsdp_size) == (2, 2, True, 4)
    assert state.topology.partition("ep").tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert (state.ep_fsdp_size, state.ep_gradient_divide_factor) == (2, 4)


def test_several_extra_parallels_are_asked_by_name(world):
    state = dm.init_parallel_state(
        dp_size=8, dp_replicate_size=2, dp_shard_size=4, extra_parallel_names=("ep", "emb"), extra_parallel_sizes=(1, 2)
    )
    assert state.extra_parallel_names == ("ep", "emb")
    assert state.extra_parallel_sizes == {"ep": 1, "emb": 2}
    assert (state.ep_enabled, state.any_extra_parallel_enabled) == (False, True)
    assert state.extra_parallel_enabled("emb")
    assert not state.extra_parallel_enabled("other")
    assert state.extra_parallel_fsdp_size("emb") == 4  # the seed's value, which counts replicas
    assert state.size("emb_fsdp") == 2


@pytest.mark.parametrize(
    ("names", "sizes"),
    [(("ep",), (1,)), (("emb",), (2,)), (("emb",), (1,)), (("ep", "emb"), (2, 1)), (("emb", "ep"), (1, 2)), ((), ())],
)
def test_extra_parallels_are_those_declared_in_their_order(world, names, sizes):
    """Size 1 is in it; nothing is added. Their meshes are in the drop-in's tests."""
    state = dm.init_parallel_state(dp_size=8, extra_parallel_names=names, extra_parallel_sizes=sizes)
    assert state.extra_parallel_names == names
    assert list(state.extra_parallel_sizes.items()) == list(zip(names, sizes, strict=True))


def test_sizes_and_their_spec_are_one_state_unless_other_extra_parallels_were_declared(world):
    """A state of two names shares what it holds; declared extra parallels tell states apart."""
    sizes = dm.init_parallel_state(dp_size=8, name="sizes")
    assert dm.init_parallel_states({"spec": dm.parallel_spec(dp_size=8)})["spec"] is sizes
    other = dm.init_parallel_state(dp_size=8, extra_parallel_names=("emb",), name="emb")
    assert other is not sizes
    assert (other.extra_parallel_names, sizes.extra_parallel_names) == (("emb",), ("ep",))


def test_other_axis_names_answer_through_their_roles(world):
    spec = dm.presets.torchtitan(dp_replicate=2, dp_shard=2, cp=2, ep=2)
    state = dm.init_parallel_state(spec=spec)
    assert (state.dp_size, state.fsdp_size, state.sp_size, state.dp_shard_sp_size) == (4, 8, 2, 4)
    assert (state.ep_size, state.ep_enabled, state.extra_parallel_names) == (2, True, ("ep",))
    assert (state.ulysses_size, state.ulysses_enabled) == (1, False)
    free = dm.init_parallel_state(spec=dm.TopologySpec({"x": 8}), name="free")
    assert (free.dp_size, free.tp_size, free.dp_enabled, free.pp_rank) == (1, 1, False, 0)
    assert free.sp_group is None
    with pytest.raises(UnknownAxisError, match=r"no axis 'tp'. Axes: x, world"):
        _ = free.tp_mesh


def test_a_role_decides_which_axes_an_attribute_means_and_names_only_where_it_is_silent(world):
    """An axis called `pp` that carries data is no pipeline; without the role the name stands, as for `tp`."""
    roles = {"data": "pp", "loss": "pp", "stages": "stage"}
    state = dm.init_parallel_state(spec=dm.TopologySpec({"stage": 4, "pp": 2}, roles=roles))
    assert (state.pp_size, state.dp_size, state.fsdp_size, state.sp_size) == (4, 2, 2, 1)
    silent = dm.init_parallel_state(spec=dm.TopologySpec({"pp": 4, "dp": 2}), name="silent")
    assert (silent.pp_size, silent.dp_size) == (4, 2)
    both = dm.init_parallel_state(spec=dm.presets.accelerate(dp_shard=2, cp=2, sp=2), name="both")
    assert (both.sp_size, both.sp_enabled, both.dp_size) == (4, True, 2)


def test_settings_of_the_trainer_are_kept(world):
    state = dm.init_parallel_state(dp_size=8, dp_mode="ddp", async_enabled=True)
    assert (state.dp_mode, state.async_enabled, state.include_sp_in_fsdp, state.is_initialized) == (
        "ddp",
        True,
        True,
        True,
    )


def answers():
    """What one torch rank says; groups as their ranks."""
    import torch.distributed as dist

    state = dm.init_parallel_state(dp_size=2, ulysses_size=2, ep_size=2)

    def ranks(group):
        return None if group is None else dist.get_process_group_ranks(group)

    mesh = state.extra_parallel_fsdp_device_mesh["ep"]
    return {
        "groups": [
            ranks(getattr(state, f"{name}_group")) for name in ("dp", "fsdp", "sp", "ulysses", "ep", "tp", "cp")
        ],
        "ranks": [getattr(state, f"{name}_rank") for name in ("dp", "fsdp", "sp", "ep", "tp", "cp", "pp", "global")],
        "mesh": (mesh.mesh_dim_names, mesh.mesh.tolist()),
        "fsdp_mesh": state.fsdp_mesh.mesh.tolist(),
        "dp_mesh": state.dp_mesh.get_local_rank(),
        "stage": (state.is_first_pp_stage, state.is_last_pp_stage),
        "device": state.device_mesh.ndim,
        "extra": ranks(state.extra_parallel_group("ep")),
    }


def test_torch_ranks_answer_with_their_groups_and_meshes():
    for rank, found in enumerate(torch_world(answers, world_size=4)):
        dp, sp = [[0, 2], [1, 3]][rank % 2], [[0, 1], [2, 3]][rank // 2]
        assert found == {
            "groups": [dp, [0, 1, 2, 3], sp, sp, sp, None, None],
            "ranks": [rank // 2, rank, rank % 2, rank % 2, 0, -1, 0, rank],
            "mesh": (("ep_fsdp", "ep"), [[0, 1], [2, 3]]),
            "fsdp_mesh": [0, 1, 2, 3],
            "dp_mesh": rank // 2,
            "stage": (True, True),
            "device": 6,
            "extra": sp,
        }
