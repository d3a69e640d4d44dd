"""Token means and global norms: torch, JAX and sim against numpy; ranks without tokens, uneven micro-batches."""

import math

import numpy as np
import pytest
from array_api_compat import array_namespace

import dualmesh as dm
from dualmesh.testing import assert_same, compare_places
from tests.worlds import wide_worlds

COUNTS = [  # tokens per rank, per micro-batch
    [[3, 1, 4, 2]],
    [[0, 5, 0, 1]],
    [[0, 0, 0, 0]],
    [[3, 1, 4, 2], [1, 0, 0, 7]],
    [[0, 0, 0, 0], [2, 0, 1, 1]],
]
MOST = 7


def batches(counts):
    """Return values and marks of tokens, (micro-batches, ranks * MOST)."""
    draw = np.random.default_rng(3)
    held = np.arange(MOST) < np.array(counts)[..., None]
    return draw.normal(size=held.shape).reshape(len(counts), -1), held.reshape(len(counts), -1).astype(float)


def means(w, xs, marks):
    """Return, per case, the sum over ranks of the objectives, and the value that each rank sees."""
    xp = array_namespace(w)
    answers = []
    for x, held in zip(xs, marks, strict=True):
        total = None if x.shape[0] == 1 else dm.ops.all_reduce(xp.sum(held), "dp_sp")
        found = [
            dm.token_mean(xp.sum((w * x[i]) ** 2 * held[i]), xp.sum(held[i]), total=total) for i in range(x.shape[0])
        ]
        objective, value = (sum(part) for part in zip(*found, strict=True))
        answers.append((dm.ops.all_reduce(objective, "dp_sp"), xp.reshape(value, (1,))))
    return tuple(answers)


def test_objectives_add_up_to_the_mean_over_all_tokens():
    xs, marks = zip(*map(batches, COUNTS), strict=True)
    wanted = [np.sum((1.5 * x) ** 2 * held) / max(held.sum(), 1) for x, held in zip(xs, marks, strict=True)]
    tokens = dm.P(None, "dp_sp")
    compare_places(
        means,
        *([np.array(1.5), xs, marks], [dm.P(), tokens, tokens], tuple([(dm.P(), dm.P("dp_sp"))] * len(COUNTS))),
        dm.parallel_spec(ulysses_size=2, dp_size=2),
        wrt=[0],
        expected=tuple((mean, np.full(4, mean)) for mean in wanted),
        # The values, for the log, are cut off.
        pullback=lambda ws: [sum(w * 2 * mean / 1.5 for (w, _), mean in zip(ws, wanted, strict=True))],
        rtol=1e-13,
    )


def refused_means():
    """Return what is said of counts, totals and losses that cannot be, in a lifted function: on JAX a traced one."""
    dm.init_parallel_state(dp_size=2)
    said = {}

    def ask(name, make):
        def fn(x):
            xp = array_namespace(x)
            objective, value = make(xp, xp.sum(x))
            return xp.reshape(xp.stack([objective, value]), (1, 2))

        try:
            lifted = dm.shard_map(fn, dm.P("dp"), dm.P("dp"))
            said[name] = dm.to_numpy(lifted(dm.distribute(np.array([1.0, 2.0]), dm.P("dp")))).tolist()
        except dm.DualmeshError as error:
            said[name] = f"{type(error).__name__}: {error}"

    ask("negative", lambda xp, loss: dm.token_mean(loss, -3))
    ask("boolean", lambda xp, loss: dm.token_mean(loss, True))
    ask("boolean array", lambda xp, loss: dm.token_mean(loss, loss > 0))
    ask("vector", lambda xp, loss: dm.token_mean(loss, xp.stack([loss, loss])))
    ask("vector loss", lambda xp, loss: dm.token_mean(xp.reshape(loss, (1,)), 3))
    ask("integer loss", lambda xp, loss: dm.token_mean(xp.astype(loss, xp.int32), 3))
    ask("total 0", lambda xp, loss: dm.token_mean(loss, 3, total=0))
    ask("array total 0", lambda xp, loss: dm.token_mean(loss, 0, total=xp.astype(loss, xp.int32) * 0))
    ask("host total 0", lambda xp, loss: dm.token_mean(loss, 0, total=np.array(0)))
    ask("total less", lambda xp, loss: dm.token_mean(loss, 3, total=2))
    ask("nan", lambda xp, loss: dm.token_mean(loss, float("nan")))
    ask("nothing", lambda xp, loss: dm.token_mean(loss * math.nan, 0))
    ask("traced negative", lambda xp, loss: dm.token_mean(loss, xp.astype(loss, xp.int32) * 0 - 1))
    ask("traced total", lambda xp, loss: dm.token_mean(loss, 3, total=xp.astype(loss, xp.int32) * 0 + 2))
    return said


@pytest.mark.parametrize("backend", ["sim", "torch", "jax"])
def test_counts_totals_and_losses_that_cannot_be_are_refused(backend):
    """By name, on every rank; what cannot be looked at gives no number rather than a wrong mean."""
    for said in wide_worlds()[backend](refused_means, world_size=2):
        assert "count=-3" in said["negative"]
        for name, part in {
            "boolean": "count is True",
            "boolean array": "dtype",
            "vector": "count has shape (2,)",
            "vector loss": "loss_sum has shape (1,)",
            "integer loss": "loss_sum has dtype",
            "total 0": "total=0 for count=3",
            "host total 0": "total=array(0) for count=0",
            "total less": "total=2 for count=3",
            "nan": "count=nan",
        }.items():
            assert part in said[name], name
        assert said["nothing"] == [[0.0, 0.0]] * 2
        if backend == "jax":  # traced: nobody can look, and nothing over nothing is 0
            assert said["array total 0"] == [[0.0, 0.0]] * 2
        else:
            assert "more than 0" in said["array total 0"]
        for name in ("traced negative", "traced total"):
            assert "token_mean" in said[name] if isinstance(said[name], str) else np.isnan(said[name]).all()
            assert isinstance(said[name], str) == (backend != "jax")


ORDERS = (2, 1, 3, float("inf"))


def norms(values):
    """Return the norms of arrays laid out in several ways, in one tree."""
    dm.init_parallel_state(dp_shard_size=2, tp_size=2, ep_size=2)
    specs = (dm.P(), dm.P("dp", "tp"), dm.P("tp"), dm.P("ep"))
    laid_out = {str(i): dm.distribute(x, spec) for i, (x, spec) in enumerate(zip(values, specs, strict=True))}
    tree = {"one": laid_out, "two": [laid_out["1"]]}
    return {order: float(dm.to_numpy(dm.global_norm(tree, order))) for order in ORDERS}


@pytest.mark.parametrize("backend", ["sim", "torch", "jax"])
def test_every_array_counts_once_in_a_global_norm(backend):
    draw = np.random.default_rng(4)
    values = [draw.normal(size=(4, 6)) * scale for scale in (1, 2, 3, 4)]
    flat = np.concatenate([x.reshape(-1) for x in (*values, values[1])])
    wanted = {order: np.linalg.norm(flat, order) for order in ORDERS}
    for found in wide_worlds()[backend](norms, values, world_size=4):
        assert_same(f"norm on {backend}, order", wanted, found, rtol=1e-13)


def test_blocks_along_an_axis_count_as_one_array():
    x = np.random.default_rng(6).normal(size=(4, 3))
    compare_places(
        lambda x: tuple(dm.global_norm([x], order, "tp") for order in ORDERS),
        *([x], dm.P("tp"), dm.P(), dm.parallel_spec(dp_size=2, tp_size=2)),
        expected=tuple(np.linalg.norm(x.reshape(-1), order) for order in ORDERS),
        rtol=1e-13,
    )


def plain_norms():
    """Return norms of plain blocks: equal ones, ones split over tp; and what a wrong order says."""
    import torch

    state = dm.init_parallel_state(tp_size=2, dp_size=1)
    equal, split = torch.tensor([3.0, 0.0]), torch.tensor([3.0, 4.0])[state.index("tp")].reshape(1)
    said = []
    for order in (0, -1, "fro", True):
        try:
            dm.global_norm([equal], order)
        except dm.DualmeshError as error:
            said.append(str(error))
    none = dm.global_norm([], 2)
    return float(dm.global_norm([equal])), float(dm.global_norm([split], axis="tp")), float(none), said


def test_plain_blocks_count_as_equal_unless_an_axis_splits_them():
    for equal, split, none, said in wide_worlds()["torch"](plain_norms, world_size=2):
        assert (equal, split, none) == (3.0, 5.0, 0.0)
        assert len(said) == 4
        assert "ord=0. Give a number above 0, or inf" in said[0]


def test_before_any_state_one_process_has_all_there_is():
    from dualmesh.runtime.single_process import single_process_state

    single_process_state.cache_clear()  # it warns once in a process
    with pytest.warns(UserWarning, match="single-process"):
        assert dm.global_norm({"a": np.array([3.0]), "b": np.array([[4.0]])}) == 5.0
