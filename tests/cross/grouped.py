"""Collectives over any partition of a state's ranks, on every backend, held to what numpy says they are.

Blocks differ in every element and on every rank.
"""

import numpy as np

import dualmesh as dm
from dualmesh.testing import compare_places
from dualmesh.testing.contract import oracle

SLOW_S = 400.0  # eight processes on a busy machine

SHAPED = (
    ("all_gather", {"dim": 1}),
    ("reduce_scatter", {"dim": 0, "op": "sum"}),
    ("reduce_scatter", {"dim": 1, "op": "mean"}),
    ("all_to_all", {"split_dim": 1, "concat_dim": 0}),
    ("shift", {"offset": 1}),
    ("take_block", {"dim": 0}),
)
"""Verbs that need groups of one size where one program runs as all ranks."""

ANYWHERE = (
    ("all_reduce", {"op": "sum"}),
    ("all_reduce", {"op": "mean"}),
    ("broadcast", {"src": 0}),
    ("permute", {"pairs": ((0, 1), (1, 0))}),
)
"""Verbs that keep shapes, so that groups may differ in size, down to 2."""


def blocks_of(count, side, seed):
    """Return a block per rank, (count, side, side)."""
    return np.random.default_rng(seed).normal(size=(count, side, side))


def expected(groups, order, call, x, weights):
    """Return (results, gradients for weights of the results) over the ranks `order`, from groups in index order."""
    _, verb, settings = call
    place = {rank: position for position, rank in enumerate(order)}
    values, gradients = [None] * len(order), [None] * len(order)
    for group in groups:
        at = [place[rank] for rank in group]
        found = oracle.forward(verb, [x[i] for i in at], len(group), **settings)
        back = [None] * len(group)
        if weights is not None:
            back = oracle.backward(verb, [weights[i] for i in at], len(group), **settings)
        for i, y, d in zip(at, found, back, strict=True):
            values[i], gradients[i] = y, d
    return np.stack(values), gradients


def check(spec, partitions, order, side, verbs, *, world_size, ranks=None):
    """Hold every verb over every axis, on every backend, to numpy; `partitions` has the groups of each axis."""
    calls = [(axis, verb, settings) for axis in partitions for verb, settings in verbs]
    blocks = [blocks_of(len(order), side, seed) for seed in range(len(calls))]

    def every(*xs):
        pairs = zip(xs, calls, strict=True)
        return tuple(getattr(dm.ops, verb)(x[0], axis, **settings)[None, ...] for x, (axis, verb, settings) in pairs)

    def numpys(weights):
        cases = zip(calls, blocks, weights, strict=True)
        return [expected(partitions[call[0]], order, call, x, weight) for call, x, weight in cases]

    compare_places(
        every,
        blocks,
        *(dm.P("world"), dm.P("world"), spec),
        wrt=range(len(calls)),
        expected=tuple(value for value, _ in numpys([None] * len(calls))),
        pullback=lambda weights: [np.stack(gradients) for _, gradients in numpys(weights)],
        ranks=ranks,
        world_size=world_size,
        timeout_s=SLOW_S,
    )
