"""Ring attention, alone and with Ulysses: torch, JAX and sim against dense attention in numpy, float64."""

import re

import array_api_compat
import ml_dtypes
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


def placed(trees, flags, size, inverse=False):
    """Lay sequences out for equal work where a flag says so: dim 1 of what has several."""

    def moved(x):
        return dm.sequence.balanced(x, min(x.ndim - 1, 1), size, inverse=inverse)

    return [tuple(map(moved, tree)) if flag else tree for tree, flag in zip(trees, flags, strict=True)]


@pytest.mark.parametrize("sizes", CASES)
def test_ring_equals_dense_attention(sizes):
    dp, ulysses, cp = sizes
    cases = CASES[sizes]
    arrays = [random_attention(place, kv_heads=kv, **SIZES)[:3] for place, (kv, *_) in enumerate(cases)]
    positions = [np.arange(SIZES["length"], dtype=np.int32)] * len(cases)
    how = [balanced for *_, balanced in cases], ulysses * cp

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
        [placed(arrays, *how), placed([(line,) for line in positions], *how)],
        *([TOKENS, dm.P("sp")], TOKENS, dm.parallel_spec(dp_size=dp, ulysses_size=ulysses, cp_size=cp)),
        wrt=[0],
        expected=tuple(one for (one,) in placed([(output,) for output, *_ in plain], *how)),
        pullback=lambda ws: [
            placed(
                [tuple(back) for _, *back in dense([w for (w,) in placed([(w,) for w in ws], *how, inverse=True)])],
                *how,
            )
        ],
    )


PACKED = {  # (ulysses, cp): (key/value heads, causal, do positions start anew in each document, balanced)
    (1, 1): [(4, True, True, False)],
    (1, 2): [(4, True, True, True), (2, True, False, False), (2, False, False, False)],
    (1, 4): [(1, True, True, False)],
    (2, 2): [(2, True, True, True)],
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
    how = [balanced for *_, balanced in cases], ulysses * cp
    tokens = [(segments, anew if starts else whole) for *_, starts, _ in cases]

    def ring(inputs, places):
        results = []
        for tree, own, (_, causal, *_) in zip(inputs, places, cases, strict=True):
            documents, seen = (dm.ops.all_gather(x, "ulysses", 1) for x in own)

            def attend(*qkv, documents=documents, seen=seen, causal=causal):
                return dm.sequence.ring_attention(*qkv, causal=causal, positions=seen, segments=documents)

            results.append(dm.sequence.ulysses_attention(*tree, attend))
        return tuple(results)

    def dense(weights):
        every = zip(arrays, weights, cases, strict=True)
        return [attention(*tree, w, causal=causal, segments=segments) for tree, w, (_, causal, *_) in every]

    compare_places(
        ring,
        [placed(arrays, *how), placed(tokens, *how)],
        *([split, split], split, dm.parallel_spec(ulysses_size=ulysses, cp_size=cp)),
        wrt=[0],
        expected=tuple(
            one for (one,) in placed([(output,) for output, *_ in dense([tree[0] for tree in arrays])], *how)
        ),
        pullback=lambda ws: [
            placed(
                [tuple(back) for _, *back in dense([w for (w,) in placed([(w,) for w in ws], *how, inverse=True)])],
                *how,
            )
        ],
    )


def narrow():
    """Return packed attention in bfloat16, with gradients of nothing: how far rounding alone takes it."""
    state = dm.init_parallel_state(cp_size=2)
    arrays = random_attention(3, kv_heads=2, **SIZES)[:3]
    segments = np.stack([dm.sequence.segment_ids(np.array(ends), SIZES["length"]) for ends in ENDS]).astype(np.int32)
    split = dm.P(None, "cp")

    def attend(query, key, value, documents):
        xp = array_api_compat.array_namespace(query)
        bfloat16 = getattr(xp, "bfloat16", None) or np.dtype(ml_dtypes.bfloat16)
        found = dm.sequence.ring_attention(
            *(xp.astype(x, bfloat16) for x in (query, key, value)), segments=documents, state=state
        )
        assert found.dtype == bfloat16
        return xp.astype(found, xp.float32)

    given = [dm.distribute(x, split) for x in (*(x.astype("float32") for x in arrays), segments)]
    return dm.to_numpy(dm.shard_map(attend, split, split)(*given))


@pytest.mark.parametrize("backend", ["sim", "torch", "jax"])
def test_packed_attention_in_bfloat16_stays_within_its_rounding(backend):
    """Eight bits in inputs and scores, against dense attention in float64; sums are taken in float32."""
    arrays = random_attention(3, kv_heads=2, **SIZES)
    segments = np.stack([dm.sequence.segment_ids(np.array(ends), SIZES["length"]) for ends in ENDS])
    wanted = attention(*arrays, causal=True, segments=segments)[0]
    for found in worlds()[backend](narrow, world_size=2):
        error = np.abs(found - wanted)
        assert error.max() < 0.06
        assert error.mean() < 0.006


def repeating():
    """Attend with positions that repeat, with and without documents; every second line of the batch is right."""
    dm.init_parallel_state(cp_size=2)
    line = np.arange(16.0, dtype=np.float32).reshape(2, 8, 1, 1)
    split = dm.P(None, "cp")

    def attend(x, positions, segments=None):
        return dm.sequence.ring_attention(x, x, x, positions=positions, segments=segments)

    def run(*tokens):
        program = dm.shard_map(attend, in_specs=(split,) * (1 + len(tokens)), out_specs=split)
        given = [dm.distribute(np.asarray(x, "int32"), split) for x in tokens]
        try:
            return np.asarray(dm.to_numpy(program(dm.distribute(line, split), *given)))
        except dm.DualmeshError as error:
            return type(error).__name__, str(error)

    rising, anew = np.arange(8), np.arange(8) % 4
    documents = [anew // 4 + np.arange(8) // 4] * 2
    # (0, 5) and (1, 5) are two places, however they are counted together; (1, 1) comes twice in the last line.
    return {
        "wrong": [run([anew, rising]), run([[0, 1, 2, 3, 0, 1, 1, 2], anew], documents)],
        "right": [run([rising, rising[::-1]]), run([anew, [0, 1, 2, 5, 5, 4, 3, 6]], documents)],
    }


@pytest.mark.parametrize("backend", ["sim", "torch", "jax"])
def test_positions_that_repeat_in_a_document_are_refused_or_poison_their_lines_where_traced(backend):
    for found in worlds()[backend](repeating, world_size=2):
        assert all(np.isfinite(x).all() for x in found["right"])
        for wrong, cure in zip(found["wrong"], ("Give segments=", "Let them count on in each"), strict=True):
            if backend == "jax":
                assert np.isnan(wrong[0]).all()
                assert np.isfinite(wrong[1]).all()
            else:
                assert wrong[0] == "ArgumentError"
                assert cure in wrong[1]


def partly():
    """Give segments at all indices but the first: with positions, and in debug mode without."""
    dm.init_parallel_state(cp_size=4)
    line = np.arange(8.0, dtype=np.float32).reshape(1, 8, 1, 1)

    def attend(x, positions):
        documents = positions // 4
        if dm.ops.axis_index("cp") == 0:
            documents = None
        return dm.sequence.ring_attention(x, x, x, positions=positions if said else None, segments=documents)

    texts = []
    for said in (True, False):
        program = dm.shard_map(attend, in_specs=(dm.P(None, "cp"), dm.P("cp")), out_specs=dm.P(None, "cp"))
        given = (dm.distribute(line, dm.P(None, "cp")), dm.distribute(np.arange(8, dtype="int32"), dm.P("cp")))
        try:
            with dm.debug(not said):
                program(*given)
        except dm.DualmeshError as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


@pytest.mark.parametrize("backend", ["sim", "torch"])
def test_segments_on_some_ranks_only_are_named(backend):
    """At once where positions are given, else in debug mode; on JAX all ranks run one program."""
    for said, debugged in worlds()[backend](partly, world_size=4):
        assert "ArgumentError" in said
        assert "segments are given over 'cp', but not at the indices [0]" in said
        assert "AgreementError" in debugged


def documents_of(kind):
    """Return what is said of cumulative lengths that cannot be, and the documents of good ones."""
    dm.init_parallel_state(dp_size=1)
    if kind == "torch":
        import torch

        array = torch.tensor
    elif kind == "jax":
        from jax.numpy import array
    else:
        array = np.array
    said = []
    for wrong in ([0, 5, 3], [1, 3], [0, 9], [0, -1, 4], [-2, 4], [0.0, 3.0], [[0, 3]], []):
        given = array(wrong) if wrong else array([0])[:0]
        try:
            said.append(dm.sequence.segment_ids(given, 8))
        except dm.DualmeshError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said, np.asarray(dm.sequence.segment_ids(array([0, 3, 3, 5], dtype=array([0]).dtype), 8)).tolist()


@pytest.mark.parametrize("backend", ["sim", "torch", "jax"])
def test_cumulative_lengths_that_cannot_be_are_refused_where_they_are_known(backend):
    rises, integers, shape = "ArgumentError: .*rise from 0 to 8", "ArrayTypeError: .*integers", r"ShapeError: .*\(docu"
    wanted = [*[rises] * 5, integers, shape, shape]
    for said, documents in worlds()[backend](documents_of, backend, world_size=1):
        assert [re.search(one, text, re.DOTALL) is not None for one, text in zip(wanted, said, strict=True)] == [
            True
        ] * 8, said
        assert documents == [0, 0, 0, 2, 2, 3, 3, 3]


def test_cumulative_lengths_of_a_narrow_dtype_and_lists_are_read_or_refused():
    narrow_dtype = dm.sequence.segment_ids(np.array([0, 100], np.int8), 300)
    assert narrow_dtype.tolist() == [0] * 100 + [1] * 200
    with pytest.raises(dm.errors.ArrayTypeError, match=r"cumulative is list\. Give an array of integers"):
        dm.sequence.segment_ids([0, 3], 4)
    with pytest.raises(dm.errors.ArgumentError, match="length"):
        dm.sequence.segment_ids(np.array([0, 3]), -1)


def test_tokens_that_cannot_be_meant_are_refused():
    block = np.zeros((2, 4, 1, 3))
    with dm.session(backend="sim", world_size=1):
        dm.init_parallel_state(cp_size=1)
        for name in ("positions", "segments"):
            with pytest.raises(dm.errors.ShapeError, match=rf"{name} has shape \(3,\). It must be .* = \(2, 4\)"):
                dm.sequence.ring_attention(block, block, block, **{name: np.arange(3)})
            with pytest.raises(dm.errors.ArrayTypeError, match=f"{name} are float64. Give integers"):
                dm.sequence.ring_attention(block, block, block, **{name: np.arange(4.0)})
            with pytest.raises(dm.errors.ArrayTypeError, match=f"{name} is a list: .*Give an array of integers"):
                dm.sequence.ring_attention(block, block, block, **{name: [[0, 1, 2, 3], [0]]})
        listed = dm.sequence.ring_attention(block, block, block, positions=[0, 1, 2, 3], segments=[0, 0, 1, 1])
        assert listed.shape == block.shape
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
