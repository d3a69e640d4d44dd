"""Inputs that only some ranks use get the gradient of the global function, on every rank; nobody waits."""

import numpy as np

import dualmesh as dm
from tests.worlds import torch_world

X = np.array([1.0, 10.0])


def uneven_gradients():
    dm.init_parallel_state(tp_size=2)

    def either(x, first, second):
        return x.sum() * (first if dm.ops.axis_index("tp") == 0 else second)

    def some(x, weights):
        used = weights[:2] if dm.ops.axis_index("tp") == 0 else weights[1:]
        return x.sum() * sum(used)

    def one(x, w):
        return dm.ops.all_reduce(x.sum() * w if dm.ops.axis_index("tp") == 1 else x.sum(), "tp")

    partial = dm.P(partial="tp")
    runs = [
        (dm.shard_map(either, (dm.P("tp"), dm.P(), dm.P()), partial), (1, 2), (X, np.array(3.0), np.array(5.0))),
        (dm.shard_map(some, (dm.P("tp"), dm.P()), partial), (1,), (X, [np.array(w) for w in (2.0, 3.0, 5.0)])),
        (dm.shard_map(one, (dm.P("tp"), dm.P()), dm.P()), (0, 1), (X, np.array(3.0))),
    ]
    return [
        [
            np.asarray(dm.to_numpy(leaf)).tolist()
            for part in dm.value_and_grad(fn, at)(*args)[1]
            for leaf in leaves(part)
        ]
        for fn, at, args in runs
    ]


def leaves(part):
    return part if isinstance(part, list) else [part]


def test_ranks_may_use_different_inputs():
    for found in torch_world(uneven_gradients, world_size=2, timeout_s=60):
        assert found == [[1.0, 10.0], [1.0, 11.0, 10.0], [[1.0, 3.0], 10.0]]


def tied_and_narrow():
    import torch

    dm.init_parallel_state(dp_size=2)
    w = torch.ones(2, requires_grad=True)
    w.grad = torch.full((2,), 1.0 + dm.ops.axis_index("dp"))
    dm.sync_gradients({"embed": w, "head": w})
    loss = torch.tensor(8.0, dtype=torch.float16, requires_grad=True)
    objective, value = dm.token_mean(loss, 40_000)
    objective.backward()
    return w.grad.tolist(), objective.item(), value.item(), loss.grad.item()


def test_tied_parameters_are_summed_once_and_16_bits_count_no_tokens():
    for tied, objective, value, gradient in torch_world(tied_and_narrow, world_size=2):
        assert tied == [3.0, 3.0]
        np.testing.assert_allclose([objective, value], [1e-4, 2e-4], rtol=1e-6)
        np.testing.assert_allclose(gradient, 1 / 80_000, rtol=5e-3)
