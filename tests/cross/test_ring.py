"""Ring attention, alone and with Ulysses: torch, JAX and sim against dense attention in numpy, float64."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.testing import compare_places
from tests.cross.dense import attention, random_attention

CASES = {  # (dp, ulysses, cp): (key/value heads, causal, balanced)
    (1, 1, 1): [(4, True, False), (2, False, False)],
    (1, 1, 2): [(4, True, True), (2, True, False), (4, False, False)],
    (1, 1, 3): [(4, True, True), (2, False, False)],
    (1, 1, 4): [(2, True, True)],
    (2, 1, 2): [(4, True, False)],
    (1, 2, 2): [(4, True, True), (1, True, False)],
    (1, 1, 8): [(4, True, False)],
    (1, 4, 2): [(2, True, True)],
    (2, 2, 2): [(4, False, False)],
}
SIZES = {"batch": 2, "length": 48, "heads": 4, "dim": 3}
TOKENS = dm.P("dp", "sp")


@pytest.mark.parametrize("sizes", CASES)
def test_ring_equals_dense_attention(sizes):
    dp, ulysses, cp = sizes
    cases = CASES[sizes]
    arrays = [random_attention(place, kv_heads=kv, **SIZES)[:3] for place, (kv, *_) in enumerate(cases)]
    positions = [np.arange(SIZES["length"], dtype=np.int32)] * len(cases)

    def placed(trees, inverse=False):
        """Lay sequences out for equal work where a case says so."""

        def moved(x, dim):
            return dm.sequence.balanced(x, dim, ulysses * cp, inverse=inverse)

        flags = (balanced for *_, balanced in cases)
        pairs = zip(trees, flags, strict=True)
        return [tuple(moved(x, 1 if x.ndim > 1 else 0) for x in tree) if flag else tree for tree, flag in pairs]

    def ring(inputs, places):
        results = []
        for tree, (own,), (_, causal, _) in zip(inputs, places, cases, strict=True):
            seen = dm.ops.all_gather(own, "ulysses")

            def attend(*qkv, seen=seen, causal=causal):
                return dm.sequence.ring_attention(*qkv, causal=causal, positions=seen)

            results.append(dm.sequence.ulysses_attention(*tree, attend))
        return tuple(results)

    def dense(weights):
        every = zip(arrays, weights, cases, strict=True)
        return [attention(*tree, weight, causal=causal) for tree, weight, (_, causal, _) in every]

    plain = dense([tree[0] for tree in arrays])
    compare_places(
        ring,
        [placed(arrays), placed([(line,) for line in positions])],
        *([TOKENS, dm.P("sp")], TOKENS, dm.parallel_spec(dp_size=dp, ulysses_size=ulysses, cp_size=cp)),
        wrt=[0],
        expected=tuple(one for (one,) in placed([(output,) for output, *_ in plain])),
        pullback=lambda ws: [
            placed([tuple(back) for _, *back in dense([w for (w,) in placed([(w,) for w in ws], inverse=True)])])
        ],
    )
