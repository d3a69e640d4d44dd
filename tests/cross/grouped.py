"""Collectives over any partition of a state's ranks: run on a backend, and what numpy says they are.

Blocks differ in every element and on every rank. The objective is the sum over ranks of a weighted sum of each result.
"""

import numpy as np

import dualmesh as dm
from tests.contract import oracle
from tests.worlds import compiled

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


def blocks_of(count, side, seed=0):
    """Return a block per rank, (count, side, side), and weights of the same shape."""
    draw = np.random.default_rng(seed)
    return draw.normal(size=(2, count, side, side))


def found(spec, calls, side, ranks=None):
    """Register a state; return {(axis, verb, settings): (results, gradients)} by its world, or None outside."""
    state = dm.init_parallel_state(spec=spec, ranks=ranks)
    if not state.is_member:
        return None
    x, w = (dm.distribute(array, dm.P("world")) for array in blocks_of(state.size("world"), side))
    return {call: _one(state, call, x, w) for call in calls}


def _one(state, call, x, w):
    axis, verb, settings = call

    def result(x):
        return getattr(dm.ops, verb)(x[0], axis, **dict(settings))[None, ...]

    world = dm.P("world")
    value = dm.to_numpy(compiled(dm.shard_map(result, world, world))(x))
    if state.backend == "sim":
        return value, None

    def objective(x, w):
        y = result(x)
        return dm.ops.all_reduce((y * w[0].reshape(-1)[: y[0, 0].shape[0]]).sum(), "world")

    lifted = dm.shard_map(objective, (world, world), dm.P())
    return value, dm.to_numpy(compiled(dm.value_and_grad(lifted))(x, w)[1])


def expected(groups, order, call, side):
    """Return (results, gradients) over the ranks `order`, from groups of these ranks in index order."""
    _, verb, settings = call
    x, w = blocks_of(len(order), side)
    place = {rank: position for position, rank in enumerate(order)}
    values, gradients = [None] * len(order), [None] * len(order)
    for group in groups:
        at = [place[rank] for rank in group]
        found = oracle.forward(verb, [x[i] for i in at], len(group), **dict(settings))
        weights = [np.broadcast_to(w[i].reshape(-1)[: y.shape[-1]], y.shape) for i, y in zip(at, found, strict=True)]
        back = oracle.backward(verb, weights, len(group), **dict(settings))
        for i, y, d in zip(at, found, back, strict=True):
            values[i], gradients[i] = y, d
    return np.stack(values), np.stack(gradients)


def calls_over(axes, verbs):
    """Return calls as hashable data: every verb over every axis."""
    return [(axis, verb, tuple(settings.items())) for axis in axes for verb, settings in verbs]


def check(answers, partitions, order, side):
    """Compare what every process found with numpy; `partitions` has the groups of each axis."""
    members = [answer for answer in answers if answer is not None]
    assert members
    for answer in members:
        for call, (value, gradient) in answer.items():
            wanted, wanted_gradient = expected(partitions[call[0]], order, call, side)
            np.testing.assert_allclose(value, wanted, rtol=1e-12, err_msg=str(call))
            if gradient is not None:
                np.testing.assert_allclose(gradient, wanted_gradient, rtol=1e-12, atol=1e-12, err_msg=str(call))
