"""Token means and global norms: torch, JAX and sim against numpy; ranks without tokens, uneven micro-batches."""

import numpy as np
import pytest

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


def means(cases):
    """Return, per case, the sum over ranks of the objectives, the values that ranks see, and the gradient by w."""
    from array_api_compat import array_namespace

    import dualmesh as dm

    state = dm.init_parallel_state(ulysses_size=2, dp_size=2)

    def each(w, x, held, axis=None):
        xp = array_namespace(w)
        total = None if x.shape[0] == 1 else dm.ops.all_reduce(xp.sum(held), "dp_sp")
        found = [
            dm.token_mean(xp.sum((w * x[i]) ** 2 * held[i]), xp.sum(held[i]), axis, total=total)
            for i in range(x.shape[0])
        ]
        objective, value = (sum(part) for part in zip(*found, strict=True))
        return dm.ops.all_reduce(objective, "dp_sp"), xp.reshape(value, (1,))

    answers = []
    for x, held in cases:
        spec = dm.P(None, "dp_sp")
        specs = (dm.P(), spec, spec)
        inputs = [dm.distribute(one, own) for one, own in zip((np.array(1.5), x, held), specs, strict=True)]
        answer = [dm.to_numpy(y) for y in dm.shard_map(each, specs, (dm.P(), dm.P("dp_sp")))(*inputs)]
        if state.backend != "sim":
            loss = dm.shard_map(lambda *x: each(*x)[0], specs, dm.P())
            answer.append(dm.to_numpy(dm.value_and_grad(loss)(*inputs)[1]))
        answers.append(answer)
    return answers


@pytest.mark.parametrize("backend", ["sim", "torch", "jax"])
def test_objectives_add_up_to_the_mean_over_all_tokens(backend):
    cases = [batches(counts) for counts in COUNTS]
    for answers in wide_worlds()[backend](means, cases, world_size=4):
        for (x, held), answer in zip(cases, answers, strict=True):
            mean = np.sum((1.5 * x) ** 2 * held) / max(held.sum(), 1)
            wanted = (mean, np.full(4, mean), 2 * mean / 1.5)
            for found, value in zip(answer, wanted, strict=backend != "sim"):
                np.testing.assert_allclose(found, value, rtol=1e-14)


def norms(values):
    """Return the norms of arrays laid out in several ways, in one tree."""
    import dualmesh as dm

    dm.init_parallel_state(dp_shard_size=2, tp_size=2, ep_size=2)
    specs = (dm.P(), dm.P("dp", "tp"), dm.P("tp"), dm.P("ep"))
    laid_out = {str(i): dm.distribute(x, spec) for i, (x, spec) in enumerate(zip(values, specs, strict=True))}
    tree = {"one": laid_out, "two": [laid_out["1"]]}
    return [float(dm.to_numpy(dm.global_norm(tree, order))) for order in (2, 1, 3, float("inf"))]


@pytest.mark.parametrize("backend", ["sim", "torch", "jax"])
def test_every_array_counts_once_in_a_global_norm(backend):
    draw = np.random.default_rng(4)
    values = [draw.normal(size=(4, 6)) * scale for scale in (1, 2, 3, 4)]
    flat = np.concatenate([x.reshape(-1) for x in (*values, values[1])])
    wanted = [np.linalg.norm(flat, order) for order in (2, 1, 3, np.inf)]
    for found in wide_worlds()[backend](norms, values, world_size=4):
        np.testing.assert_allclose(found, wanted, rtol=1e-13)


def block_norms(x):
    """Return norms, of several orders, of blocks that differ along tp only."""
    import dualmesh as dm

    dm.init_parallel_state(dp_size=2, tp_size=2)
    orders = (2, 3, float("inf"))
    each = dm.shard_map(lambda x: tuple(dm.global_norm([x], order, "tp") for order in orders), dm.P("tp"), dm.P())
    return [float(dm.to_numpy(norm)) for norm in each(dm.distribute(x, dm.P("tp")))]


@pytest.mark.parametrize("backend", ["sim", "torch", "jax"])
def test_blocks_along_an_axis_count_as_one_array(backend):
    x = np.random.default_rng(6).normal(size=(4, 3))
    wanted = [np.linalg.norm(x.reshape(-1), order) for order in (2, 3, np.inf)]
    for found in wide_worlds()[backend](block_norms, x, world_size=4):
        np.testing.assert_allclose(found, wanted, rtol=1e-14)


def plain_norms():
    """Return norms of plain blocks: equal ones, ones split over tp; and what a wrong order says."""
    import torch

    import dualmesh as dm

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
    import dualmesh as dm
    from dualmesh.solo import solo_state

    solo_state.cache_clear()  # it warns once in a process
    with pytest.warns(UserWarning, match="single-process"):
        assert dm.global_norm({"a": np.array([3.0]), "b": np.array([[4.0]])}) == 5.0
