"""Blocks of a split sequence, and Ulysses where nothing divides: torch, JAX and sim against numpy, float64."""

import numpy as np
import pytest

from tests.cross.dense import attention, random_attention
from tests.worlds import wide_worlds

SHIFTS = (0, 1, -1, 3, 4, -5, 11, 12, 29)
LENGTH, WIDTH = 12, 5


def block_runs(world_size, whole, short, weight):
    """Return {name: [whole result, gradient of the whole input]} (no gradients on sim)."""
    import dualmesh as dm

    seq = dm.sequence
    state = dm.init_parallel_state(ulysses_size=world_size)
    split, same = dm.P(None, "sp"), dm.P()
    calls = {f"roll {shift}": (lambda x, shift=shift: seq.roll(x, shift, -1), split, split) for shift in SHIFTS}
    calls["roll first dim"] = (lambda x: seq.roll(x, 1, 0), dm.P("sp"), dm.P("sp"))
    calls["slice"] = (lambda x: seq.slice_sequence(x, 1), same, split)
    calls["gather"] = (lambda x: seq.gather_sequence(x, 1), split, same)
    calls["pad, slice, gather, cut"] = (
        lambda x: seq.gather_sequence(seq.slice_sequence(x, 1), 1, unpadded_length=x.shape[1]),
        same,
        same,
    )
    found = {}
    for name, (fn, one, other) in calls.items():
        x = short if "pad" in name else whole
        found[name] = differentiated(fn, x, weight[:, : x.shape[1]], one, other, world_size, state.backend)
    return found


def differentiated(fn, x, weight, spec, result_spec, world_size, backend):
    """Return the whole result and the gradient of sum(weight * result), as of one process."""
    from array_api_compat import array_namespace

    import dualmesh as dm

    x, weight = dm.distribute(x, spec), dm.distribute(weight, result_spec)
    answer = [dm.to_numpy(dm.shard_map(fn, spec, result_spec)(x))]
    if backend == "sim":
        return answer

    def loss(x, w):
        y = fn(x)
        part = array_namespace(y).sum(y * w) / (1 if result_spec.entries else world_size)
        return dm.ops.all_reduce(part, "world")

    lifted = dm.shard_map(loss, (spec, result_spec), dm.P())
    return [*answer, dm.to_numpy(dm.value_and_grad(lifted)(x, weight)[1])]


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("backend", ["sim", "torch", "jax"])
def test_blocks_are_those_of_the_whole_sequence(backend, world_size):
    draw = np.random.default_rng(0)
    whole, weight = draw.normal(size=(2, 12, LENGTH)), draw.normal(size=(2, 12, LENGTH))
    short = whole[0, :, :WIDTH]
    whole, weight = whole[0], weight[0]
    wanted = {f"roll {shift}": [np.roll(whole, shift, 1), np.roll(weight, -shift, 1)] for shift in SHIFTS}
    wanted["roll first dim"] = [np.roll(whole, 1, 0), np.roll(weight, -1, 0)]
    wanted |= {name: [whole, weight] for name in ("slice", "gather")}
    wanted["pad, slice, gather, cut"] = [short, weight[:, :WIDTH]]
    for found in wide_worlds()[backend](block_runs, world_size, whole, short, weight, world_size=world_size):
        assert found.keys() == wanted.keys()
        for name, results in found.items():
            for got, expected in zip(results, wanted[name], strict=backend != "sim"):
                np.testing.assert_allclose(got, expected, rtol=0, atol=1e-13, err_msg=name)


HEADS = {(5, 5): 4, (6, 3): 4, (12, 6): 4, (8, 2): 4, (4, 1): 4, (6, 2): 3}
"""World size by (query heads, key/value heads): heads that do not divide, few key/value heads, several ratios."""


def attention_runs(cases, length):
    """Return, per case, the output and the gradients of query, key and value (no gradients on sim)."""
    import dualmesh as dm

    def attend(query, key, value):
        from array_api_compat import array_namespace

        xp = array_namespace(query)
        assert query.shape[1] == length
        repeats = query.shape[2] // key.shape[2]
        key, value = (xp.repeat(x, repeats, axis=2) for x in (key, value))
        query, key, value = (xp.permute_dims(x, (0, 2, 1, 3)) for x in (query, key, value))
        scores = query @ xp.permute_dims(key, (0, 1, 3, 2)) * query.shape[-1] ** -0.5
        weights = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
        return xp.permute_dims(weights / xp.sum(weights, axis=-1, keepdims=True) @ value, (0, 2, 1, 3))

    def whole(query, key, value):
        blocks = (dm.sequence.slice_sequence(x, 1) for x in (query, key, value))
        mixed = dm.sequence.ulysses_attention(*blocks, attend, unpadded_length=length)
        return dm.sequence.gather_sequence(mixed, 1, unpadded_length=length)

    def loss(query, key, value, weight):
        from array_api_compat import array_namespace

        mixed = whole(query, key, value)
        return array_namespace(mixed).sum(mixed * weight)

    state = dm.init_parallel_state(ulysses_size=-1)
    answers = []
    for arrays in cases:
        inputs = [dm.distribute(x, dm.P()) for x in arrays]
        answer = [dm.to_numpy(dm.shard_map(whole, (dm.P(),) * 3, dm.P())(*inputs[:3]))]
        if state.backend != "sim":
            lifted = dm.shard_map(loss, (dm.P(),) * 4, dm.P())
            answer += [dm.to_numpy(x) for x in dm.value_and_grad(lifted, argnums=(0, 1, 2))(*inputs)[1]]
        answers.append(answer)
    return answers


@pytest.mark.parametrize("world_size", sorted(set(HEADS.values())))
@pytest.mark.parametrize("backend", ["sim", "torch", "jax"])
def test_ulysses_pads_lengths_and_heads_that_do_not_divide(backend, world_size):
    chosen = [heads for heads, size in HEADS.items() if size == world_size]
    cases = [random_attention(q + kv, batch=2, length=7, heads=q, kv_heads=kv, dim=3) for q, kv in chosen]
    for answers in wide_worlds()[backend](attention_runs, cases, 7, world_size=world_size):
        for heads, arrays, answer in zip(chosen, cases, answers, strict=True):
            expected = attention(*arrays, causal=False)
            for found, wanted in zip(answer, expected, strict=backend != "sim"):
                np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12, err_msg=str(heads))
