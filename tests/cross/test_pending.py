"""Collectives under way: the same results and gradients as numpy's, on every backend, and nobody waits at the start."""

import numpy as np

import dualmesh as dm
from dualmesh.testing import compare_places
from tests.cross.grouped import blocks_of, expected
from tests.worlds import torch_world

VERBS = [
    ("all_reduce", {"op": "sum"}),
    ("all_reduce", {"op": "mean"}),
    ("all_gather", {"dim": 0}),
    ("all_gather", {"dim": 1}),
    ("reduce_scatter", {"dim": 1}),
    ("reduce_scatter", {"dim": 0, "op": "mean"}),
    ("all_to_all", {"split_dim": 1, "concat_dim": 0}),
]
GROUPS = {"tp": [[0, 1], [2, 3]], ("tp", "dp"): [[0, 2, 1, 3]], "cp": [[0], [1], [2], [3]]}
CALLS = [(axis, verb, settings) for verb, settings in VERBS for axis in GROUPS]


def under_way(x):
    """Return the results of all collectives on one block, all in the air at a time, waited for in reversed order."""
    started = [getattr(dm.ops, verb)(x[0], axis, **settings, async_=True) for axis, verb, settings in CALLS]
    results = [one.wait() for one in reversed(started)][::-1]
    again = [one.wait() for one in started]
    if not all(first is second for first, second in zip(results, again, strict=True)):
        raise ValueError("wait gave another result")
    return tuple(y[None, ...] for y in results)


def numpys(x, weights):
    """Return (results, gradients for weights of the results) of every call, over all ranks."""
    pairs = zip(CALLS, weights, strict=True)
    return [expected(GROUPS[call[0]], range(4), call, x, weight) for call, weight in pairs]


def test_results_and_gradients_are_numpys():
    x = blocks_of(4, 8, 0)
    compare_places(
        under_way,
        *([x], dm.P("world"), dm.P("world"), dm.parallel_spec(dp_size=2, tp_size=2)),
        wrt=[0],
        expected=tuple(values for values, _ in numpys(x, [None] * len(CALLS))),
        pullback=lambda weights: [sum(np.stack(gradients) for _, gradients in numpys(x, weights))],
        rtol=1e-13,
    )


def waited_for():
    """Return how long starting and waiting took while the other rank was late; its dtypes, and what max says."""
    import time

    import torch

    import dualmesh as dm

    state = dm.init_parallel_state(dp_size=2)
    rank = state.index("dp")
    dm.host.barrier()
    time.sleep(rank * 1.0)
    begun = time.monotonic()
    going = dm.ops.all_reduce(torch.ones(2), "dp", async_=True)
    started = time.monotonic() - begun
    total = going.wait().tolist()
    waited = time.monotonic() - begun
    flags = dm.ops.all_gather(torch.tensor([rank == 0]), "dp", async_=True).wait().tolist()
    whole = dm.ops.all_reduce(torch.tensor([1j * rank]), "dp", async_=True).wait().tolist()
    x = torch.ones(2, requires_grad=True)
    try:
        dm.ops.all_reduce(x, "dp", "max", async_=True).wait().sum().backward()
    except dm.DualmeshError as error:
        said = str(error)
    return started, waited, total, flags, whole, said


def test_starting_does_not_wait_for_late_ranks():
    first, _ = torch_world(waited_for, world_size=2)
    started, waited, total, flags, whole, said = first
    assert started < 0.5 < waited
    assert (total, flags, whole) == ([2.0, 2.0], [True, False], [1j])
    assert "has no gradient" in said
