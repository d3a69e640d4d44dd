"""Global arrays and their shardings in JAX's own words."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import ArgumentError, ShapeError, ShardingError
from dualmesh.sharding.partition_spec import slices_of
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


def donated(x):
    """Give an array away to a program that adds one, and say what the program made of it."""
    import jax

    return np.asarray(jax.jit(lambda x: x + 1, donate_argnums=0)(x))


@in_jax()
def test_what_is_made_of_a_jax_array_outlives_its_donation_and_the_other_way_round():
    """Same layout, another one, blocks, plans and fresh models: each array has memory of its own."""
    import jax
    import jax.numpy as jnp

    two_grids()
    whole = np.arange(64, dtype=np.float32).reshape(16, 4)
    split, spread = dm.P("dp"), dm.P()
    plan = dm.ShardingPlan({"*": split})

    def placed(where):
        return {
            "one device": lambda: jnp.asarray(whole),
            "split": lambda: dm.distribute(whole, split),
            "everywhere": lambda: dm.distribute(whole, spread),
        }[where]()

    ways = {
        "distribute, split": lambda x: dm.distribute(x, split),
        "distribute": lambda x: dm.distribute(x, spread),
        "shard_local": lambda x: dm.shard_local(x, split),
        "plan.apply": lambda x: plan.apply({"w": x})["w"],
        "init_sharded": lambda x: dm.init_sharded(lambda x: {"w": x}, plan, x)["w"],
        "transfer": lambda x: dm.transfer({"w": x}, src="dense", dst="talker", specs=plan)["w"],
        "transfer, same": lambda x: dm.transfer({"w": x}, src="dense", dst="dense", specs=plan)["w"],
    }
    for how, make in ways.items():
        for where in ("one device", "split", "everywhere"):
            if how.startswith("transfer") and where != "split":
                continue
            given = placed(where)
            made = make(given)
            np.testing.assert_array_equal(donated(given), whole + 1, err_msg=f"{how}, {where}")
            np.testing.assert_array_equal(np.asarray(made), whole, err_msg=f"{how}, {where}")
            given = placed(where)
            np.testing.assert_array_equal(donated(make(given)), whole + 1, err_msg=f"{how}, {where}")
            np.testing.assert_array_equal(np.asarray(given), whole, err_msg=f"{how}, {where}")
    key = jax.random.key(3)
    spread_key = dm.distribute(key, spread)
    assert jax.random.key_data(spread_key).tolist() == jax.random.key_data(key).tolist()


@in_jax()
def test_what_came_by_dlpack_from_memory_of_another_is_copied():
    """The owner fills its memory anew at once; also what a lifted function was given may be."""
    import jax.numpy as jnp

    two_grids()
    room = np.empty(4 * 1024 + 64, np.uint8)
    start = -room.ctypes.data % 64
    buffer = room[start : start + 4 * 1024].view(np.float32).reshape(16, 64)
    whole = np.arange(1024, dtype=np.float32).reshape(16, 64)
    doubled = dm.shard_map(lambda x: 2 * x, dm.P("dp"), dm.P("dp"))
    for spec in (dm.P("dp"), dm.P(), dm.P(None, "dp")):
        for make in (dm.distribute, dm.shard_local) if spec.axes != ("dp",) else (dm.distribute,):
            buffer[...] = whole
            made = make(jnp.from_dlpack(buffer), spec)
            buffer[...] = -1
            np.testing.assert_array_equal(dm.to_numpy(made), whole)
    buffer[...] = whole
    result = doubled(buffer)
    buffer[...] = -1
    np.testing.assert_array_equal(dm.to_numpy(result), 2 * whole)


@in_jax()
def test_random_keys_are_refused_by_name_where_numbers_are_padded_or_compared():
    import jax

    from dualmesh.errors import ArrayTypeError

    dm.init_parallel_state(dp_size=8)
    keys = jax.random.split(jax.random.key(0), 3)
    for value in (None, 0):
        with pytest.raises(ArrayTypeError, match=r"pad_sequence: found dtype key<fry>, shape \(3,\).*key_data"):
            dm.sequence.pad_sequence(keys, 0, "dp", value=value)
    with pytest.raises(ArrayTypeError, match=r"^distribute with check=True: found random keys.*key_data"):
        dm.distribute(keys, dm.P(), check=True)
