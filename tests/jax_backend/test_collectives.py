"""The collectives as JAX sees them: where they are refused, what they add to a program, which bits they keep."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import ArrayTypeError, NotDifferentiableError, OutsideShardMapError
from tests.jax_backend.worker import in_jax, two_grids

GRID = {"a": 2, "b": 2, "c": 2}
EVERYWHERE = dm.P(("a", "b", "c"))


def grid():
    """Register a 2 x 2 x 2 grid."""
    return dm.init_parallel_state(spec=dm.TopologySpec(GRID))


@in_jax()
@pytest.mark.parametrize("place", ["eager", "jit", "grad", "vmap", "scan", "index", "partial"])
def test_outside_shard_map_is_refused_by_name(place):
    import jax
    import jax.numpy as jnp

    grid()
    x = jnp.arange(8.0)

    def total(x):
        return dm.ops.all_reduce(x, "b")

    runs = {
        "eager": lambda: total(x),
        "jit": lambda: jax.jit(total)(x),
        "grad": lambda: jax.grad(lambda x: total(x).sum())(x),
        "vmap": lambda: jax.vmap(total)(x[None]),
        "scan": lambda: jax.lax.scan(lambda c, y: (c + total(y), None), 0.0, x),
        "index": lambda: dm.ops.axis_index("b"),
        "partial": lambda: dm.shard_map(total, dm.P("a"), dm.P("a"), axes=("a",))(x),
    }
    with pytest.raises(OutsideShardMapError, match=r"axis 'b' of State 'base' is not split here.*dm\.shard_map"):
        runs[place]()


@in_jax()
def test_a_shard_map_over_another_mesh_is_outside():
    two_grids()
    lifted = dm.shard_map(lambda x: dm.ops.all_reduce(x, "dp"), dm.P("dp"), dm.P())
    small = dm.init_parallel_state(spec=dm.TopologySpec({"dp": 4}), ranks=(0, 1, 2, 3), name="small")

    def inside(x):
        return dm.ops.all_reduce(x, "dp", state=small)

    np.testing.assert_array_equal(np.asarray(lifted(np.arange(8.0))), [12.0, 16.0])
    with pytest.raises(OutsideShardMapError, match="'small'"):
        dm.shard_map(inside, dm.P("dp"), dm.P())(np.arange(8.0))


@in_jax()
def test_arrays_of_others_are_refused_by_name():
    grid()
    run = dm.shard_map(lambda x: dm.ops.all_reduce(memoryview(b"ab").cast("B", (2,)), "a"), EVERYWHERE, dm.P())
    with pytest.raises(ArrayTypeError, match="memoryview"):
        run(np.arange(8.0))


@in_jax()
def test_indices_are_traced_inside_and_refused_outside():
    from dualmesh.errors import RankError

    state = dm.init_parallel_state(dp_size=4, ulysses_size=2)

    def indices(x):
        found = [state.index("sp"), state.data_index, dm.ops.axis_index(("sp", "dp")), state.is_writer() * 1]
        return tuple(x * 0 + index for index in found)

    spec = dm.P(("dp", "sp"))
    found = dm.shard_map(indices, spec, (spec,) * 4)(np.zeros(8, np.int32))
    expected = [[state.index(axis, rank) for rank in range(8)] for axis in ("sp", "dp", ("sp", "dp"))]
    assert [np.asarray(part).tolist() for part in found] == [*expected, [1, 0, 0, 0, 0, 0, 0, 0]]
    with pytest.raises(RankError, match=r"inside dm\.shard_map"):
        state.index("sp")
    assert state.index("tp") == 0


@in_jax()
def test_a_permutation_along_axes_against_mesh_order_counts_in_listed_order():
    state = grid()
    for axis in (("c", "a"), ("b", "a"), ("c", "b", "a"), ("a", "c")):
        moved = dm.shard_map(lambda x, axis=axis: dm.ops.shift(x, axis, 1), EVERYWHERE, EVERYWHERE)(np.arange(8.0))
        expected = np.zeros(8)
        for group in state.topology.partition(axis):
            expected[group] = np.roll(group, 1)
        np.testing.assert_array_equal(np.asarray(moved), expected)


@in_jax()
def test_broadcast_moves_every_bit_and_its_gradient_sums_to_src():
    import jax
    import jax.numpy as jnp

    grid()
    nan = np.array([0x7FC12345], np.uint32).view(np.float32)[0]
    special = np.array([-0.0, nan, np.inf, 1e-45], np.float32)
    blocks = np.concatenate([np.full(4, np.nan, np.float32)] * 5 + [special] + [np.ones(4, np.float32)] * 2)
    axis = ("a", "b", "c")
    sent = dm.shard_map(lambda x: dm.ops.broadcast(x, axis, src=5), EVERYWHERE, EVERYWHERE)
    for dtype in (np.float32, jnp.bfloat16, np.float16, np.int8, np.complex64, np.bool_):
        given = blocks.astype(dtype) if dtype != np.int8 else np.arange(32, dtype=np.int8)
        got = np.asarray(sent(given))
        assert got.dtype == given.dtype
        assert got.tobytes() == np.tile(given[20:24], 8).tobytes()
    weights = np.arange(32.0, dtype=np.float32)
    gradient = jax.grad(lambda x: (sent(x) * weights).sum())(np.ones(32, np.float32))
    expected = np.zeros(32)
    expected[20:24] = weights.reshape(8, 4).sum(0)
    np.testing.assert_array_equal(np.asarray(gradient), expected)


@in_jax()
def test_max_is_refused_where_it_is_differentiated_and_only_there():
    import jax

    grid()

    def above(x):
        return dm.shard_map(lambda x: x - dm.ops.all_reduce(x, "a", "max"), EVERYWHERE, EVERYWHERE)(x).sum()

    def cut(x):
        stop = jax.lax.stop_gradient
        return dm.shard_map(lambda x: x - dm.ops.all_reduce(stop(x), "a", "max"), EVERYWHERE, EVERYWHERE)(x).sum()

    x = np.arange(8.0)
    assert float(above(x)) == float(jax.jit(above)(x)) == -16.0
    np.testing.assert_array_equal(np.asarray(jax.grad(cut)(x)), np.ones(8))
    for wrong in (above, jax.jit(above)):
        with pytest.raises(NotDifferentiableError, match=r"op='max'.*'a' has no gradient"):
            jax.grad(wrong)(x)


@in_jax()
def test_plain_numbers_are_reduced_outside_shard_map_and_refused_where_jit_would_bake_them_in():
    import jax

    dm.init_parallel_state(dp_size=4, tp_size=2)
    assert dm.ops.all_reduce(1.5, "dp") == 6.0
    assert dm.ops.all_reduce(np.float64(1.5), ("dp", "tp"), "mean") == 1.5
    assert dm.ops.all_reduce(3, "tp", "max") == 3
    assert dm.ops.broadcast(True, "tp", src=1) is True
    with pytest.raises(ArrayTypeError, match="the mean of integer values"):
        dm.ops.all_reduce(3, "dp", "mean")
    with pytest.raises(ArrayTypeError, match="float"):
        jax.jit(lambda x: x * dm.ops.all_reduce(1.5, "dp"))(1.0)


@in_jax()
def test_counts_of_a_ragged_exchange_are_integers():
    grid()

    def run(x, counts):
        return dm.ops.ragged_all_to_all(x[0], "b", counts[0], counts[0], rows=4)[None]

    with pytest.raises(ArrayTypeError, match=r"send_counts are float32\. Counts are integers"):
        dm.shard_map(run, EVERYWHERE, EVERYWHERE)(np.ones((8, 4, 2)), np.ones((8, 2), np.float32))


@in_jax()
def test_unequal_runs_arrive_by_sender_and_their_gradient_goes_back():
    import jax
    import jax.numpy as jnp

    grid()
    counts = np.array([[1, 2], [3, 0]])  # rows that index i of "b" sends to index j
    x = np.arange(8 * 4 * 2.0).reshape(8, 4, 2)

    def run(x, sent, received):
        return dm.ops.ragged_all_to_all(x[0], "b", sent[0], received[0], rows=5)[None]

    at = [rank // 2 % 2 for rank in range(8)]
    sent, received = jnp.asarray(counts[at]), jnp.asarray(counts.T[at])
    lifted = dm.shard_map(run, (EVERYWHERE,) * 3, EVERYWHERE)
    expected = np.zeros((8, 5, 2))
    for rank in range(8):
        first, second = rank & ~2, rank | 2
        starts = counts.cumsum(1) - counts
        parts = [x[r][starts[i, at[rank]] :][: counts[i, at[rank]]] for i, r in enumerate((first, second))]
        arrived = np.concatenate(parts)
        expected[rank, : len(arrived)] = arrived
    np.testing.assert_array_equal(np.asarray(lifted(x, sent, received)), expected)
    weights = np.random.default_rng(0).normal(size=(8, 5, 2)).astype(np.float32)
    gradient = jax.grad(lambda x: (lifted(x, sent, received) * weights).sum())(x.astype(np.float32))
    for direction in np.random.default_rng(1).normal(size=(3, *x.shape)):
        moved = np.asarray(lifted(direction.astype(np.float32), sent, received))
        np.testing.assert_allclose((moved * weights).sum(), (np.asarray(gradient) * direction).sum(), rtol=1e-4)


@in_jax()
def test_the_tensor_parallel_pair_sums_one_way():
    import jax

    grid()
    for verb, value, gradient in ((dm.ops.enter, 1.0, 2.0), (dm.ops.leave, 2.0, 1.0)):

        def run(x, verb=verb):
            y, back = jax.vjp(lambda x: verb(x, "b"), x)
            return y, back(jax.numpy.ones_like(x))[0]

        y, g = dm.shard_map(run, EVERYWHERE, (EVERYWHERE, EVERYWHERE))(np.ones(8, np.float32))
        np.testing.assert_array_equal(np.asarray(y), np.full(8, value))
        np.testing.assert_array_equal(np.asarray(g), np.full(8, gradient))
