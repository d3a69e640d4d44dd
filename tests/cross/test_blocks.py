"""Blocks of a split sequence, and Ulysses where nothing divides: torch, JAX and sim against numpy, float64."""

import numpy as np
import pytest
from array_api_compat import array_namespace

import dualmesh as dm
from dualmesh.testing import compare_places
from tests.cross.dense import attention, random_attention
from tests.worlds import wide_worlds

SHIFTS = (0, 1, -1, 3, 4, -5, 11, 12, 29)
LENGTH, WIDTH = 12, 5
SPLIT, WHOLE = dm.P(None, "sp"), dm.P()


def same(x):
    return x


def block_calls():
    """Return, by name: the function of a block, its specs, and in numpy the function of the whole and its transpose."""
    seq = dm.sequence
    calls = {
        f"roll {shift}": (
            *(lambda x, n=shift: seq.roll(x, n, -1), SPLIT, SPLIT),
            *(lambda x, n=shift: np.roll(x, n, 1), lambda w, n=shift: np.roll(w, -n, 1)),
        )
        for shift in SHIFTS
    }
    rows = dm.P("sp")
    calls["roll first dim"] = (
        *(lambda x: seq.roll(x, 1, 0), rows, rows),
        *(lambda x: np.roll(x, 1, 0), lambda w: np.roll(w, -1, 0)),
    )
    calls["slice"] = (lambda x: seq.slice_sequence(x, 1), WHOLE, SPLIT, same, same)
    calls["gather"] = (lambda x: seq.gather_sequence(x, 1), SPLIT, WHOLE, same, same)
    calls["pad, slice, gather, cut"] = (
        *(lambda x: seq.gather_sequence(seq.slice_sequence(x, 1), 1, unpadded_length=x.shape[1]), WHOLE, WHOLE),
        *(same, same),
    )
    return calls


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_blocks_are_those_of_the_whole_sequence(world_size):
    draw = np.random.default_rng(0)
    fns, in_specs, out_specs, forward, backward = zip(*block_calls().values(), strict=True)
    arrays = [draw.normal(size=(12, WIDTH if "pad" in name else LENGTH)) for name in block_calls()]
    compare_places(
        lambda *xs: tuple(fn(x) for fn, x in zip(fns, xs, strict=True)),
        *(arrays, in_specs, out_specs, dm.parallel_spec(ulysses_size=world_size)),
        wrt=range(len(fns)),
        expected=tuple(fn(x) for fn, x in zip(forward, arrays, strict=True)),
        pullback=lambda weights: [fn(w) for fn, w in zip(backward, weights, strict=True)],
    )


def padded_integers():
    """Return integers and masks that are padded with what is said, and what is said where nothing is."""
    state = dm.init_parallel_state(ulysses_size=2)
    seq, said = dm.sequence, []

    def cut(labels, mask, x):
        for call in (
            lambda: seq.slice_sequence(labels, 0),
            lambda: seq.pad_sequence(mask, 0),
            lambda: seq.slice_sequence(labels, 0, value=0.5),
            lambda: seq.pad_sequence(mask, 0, value=2),
            lambda: seq.pad_sequence(labels, 0, value=2**40),
        ):
            try:
                call()
                said.append("accepted")
            except dm.DualmeshError as error:
                said.append(f"{type(error).__name__}: {error}")
        return (
            seq.slice_sequence(labels, 0, value=-100),
            seq.slice_sequence(mask, 0, value=False),
            seq.slice_sequence(labels[:4], 0),
            seq.slice_input_tensor(labels, 0, group="ulysses"),
            seq.slice_input_tensor(mask, 0, group="ulysses"),
            seq.pad_sequence(x, 0)[-1:],
        )

    arrays = (np.arange(5, dtype=np.int32) + 1, np.ones(5, bool), np.ones(3))
    lifted = dm.shard_map(cut, (dm.P(),) * 3, (dm.P("sp"),) * 5 + (dm.P(),), state=state)
    return [dm.to_numpy(x).tolist() for x in lifted(*(dm.distribute(x, dm.P()) for x in arrays))], said[:5]


@pytest.mark.parametrize("backend", ["sim", "torch", "jax"])
def test_integers_are_padded_with_what_is_said_and_never_with_a_silent_zero(backend):
    """0 is a class and a token; floating-point arrays end in zeros, and nothing is asked where nothing is padded.

    VeOmni's functions pad everything with 0 where nothing is said, as there.
    """
    for parts, said in wide_worlds()[backend](padded_integers, world_size=2):
        assert parts == [
            [1, 2, 3, 4, 5, -100],
            [True] * 5 + [False],
            [1, 2, 3, 4],
            [1, 2, 3, 4, 5, 0],
            [True] * 5 + [False],
            [0.0],
        ]
        for text, part in zip(
            said,
            ("sequence.slice_sequence: dim 0", "sequence.pad_sequence: dim 0", "value=0.5", "value=2", "value=1099511"),
            strict=True,
        ):
            assert text.startswith("ArrayTypeError")
            assert part in text


HEADS = {(5, 5): 4, (6, 3): 4, (12, 6): 4, (8, 2): 4, (4, 1): 4, (6, 2): 3}
"""World size by (query heads, key/value heads): heads that do not divide, few key/value heads, several ratios."""


def attend(query, key, value):
    """Return dense attention of whole sequences, (batch, 7, heads, dim)."""
    xp = array_namespace(query)
    if query.shape[1] != 7:
        raise ValueError(f"padding was left: {query.shape}")
    repeats = query.shape[2] // key.shape[2]
    key, value = (xp.repeat(x, repeats, axis=2) for x in (key, value))
    query, key, value = (xp.permute_dims(x, (0, 2, 1, 3)) for x in (query, key, value))
    scores = query @ xp.permute_dims(key, (0, 1, 3, 2)) * query.shape[-1] ** -0.5
    weights = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
    return xp.permute_dims(weights / xp.sum(weights, axis=-1, keepdims=True) @ value, (0, 2, 1, 3))


def padded_attention(*cases):
    """Return the attention of whole (query, key, value), padded, split, gathered and cut."""
    results = []
    for arrays in cases:
        blocks = (dm.sequence.slice_sequence(x, 1) for x in arrays)
        mixed = dm.sequence.ulysses_attention(*blocks, attend, unpadded_length=7)
        results.append(dm.sequence.gather_sequence(mixed, 1, unpadded_length=7))
    return tuple(results)


@pytest.mark.parametrize("world_size", sorted(set(HEADS.values())))
def test_ulysses_pads_lengths_and_heads_that_do_not_divide(world_size):
    chosen = [heads for heads, size in HEADS.items() if size == world_size]
    cases = [random_attention(q + kv, batch=2, length=7, heads=q, kv_heads=kv, dim=3)[:3] for q, kv in chosen]
    compare_places(
        padded_attention,
        *(cases, WHOLE, WHOLE, dm.parallel_spec(ulysses_size=world_size)),
        wrt=range(len(cases)),
        expected=tuple(attention(*case, case[0], causal=False)[0] for case in cases),
        pullback=lambda ws: [attention(*case, w, causal=False)[1:] for case, w in zip(cases, ws, strict=True)],
    )
