"""Which mesh a state is on, and what its axes are called."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import StaleStateError, StateWarning
from tests.jax_backend.worker import in_jax, two_grids, two_meshes


@in_jax()
def test_states_registered_before_first_use_share_one_mesh():
    states = two_grids()
    assert states["dense"].mesh is states["talker"].mesh
    assert dict(states["dense"].mesh.shape) == {"atom_4x2": 4, "atom_2x1": 2}
    assert states["dense"].group("dp_shard") == ("atom_4x2",)
    assert states["dense"].axes("ulysses") == ("atom_2x1",)
    assert states["talker"].axes("dp_shard") == ("atom_4x2", "atom_2x1")
    assert states["talker"].axes("ulysses") == states["talker"].group("tp") == ()


@in_jax()
def test_an_atom_bears_a_name_that_means_the_same_in_every_state():
    dense = dm.TopologySpec({"outer": 2, "dp": 2, "tp": 2})
    other = dm.TopologySpec({"outer": 2, "dp": 4})
    states = dm.init_parallel_states({"dense": dense, "other": other})
    assert states["dense"].mesh.axis_names == ("outer", "atom_2x2", "tp")


@in_jax()
def test_a_wrong_bare_name_is_unknown_to_jax():
    import jax
    from jax.sharding import PartitionSpec

    two_grids()
    with dm.use_parallel_state("talker"), pytest.raises(ValueError, match="dp_shard"):
        jax.jit(lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec("dp_shard")))(np.arange(8.0))


@in_jax()
def test_a_state_registered_later_joins_the_mesh_when_its_atoms_spell_it():
    states = two_grids()
    mesh = states["dense"].mesh
    later = dm.init_parallel_state(dp_size=4, dp_shard_size=4, tp_size=2, name="later")
    assert later.mesh is mesh
    assert later.axes("tp") == ("atom_2x1",)


@in_jax()
def test_a_state_registered_after_first_use_gets_its_own_mesh_and_a_warning():
    two_grids()["dense"].mesh  # noqa: B018 - first use
    with pytest.warns(StateWarning, match=r"atom_4x2, atom_2x1.*do not spell.*dp_replicate.*before first use") as said:
        late = dm.init_parallel_state(dp_replicate_size=2, dp_shard_size=4, name="late")
    assert len(said) == 1
    assert "/dualmesh" not in said[0].filename
    assert late.mesh.axis_names[:2] == ("dp_replicate", "dp_shard")


@in_jax()
def test_a_late_state_whose_names_would_mean_something_else_gets_its_own_mesh():
    a, b = two_meshes()
    assert dict(a.mesh.shape) == {"dp": 4, "sp": 2}
    assert dict(b.mesh.shape) == {"dp": 2, "sp": 4}


@in_jax(6)
def test_topologies_without_a_common_refinement_get_meshes_of_their_own():
    one = dm.init_parallel_state(spec=dm.TopologySpec({"a": 2, "b": 3}), name="one")
    with pytest.warns(StateWarning, match="no common refinement"):
        two = dm.init_parallel_state(spec=dm.TopologySpec({"a": 3, "b": 2}), name="two")
    assert dict(one.mesh.shape) == {"a": 2, "b": 3}
    assert dict(two.mesh.shape) == {"a": 3, "b": 2}


@in_jax()
def test_a_state_over_some_ranks_is_on_those_devices_in_that_order():
    import jax

    left = dm.init_parallel_state(spec=dm.TopologySpec({"dp": 2, "tp": 2}), ranks=(3, 1, 0, 2), name="left")
    right = dm.init_parallel_state(spec=dm.TopologySpec({"tp": 4}), ranks=(4, 5, 6, 7), name="right")
    assert list(left.mesh.devices.flat) == [jax.devices()[rank] for rank in (3, 1, 0, 2)]
    assert left.ranks("tp", 3) == (3, 1)
    assert list(right.mesh.devices.flat) == jax.devices()[4:8]
    for state in (left, right):
        with dm.use_parallel_state(state):
            total = dm.shard_map(lambda x: dm.ops.all_reduce(x, "tp"), dm.P("tp"), dm.P())
            blocks = np.arange(8.0).reshape(state.size("tp"), -1)
            np.testing.assert_array_equal(dm.to_numpy(total(np.arange(8.0))), blocks.sum(0))


@in_jax(1)
def test_a_world_of_one_rank_has_a_mesh_of_one_device():
    state = dm.init_parallel_state(dp_size=1)
    assert dict(state.mesh.shape) == {"atom_1x1": 1}
    assert state.group("dp") == ()
    assert state.pspec("dp", ("sp", "tp")) == state.pspec(None, None)


@in_jax()
def test_device_order_is_the_states_order_on_every_axis():
    state = dm.init_parallel_state(spec=dm.TopologySpec({"a": 2, "b": 2, "c": 2}, combined={"ca": ("c", "a")}))
    assert state.axes("ca") == ("c", "a")
    index = dm.shard_map(lambda: dm.ops.axis_index("ca")[None], (), dm.P(("a", "b", "c")))
    assert dm.to_numpy(index()).tolist() == [state.index("ca", rank) for rank in range(8)]


@in_jax()
def test_dense_and_expert_axes_meet_in_one_spec_and_keep_their_shards_through_a_step():
    import jax

    state = dm.init_parallel_state(
        spec=dm.TopologySpec(
            {"dp_shard": 4, "ulysses": 2},
            views={"expert": dm.View(over=("dp_shard", "ulysses"), axes={"ep_fsdp": 2, "ep": 4})},
        )
    )
    assert state.mesh.devices.shape == (2, 2, 2)
    specs = {"dense": dm.P("dp_shard", "ulysses"), "expert": dm.P("ep", "ep_fsdp"), "both": dm.P("ep_fsdp", "ulysses")}
    weights = {name: dm.distribute(np.arange(32.0 * 16).reshape(32, 16), spec) for name, spec in specs.items()}
    mixed = dm.shard_map(
        lambda w: dm.ops.all_reduce((w["dense"] ** 2).sum() + w["expert"].sum(), "world"), (specs,), dm.P()
    )

    @jax.jit
    def step(weights):
        gradients = jax.grad(lambda w: mixed(w) + (w["both"] ** 2).sum())(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)

    stepped = step(step(weights))
    shapes = {name: w.addressable_shards[0].data.shape for name, w in stepped.items()}
    assert shapes == {"dense": (8, 8), "expert": (8, 8), "both": (16, 8)}
    for name, spec in specs.items():
        assert stepped[name].sharding.is_equivalent_to(state.sharding(spec), 2)


@in_jax()
def test_two_states_on_one_mesh_keep_their_shards_through_a_step():
    import jax

    states = two_grids()
    specs = {"dense": dm.P("dp_shard", "ulysses"), "talker": dm.P("dp_shard")}
    weights = {}
    for name, spec in specs.items():
        with dm.use_parallel_state(name):
            weights[name] = dm.distribute(np.arange(64.0).reshape(8, 8), spec)

    @jax.jit
    def step(weights):
        for name, spec in specs.items():
            with dm.use_parallel_state(name):
                square = dm.shard_map(lambda w: dm.ops.all_reduce((w * w).sum(), "world"), spec, dm.P())
                weights = {**weights, name: weights[name] - 0.1 * jax.grad(square)(weights[name])}
        return weights

    stepped = step(weights)
    assert stepped["dense"].addressable_shards[0].data.shape == (2, 4)
    assert stepped["talker"].addressable_shards[0].data.shape == (1, 8)
    for name in specs:
        np.testing.assert_allclose(np.asarray(stepped[name]), 0.8 * np.arange(64.0).reshape(8, 8), rtol=1e-6)
        assert stepped[name].sharding.is_equivalent_to(states[name].sharding(specs[name]), 2)


@in_jax()
def test_submeshes_cover_all_ranks_or_are_refused():
    from dualmesh.errors import RankError

    state = two_grids()["dense"]
    assert dict(state.submesh("ulysses", "dp_shard").shape) == {"ulysses": 2, "dp_shard": 4}
    assert [d.id for d in state.submesh("ulysses", "dp_shard").devices.flat] == [0, 2, 4, 6, 1, 3, 5, 7]
    assert dict(state.fsdp_mesh.shape) == {"params": 8}
    with pytest.raises(RankError, match="holds the ranks"):
        state.submesh("ulysses")


@in_jax()
def test_a_cleared_state_gives_no_mesh_and_leaves_a_fresh_one_to_the_next():
    states = two_grids()
    old = states["dense"].mesh
    dm.clear_parallel_state()
    with pytest.raises(StaleStateError, match="'dense' was cleared"):
        states["dense"].mesh  # noqa: B018
    alone = dm.init_parallel_state(dp_size=8, dp_shard_size=8)
    assert alone.mesh.axis_names == ("dp_shard",)
    assert alone.mesh != old
