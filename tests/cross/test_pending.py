"""Collectives under way: the same results and gradients as those that run to their end, on every backend."""

import numpy as np
import pytest

from tests.worlds import torch_world, wide_worlds

CALLS = [
    ("all_reduce", {"op": "sum"}),
    ("all_reduce", {"op": "mean"}),
    ("all_gather", {"dim": 0}),
    ("all_gather", {"dim": 1}),
    ("reduce_scatter", {"dim": 1}),
    ("reduce_scatter", {"dim": 0, "op": "mean"}),
    ("all_to_all", {"split_dim": 1, "concat_dim": 0}),
]


def both_ways(x, axes):
    """Return ([results, gradients] at once, the same under way), three collectives in the air at a time."""
    from array_api_compat import array_namespace

    import dualmesh as dm

    state = dm.init_parallel_state(dp_size=2, tp_size=2)
    calls = [(verb, axis, settings) for verb, settings in CALLS for axis in axes]

    def at_once(x):
        return [getattr(dm.ops, verb)(x, axis, **settings) for verb, axis, settings in calls]

    def under_way(x):
        started = [getattr(dm.ops, verb)(x, axis, **settings, async_=True) for verb, axis, settings in calls]
        results = [one.wait() for one in reversed(started)][::-1]
        again = [one.wait() for one in started]
        if not all(first is second for first, second in zip(results, again, strict=True)):
            raise ValueError("wait gave another result")
        return results

    answers = []
    for run in (at_once, under_way):

        def objective(x, run=run):
            xp = array_namespace(x)
            parts = [xp.sum(y**2) * (1 + place) for place, y in enumerate(run(x[0]))]
            return dm.ops.all_reduce(sum(parts), "world")

        world = dm.P("world")
        whole = dm.distribute(x, world)
        lifted = dm.shard_map(lambda x, run=run: tuple(y[None, ...] for y in run(x[0])), world, world)
        answer = [dm.to_numpy(y) for y in lifted(whole)]
        if state.backend != "sim":
            answer.append(dm.to_numpy(dm.value_and_grad(dm.shard_map(objective, world, dm.P()))(whole)[1]))
        answers.append(answer)
    return answers


@pytest.mark.parametrize("backend", ["sim", "torch", "jax"])
def test_results_and_gradients_are_those_of_the_blocking_call(backend):
    x = np.random.default_rng(0).normal(size=(4, 4, 8))
    for at_once, under_way in wide_worlds()[backend](both_ways, x, ("tp", ("tp", "dp"), "cp"), world_size=4):
        assert len(at_once) == 3 * len(CALLS) + (backend != "sim")
        for wanted, found in zip(at_once, under_way, strict=True):
            # Gradients are added up in the order of waiting.
            np.testing.assert_allclose(found, wanted, rtol=1e-13, atol=1e-12)


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
