"""Ring attention, alone and with Ulysses: torch, JAX and sim against dense attention in numpy, float64."""

import numpy as np
import pytest

from tests.cross.dense import attention, random_attention
from tests.worlds import wide_worlds

CASES = {  # world size: (dp, ulysses, cp, key/value heads, causal, balanced)
    1: [(1, 1, 1, 4, True, False), (1, 1, 1, 2, False, False)],
    2: [(1, 1, 2, 4, True, True), (1, 1, 2, 2, True, False), (1, 1, 2, 4, False, False)],
    3: [(1, 1, 3, 4, True, True), (1, 1, 3, 2, False, False)],
    4: [(1, 1, 4, 2, True, True), (2, 1, 2, 4, True, False), (1, 2, 2, 4, True, True), (1, 2, 2, 1, True, False)],
    8: [(1, 1, 8, 4, True, False), (1, 4, 2, 2, True, True), (2, 2, 2, 4, False, False)],
}
SIZES = {"batch": 2, "length": 48, "heads": 4, "dim": 3}


def ring_runs(cases, arrays):
    """Return, per case, the output and the gradients of query, key and value (no gradients on sim)."""
    from array_api_compat import array_namespace

    import dualmesh as dm

    def attend(causal, query, key, value, positions, weight):
        def ring(query, key, value):
            seen = dm.ops.all_gather(positions, "ulysses")
            return dm.sequence.ring_attention(query, key, value, causal=causal, positions=seen)

        mixed = dm.sequence.ulysses_attention(query, key, value, ring)
        xp = array_namespace(query)
        return dm.ops.all_reduce(xp.sum(mixed * weight), "world"), mixed

    answers = []
    for number, (dp, ulysses, cp, kv_heads, causal, balance) in enumerate(cases):
        state = dm.init_parallel_state(dp_size=dp, ulysses_size=ulysses, cp_size=cp, name=str(number))
        with dm.use_parallel_state(state):
            spec, line = dm.P("dp", "sp"), dm.P("sp")
            placed = list(arrays[kv_heads])
            positions = np.arange(SIZES["length"])
            if balance:
                size = ulysses * cp
                placed = [dm.sequence.balanced(x, 1, size) for x in placed]
                positions = dm.sequence.balanced(positions, 0, size)
            query, key, value, weight = (dm.distribute(x, spec) for x in placed)
            inputs = (query, key, value, dm.distribute(positions.astype(np.int32), line), weight)
            specs = (spec, spec, spec, line, spec)
            run = dm.shard_map(lambda *x, c=causal: attend(c, *x), in_specs=specs, out_specs=(dm.P(), spec))
            answer = [dm.to_numpy(run(*inputs)[1])]
            if state.backend != "sim":
                loss = dm.shard_map(lambda *x, c=causal: attend(c, *x)[0], in_specs=specs, out_specs=dm.P())
                answer += [dm.to_numpy(x) for x in dm.value_and_grad(loss, argnums=(0, 1, 2))(*inputs)[1]]
            if balance:
                answer = [dm.sequence.balanced(x, 1, ulysses * cp, inverse=True) for x in answer]
            answers.append(answer)
    return answers


@pytest.mark.parametrize("world_size", CASES)
@pytest.mark.parametrize("backend", ["sim", "torch", "jax"])
def test_ring_equals_dense_attention(backend, world_size):
    cases = CASES[world_size]
    arrays = {kv: random_attention(kv, kv_heads=kv, **SIZES) for kv in (1, 2, 4)}
    for answers in wide_worlds()[backend](ring_runs, cases, arrays, world_size=world_size):
        for (*_, kv_heads, causal, _), answer in zip(cases, answers, strict=True):
            expected = attention(*arrays[kv_heads], causal=causal)
            for found, wanted in zip(answer, expected, strict=backend != "sim"):
                np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)
