"""Unequal exchanges and the tensor-parallel pair: torch, JAX and sim against numpy, values and gradients, float64."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.testing import compare_places

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


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_rows_arrive_by_sender_and_gradients_go_back(world_size):
    draw = np.random.default_rng(world_size)
    x, counts = draw.normal(size=(world_size * MOST, WIDTH)), counts_of(world_size, seed=world_size)
    wanted, source = exchanged(x, counts)

    def pullback(weight):
        gradient = np.zeros_like(x)
        gradient[source[source >= 0]] = weight[source >= 0]
        return [gradient]

    compare_places(
        lambda x, send, receive: dm.ops.ragged_all_to_all(x, "dp", send[0], receive[0], rows=ROOM),
        *([x, counts, np.ascontiguousarray(counts.T)], dm.P("dp"), dm.P("dp"), dm.parallel_spec(dp_size=world_size)),
        wrt=[0],
        expected=wanted,
        pullback=pullback,
        rtol=0,
    )


def block(x, first, second):
    """Return the output of a two-layer tensor-parallel block, on every index of tp, by per-rank code."""
    hidden = dm.ops.enter(x, "tp") @ first
    return dm.ops.leave(hidden * hidden @ second, "tp")[None, ...]


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_the_pair_counts_what_each_index_has_of_the_loss_once(world_size):
    draw = np.random.default_rng(world_size)
    size = world_size // 2
    width = 4 * size
    x, first, second = (draw.normal(size=shape) for shape in ((6, width), (width, 2 * width), (2 * width, 5)))
    hidden = x @ first
    y = hidden * hidden @ second

    def pullback(weight):
        """Each index of tp uses its own weights for its own columns; what enters gets the sum, on each index."""
        own = np.repeat(np.arange(size), 2 * width // size)  # whose column it is
        d_hidden = 2 * hidden * np.einsum("cbo,co->bc", weight[own], second)
        d_second = np.einsum("bc,cbo->co", hidden * hidden, weight[own])
        return size * (d_hidden @ first.T), x.T @ d_hidden, d_second

    compare_places(
        block,
        *([x, first, second], [dm.P("dp"), dm.P(None, "tp"), dm.P("tp")], dm.P("tp", "dp")),
        dm.parallel_spec(dp_size=2, tp_size=size),
        wrt=(0, 1, 2),
        expected=np.stack([y] * size),
        pullback=pullback,
    )
