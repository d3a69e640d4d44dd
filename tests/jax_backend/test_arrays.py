"""Global arrays and their shardings in JAX's own words."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import ArgumentError, ShapeError, ShardingError
from dualmesh.partition_spec import slices_of
from tests.jax_backend.worker import in_jax, two_grids

SPECS = [
    dm.P("a", "b"),
    dm.P(("a", "b"), "c"),
    dm.P(("c", "a"), "b"),
    dm.P(("b", "a")),
    dm.P(None, ("c", "b", "a")),
    dm.P("ca"),
    dm.P(),
]


@in_jax()
def test_every_shard_is_the_slice_that_the_spec_gives_its_rank():
    import jax

    spec_of = dm.TopologySpec({"a": 2, "b": 2, "c": 2}, combined={"ca": ("c", "a")})
    state = dm.init_parallel_state(spec=spec_of, ranks=(3, 1, 0, 2, 7, 4, 6, 5))
    whole = np.arange(64.0).reshape(8, 8)
    for spec in SPECS:
        placed = dm.distribute(whole, spec)
        for shard in placed.addressable_shards:
            rank = state.grid_rank(jax.devices().index(shard.device))
            np.testing.assert_array_equal(np.asarray(shard.data), whole[slices_of(state.topology, spec, (8, 8), rank)])
        np.testing.assert_array_equal(dm.to_numpy(placed), whole)
        assert dm.shard_local(whole, spec).sharding == placed.sharding == state.sharding(spec)


@in_jax()
def test_pspec_is_exact_and_refuses_partial():
    from jax.sharding import PartitionSpec

    states = two_grids()
    assert states["talker"].pspec("dp", None, ("sp", "tp")) == PartitionSpec(("atom_4x2", "atom_2x1"), None, None)
    assert states["dense"].pspec(("sp", "dp")) == PartitionSpec(("atom_2x1", "atom_4x2"))
    with pytest.raises(ShardingError, match="partial over dp"):
        states["dense"].pspec(partial="dp")


@in_jax()
@pytest.mark.parametrize("given", ["numpy", "uncommitted", "committed"])
def test_constrain_works_inside_and_outside_jit(given):
    import jax
    import jax.numpy as jnp

    state = two_grids()["dense"]
    x = {
        "numpy": np.arange(8.0),
        "uncommitted": jnp.arange(8.0),
        "committed": dm.distribute(np.arange(8.0), dm.P("sp")),
    }
    for run in (lambda x: dm.constrain(x, dm.P("dp")), jax.jit(lambda x: dm.constrain(x, dm.P("dp")) * 1)):
        y = run(x[given])
        assert y.sharding.is_equivalent_to(state.sharding(dm.P("dp")), 1)
        assert y.addressable_shards[0].data.shape == (2,)
    baked = jax.jit(lambda: dm.constrain(np.arange(8.0), dm.P("dp")))()
    assert baked.addressable_shards[0].data.shape == (2,)


@in_jax()
def test_mistakes_are_named():
    two_grids()
    with pytest.raises(ShapeError, match="dim 0 has size 6"):
        dm.distribute(np.arange(6.0), dm.P("dp"))
    with pytest.raises(ShapeError, match="dim 0 has size 6"):
        dm.constrain(np.arange(6.0), dm.P("dp"))
    with pytest.raises(ShardingError, match="partial over sp"):
        dm.distribute(np.arange(8.0), dm.P("dp", partial="sp"))
    with pytest.raises(ArgumentError, match="constrain: called inside shard_map"):
        dm.shard_map(lambda x: dm.constrain(x, dm.P("dp")), dm.P("dp"), dm.P("dp"))(np.arange(8.0))


@in_jax()
def test_host_objects_are_copies():
    two_grids()
    value = {"step": [1]}
    got = dm.host.broadcast(value, "dp", src=1)
    assert got == value
    assert got is not value
    assert dm.host.all_gather(value, "sp") == [value, value]
    dm.host.barrier()
