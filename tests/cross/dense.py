"""The oracle: attention and its gradients in numpy, on the global arrays, in one process."""

import numpy as np


def attention(query, key, value, cotangent, *, causal, segments=None):
    """Return (output, d query, d key, d value) of softmax attention; arrays (batch, seq, heads, dim), float64.

    Tokens of unlike `segments`, (batch, seq), do not see each other. With fewer key/value heads than query heads each
    of them serves a run of neighbouring query heads.
    """
    repeats = query.shape[2] // key.shape[2]
    q, k, v, g = (np.moveaxis(x, 2, 1) for x in (query, key, value, cotangent))
    k, v = np.repeat(k, repeats, axis=1), np.repeat(v, repeats, axis=1)
    scale = q.shape[-1] ** -0.5
    scores = q @ np.swapaxes(k, -1, -2) * scale
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    if segments is not None:
        scores = np.where((segments[:, :, None] == segments[:, None, :])[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    d_weights = g @ np.swapaxes(v, -1, -2)
    d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdims=True)) * scale
    d_key, d_value = np.swapaxes(d_scores, -1, -2) @ q, np.swapaxes(weights, -1, -2) @ g
    d_key, d_value = (_summed(x, repeats) for x in (d_key, d_value))
    return tuple(np.moveaxis(x, 1, 2) for x in (weights @ v, d_scores @ k, d_key, d_value))


def _summed(x, repeats):
    batch, heads, *rest = x.shape
    return x.reshape(batch, heads // repeats, repeats, *rest).sum(2)


def random_attention(seed, *, batch, length, heads, kv_heads, dim):
    """Return query, key, value and a cotangent of the output, different in every element."""
    draw = np.random.default_rng(seed)
    return [draw.normal(size=(batch, length, h, dim)) for h in (heads, kv_heads, kv_heads, heads)]
