"""Ulysses attention: torch, JAX and sim against dense attention in numpy, values and gradients, float64."""

import pytest
from array_api_compat import array_namespace

import dualmesh as dm
from dualmesh.testing import compare_places
from tests.cross.dense import attention, random_attention

CASES = {  # (dp, ulysses): key/value heads
    (1, 1): [8, 2],
    (1, 2): [8],
    (2, 1): [2],
    (1, 4): [8, 2],
    (2, 2): [2],
    (1, 8): [8, 2],
    (2, 4): [4],
    (4, 2): [8],
}
SIZES = {"batch": 4, "length": 16, "heads": 8, "dim": 3}
TOKENS = dm.P("dp", "sp")


def attend(query, key, value):
    xp = array_namespace(query)
    query, key, value = (dm.sequence.gather_seq_scatter_heads(x, seq_dim=1, head_dim=2) for x in (query, key, value))
    repeats = query.shape[2] // key.shape[2]
    key, value = xp.repeat(key, repeats, axis=2), xp.repeat(value, repeats, axis=2)
    query, key, value = (xp.permute_dims(x, (0, 2, 1, 3)) for x in (query, key, value))
    scores = query @ xp.permute_dims(key, (0, 1, 3, 2)) * query.shape[-1] ** -0.5
    weights = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
    mixed = weights / xp.sum(weights, axis=-1, keepdims=True) @ value
    return dm.sequence.gather_heads_scatter_seq(xp.permute_dims(mixed, (0, 2, 1, 3)), seq_dim=1, head_dim=2)


@pytest.mark.parametrize("sizes", CASES)
def test_ulysses_equals_dense_attention(sizes):
    arrays = [random_attention(kv, kv_heads=kv, **SIZES)[:3] for kv in CASES[sizes]]
    compare_places(
        lambda *cases: tuple(attend(*case) for case in cases),
        *(arrays, TOKENS, TOKENS, dm.parallel_spec(dp_size=sizes[0], ulysses_size=sizes[1])),
        wrt=range(len(arrays)),
        expected=tuple(attention(*case, case[0], causal=False)[0] for case in arrays),
        pullback=lambda ws: [attention(*case, w, causal=False)[1:] for case, w in zip(arrays, ws, strict=True)],
    )
