"""Ulysses attention: torch, JAX and sim against dense attention in numpy, values and gradients, float64."""

import numpy as np
import pytest

from tests.cross.dense import attention, random_attention
from tests.worlds import wide_worlds

SHAPES = {  # world size: (dp, ulysses, kv heads)
    1: [(1, 1, 8), (1, 1, 2)],
    2: [(1, 2, 8), (2, 1, 2)],
    4: [(1, 4, 8), (2, 2, 2), (1, 4, 2)],
    8: [(1, 8, 8), (2, 4, 4), (4, 2, 8), (1, 8, 2)],
}
SIZES = {"batch": 4, "length": 16, "heads": 8, "dim": 3}


def ulysses_runs(cases, arrays):
    """Return, per case, the output and the gradients of query, key and value (no gradients on sim)."""
    from array_api_compat import array_namespace

    import dualmesh as dm

    def attend(query, key, value, weight):
        xp = array_namespace(query)
        query, key, value = (
            dm.sequence.gather_seq_scatter_heads(x, seq_dim=1, head_dim=2) for x in (query, key, value)
        )
        repeats = query.shape[2] // key.shape[2]
        key, value = xp.repeat(key, repeats, axis=2), xp.repeat(value, repeats, axis=2)
        query, key, value = (xp.permute_dims(x, (0, 2, 1, 3)) for x in (query, key, value))
        scores = query @ xp.permute_dims(key, (0, 1, 3, 2)) * query.shape[-1] ** -0.5
        weights = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
        mixed = weights / xp.sum(weights, axis=-1, keepdims=True) @ value
        mixed = dm.sequence.gather_heads_scatter_seq(xp.permute_dims(mixed, (0, 2, 1, 3)), seq_dim=1, head_dim=2)
        return dm.ops.all_reduce(xp.sum(mixed * weight), "world"), mixed

    answers = []
    for number, (dp, ulysses, kv_heads) in enumerate(cases):
        state = dm.init_parallel_state(dp_size=dp, ulysses_size=ulysses, name=str(number))
        with dm.use_parallel_state(state):
            spec = dm.P("dp", "sp")
            inputs = [dm.distribute(x, spec) for x in arrays[kv_heads]]
            run = dm.shard_map(attend, in_specs=(spec,) * 4, out_specs=(dm.P(), spec))
            answer = [dm.to_numpy(run(*inputs)[1])]
            if state.backend != "sim":
                loss = dm.shard_map(lambda *x: attend(*x)[0], in_specs=(spec,) * 4, out_specs=dm.P())
                answer += [dm.to_numpy(x) for x in dm.value_and_grad(loss, argnums=(0, 1, 2))(*inputs)[1]]
            answers.append(answer)
    return answers


@pytest.mark.parametrize("world_size", SHAPES)
@pytest.mark.parametrize("backend", ["sim", "torch", "jax"])
def test_ulysses_equals_dense_attention(backend, world_size):
    cases = SHAPES[world_size]
    arrays = {kv: random_attention(kv, kv_heads=kv, **SIZES) for kv in (2, 4, 8)}
    for answers in wide_worlds()[backend](ulysses_runs, cases, arrays, world_size=world_size):
        for (_, _, kv_heads), answer in zip(cases, answers, strict=True):
            expected = attention(*arrays[kv_heads], causal=False)
            for found, wanted in zip(answer, expected, strict=backend != "sim"):
                np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)
