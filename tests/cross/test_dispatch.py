"""Unequal exchanges and the tensor-parallel pair: torch, JAX and sim against numpy, values and gradients, float64."""

import numpy as np
import pytest

from tests.worlds import wide_worlds

MOST, ROOM, WIDTH = 7, 18, 3


def counts_of(world_size, seed):
    """Return how many rows each index sends to each, zeros among them, at most MOST from one."""
    draw = np.random.default_rng(seed)
    counts = draw.integers(0, max(MOST // world_size, 1) + 2, (world_size, world_size))
    while (counts.sum(1) > MOST).any() or (counts.sum(0) > ROOM).any():
        counts = np.maximum(counts - draw.integers(0, 2, counts.shape), 0)
    return counts


def exchanged(x, counts):
    """Return the global result and, by row of it, the row of `x` that it is (-1: none)."""
    size = len(counts)
    result, source = np.zeros((size * ROOM, *x.shape[1:])), np.full(size * ROOM, -1)
    for receiver in range(size):
        row = receiver * ROOM
        for sender in range(size):
            first = sender * MOST + counts[sender, :receiver].sum()
            for moved in range(counts[sender, receiver]):
                result[row], source[row] = x[first + moved], first + moved
                row += 1
    return result, source


def ragged_runs(x, weight, counts):
    """Return the exchanged rows, and the gradient of their weighted sum (none on sim)."""
    from array_api_compat import array_namespace

    import dualmesh as dm

    state = dm.init_parallel_state(dp_size=len(counts))
    spec = dm.P("dp")
    inputs = [dm.distribute(array, spec) for array in (x, weight, counts, np.ascontiguousarray(counts.T))]

    def exchange(x, weight, send, receive):
        y = dm.ops.ragged_all_to_all(x, "dp", send[0], receive[0], rows=ROOM)
        return y, dm.ops.all_reduce(array_namespace(y).sum(y * weight), "dp")

    answer = [dm.to_numpy(dm.shard_map(exchange, (spec,) * 4, (spec, dm.P()))(*inputs)[0])]
    if state.backend != "sim":
        loss = dm.shard_map(lambda *x: exchange(*x)[1], (spec,) * 4, dm.P())
        answer.append(dm.to_numpy(dm.value_and_grad(loss)(*inputs)[1]))
    return answer


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("backend", ["sim", "torch", "jax"])
def test_rows_arrive_by_sender_and_gradients_go_back(backend, world_size):
    draw = np.random.default_rng(world_size)
    x, weight = draw.normal(size=(world_size * MOST, WIDTH)), draw.normal(size=(world_size * ROOM, WIDTH))
    counts = counts_of(world_size, seed=world_size)
    expected, source = exchanged(x, counts)
    gradient = np.zeros_like(x)
    gradient[source[source >= 0]] = weight[source >= 0]
    for answer in wide_worlds()[backend](ragged_runs, x, weight, counts, world_size=world_size):
        for found, wanted in zip(answer, (expected, gradient), strict=backend != "sim"):
            np.testing.assert_array_equal(found, wanted)


def refused_runs():
    """Return what each wrong call says."""
    import dualmesh as dm

    dm.init_parallel_state(dp_size=2)
    x = dm.distribute(np.arange(8.0).reshape(8, 1), dm.P("dp"))
    wrong = {
        "few counts": lambda x: dm.ops.ragged_all_to_all(x, "dp", [1], [1, 1]),
        "too many rows": lambda x: dm.ops.ragged_all_to_all(x, "dp", [4, 4], [1, 1]),
        "no room": lambda x: dm.ops.ragged_all_to_all(x, "dp", [1, 1], [1, 1], rows=1),
        "negative": lambda x: dm.ops.ragged_all_to_all(x, "dp", [-1, 1], [1, 1]),
        "no counts": lambda x: dm.ops.ragged_all_to_all(x, "dp", ["a", 1], [1, 1]),
        "bool sum": lambda x: dm.ops.leave(x > 0, "dp"),
    }
    said = {}
    for name, call in wrong.items():
        try:
            dm.shard_map(call, dm.P("dp"), dm.P("dp"))(x)
        except dm.DualmeshError as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


@pytest.mark.parametrize("backend", ["sim", "torch", "jax"])
def test_wrong_counts_are_refused_by_name(backend):
    for said in wide_worlds()[backend](refused_runs, world_size=2):
        assert "send_counts has shape (1,). Give one count per index: (2,)" in said["few counts"]
        assert "send_counts=(4, 4) add up to 8, more than the 4 rows" in said["too many rows"]
        assert "recv_counts=(1, 1) add up to 2, more than the 1 rows" in said["no room"]
        assert "send_counts=(-1, 1) has a negative count" in said["negative"]
        assert "are no counts" in said["no counts"]
        assert "the sum of bool values is not defined" in said["bool sum"]


def pair_runs(x, first, second):
    """Return the output of a two-layer tensor-parallel block and its gradients, by per-rank code that uses the pair."""
    import dualmesh as dm

    state = dm.init_parallel_state(dp_size=2, tp_size=len(first) // 4)
    columns, rows = dm.P(None, "tp"), dm.P("tp")

    def block(x, first, second):
        hidden = dm.ops.enter(x, "tp") @ first
        y = dm.ops.leave(hidden * hidden @ second, "tp")
        return dm.ops.all_reduce((y * y).sum(), "dp"), y

    specs = (dm.P("dp"), columns, rows)
    inputs = [dm.distribute(array, spec) for array, spec in zip((x, first, second), specs, strict=True)]
    answer = [dm.to_numpy(dm.shard_map(block, specs, (dm.P(), dm.P("dp")))(*inputs)[1])]
    if state.backend != "sim":
        # shard_map hands 1 / size of the cotangent to each index that holds the result; per-rank code counts it once.
        size = state.size("tp")
        loss = dm.shard_map(lambda *x: block(*x)[0] * size, specs, dm.P())
        answer += [dm.to_numpy(g) for g in dm.value_and_grad(loss, argnums=(1, 2))(*inputs)[1]]
    return answer


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("backend", ["sim", "torch", "jax"])
def test_the_pair_counts_a_replicated_loss_once(backend, world_size):
    draw = np.random.default_rng(world_size)
    width = 4 * (world_size // 2)
    x, first, second = (draw.normal(size=shape) for shape in ((6, width), (width, 2 * width), (2 * width, 5)))
    hidden = x @ first
    y = hidden * hidden @ second
    d_hidden = 2 * hidden * (2 * y @ second.T)
    expected = (y, x.T @ d_hidden, (hidden * hidden).T @ (2 * y))
    for answer in wide_worlds()[backend](pair_runs, x, first, second, world_size=world_size):
        for found, wanted in zip(answer, expected, strict=backend != "sim"):
            np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-9)
