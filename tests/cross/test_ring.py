"""Ring attention, alone and with Ulysses: torch, JAX and sim against dense attention in numpy, float64."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.testing import compare_places
from tests.cross.dense import attention, random_attention
from tests.worlds import worlds

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


PACKED = {  # (ulysses, cp): (key/value heads, causal, do positions start anew in each document)
    (1, 1): [(4, True, True)],
    (1, 2): [(4, True, True), (2, True, False), (2, False, False)],
    (1, 4): [(1, True, True)],
    (2, 2): [(2, True, True)],
}
ENDS = [[0, 5, 5, 21, 48], [0, 17, 40]]
"""Cumulative lengths of each line of the batch: an empty document, and eight tokens of padding."""


@pytest.mark.parametrize("sizes", PACKED)
def test_packed_documents_equal_dense_attention_within_each(sizes):
    ulysses, cp = sizes
    cases = PACKED[sizes]
    arrays = [random_attention(place, kv_heads=kv, **SIZES)[:3] for place, (kv, *_) in enumerate(cases)]
    segments = np.stack([dm.sequence.segment_ids(np.array(ends), SIZES["length"]) for ends in ENDS]).astype(np.int32)
    whole = np.broadcast_to(np.arange(SIZES["length"], dtype=np.int32), segments.shape)
    anew = whole - np.stack([np.searchsorted(line, line) for line in segments]).astype(np.int32)
    split = dm.P(None, "sp")
    tokens = [(segments, anew if starts else whole) for *_, starts in cases]

    def ring(inputs, places):
        results = []
        for tree, own, (_, causal, _) in zip(inputs, places, cases, strict=True):
            documents, seen = (dm.ops.all_gather(x, "ulysses", 1) for x in own)

            def attend(*qkv, documents=documents, seen=seen, causal=causal):
                return dm.sequence.ring_attention(*qkv, causal=causal, positions=seen, segments=documents)

            results.append(dm.sequence.ulysses_attention(*tree, attend))
        return tuple(results)

    def dense(weights):
        every = zip(arrays, weights, cases, strict=True)
        return [attention(*tree, w, causal=causal, segments=segments) for tree, w, (_, causal, _) in every]

    compare_places(
        ring,
        [arrays, tokens],
        *([split, split], split, dm.parallel_spec(ulysses_size=ulysses, cp_size=cp)),
        wrt=[0],
        expected=tuple(output for output, *_ in dense([tree[0] for tree in arrays])),
        pullback=lambda ws: [[tuple(back) for _, *back in dense(ws)]],
    )


def repeating():
    """Attend with positions that start anew on every rank, as packed documents have them; and without repeats."""
    dm.init_parallel_state(cp_size=2)
    line = np.arange(8.0, dtype=np.float32).reshape(1, 8, 1, 1)

    def attend(x, positions):
        return dm.sequence.ring_attention(x, x, x, positions=positions)

    def run(positions):
        program = dm.shard_map(attend, in_specs=(dm.P(None, "cp"), dm.P("cp")), out_specs=dm.P(None, "cp"))
        given = (dm.distribute(line, dm.P(None, "cp")), dm.distribute(positions, dm.P("cp")))
        try:
            return np.asarray(dm.to_numpy(program(*given)))
        except dm.DualmeshError as error:
            return type(error).__name__, str(error)

    return run(np.arange(8, dtype=np.int32) % 4), run(np.arange(8, dtype=np.int32))


@pytest.mark.parametrize("backend", ["sim", "torch", "jax"])
def test_positions_that_repeat_without_segments_are_refused_or_poison_what_is_traced(backend):
    for wrong, right in worlds()[backend](repeating, world_size=2):
        assert np.isfinite(right).all()
        if backend == "jax":
            assert np.isnan(wrong).all()
        else:
            assert wrong[0] == "ArgumentError"
            assert "Give segments=" in wrong[1]


def test_tokens_that_cannot_be_meant_are_refused():
    block = np.zeros((2, 4, 1, 3))
    with dm.session(backend="sim", world_size=1):
        dm.init_parallel_state(cp_size=1)
        for name in ("positions", "segments"):
            with pytest.raises(dm.errors.ShapeError, match=rf"{name} has shape \(3,\). It must be .* = \(2, 4\)"):
                dm.sequence.ring_attention(block, block, block, **{name: np.arange(3)})
            with pytest.raises(dm.errors.ArrayTypeError, match=f"{name} are float64. Give integers"):
                dm.sequence.ring_attention(block, block, block, **{name: np.arange(4.0)})
        for causal in (True, False):
            with pytest.raises(dm.errors.ArgumentError, match="positions come more than once"):
                dm.sequence.ring_attention(block, block, block, causal=causal, positions=np.array([0, 1, 0, 1]))


def compiled_whole():
    """Return differences of compiled from eager attention, value and gradient, and whether repeats became NaN."""
    import torch

    dm.init_parallel_state(cp_size=2)
    mine = slice(4 * torch.distributed.get_rank(), None)
    documents, positions = (torch.tensor(x)[mine][:4] for x in ([0, 0, 0, 1, 1, 1, 2, 2], [0, 1, 2, 0, 1, 2, 0, 1]))
    x = torch.randn(1, 4, 2, 3, dtype=torch.float64, requires_grad=True)

    def attend(x, segments):
        return dm.sequence.ring_attention(x, x, x, positions=positions, segments=segments)

    whole = torch.compile(attend, backend="aot_eager", fullgraph=True)
    values = [run(x, documents) for run in (attend, whole)]
    backs = [torch.autograd.grad(value.square().sum(), x)[0] for value in values]
    return *(float((one - other).detach().abs().max()) for one, other in (values, backs)), bool(
        whole(x, None).isnan().all()
    )


def test_torch_compiles_packed_attention_whole_and_poisons_positions_that_repeat():
    for value, gradient, poisoned in worlds()["torch"](compiled_whole, world_size=2):
        assert max(value, gradient) < 1e-14  # elements of the order of 1
        assert poisoned
