"""Ring attention: queries stay, keys and values travel around an axis, the softmax is put together online.

Trading the sequence for heads instead is in `ulysses`; both together split one sequence over two axes.
"""

from typing import Any

from dualmesh import ops
from dualmesh.ambient import meant
from dualmesh.errors import ShapeError
from dualmesh.lazy import array_api_compat
from dualmesh.sequence.blocks import sequence_positions
from dualmesh.state import ParallelState
from dualmesh.topology import Axis

_MASKED = -1e30


def ring_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    axis: Axis = "cp",
    causal: bool = True,
    positions: Any = None,
    scale: float | None = None,
    state: ParallelState | None = None,
) -> Any:
    """Attend over a sequence that is split over an axis, without ever holding all of it.

    *Collective over the axis.* In each of size steps every index attends to one block of keys and values and passes
    it on to the next index. The partial results are merged by the online softmax (Milakov and Gimelshein 2018,
    "Online normalizer calculation for softmax"): with running maximum m, numerator n and denominator d,
    n = n exp(m - m') + n_block exp(m_block - m'), likewise d, where m' = max(m, m_block). Gradient: exact.

    Args:
        query: This rank's block, (batch, s, heads, dim).
        key: (batch, s, kv_heads, dim); kv_heads divides heads.
        value: (batch, s, kv_heads, value dim).
        causal: Let a position see itself and earlier ones only.
        positions: Positions of this block in the whole sequence, integers of shape (s,); None: blocks lie in index
            order. They travel with the keys, so any placement is right (see `balanced`).
        scale: Factor of the scores; None: dim ** -0.5.

    Returns:
        (batch, s, heads, value dim).

    Raises:
        ShapeError: Shapes that do not fit each other.
    """
    _check_shapes(query, key, value)
    owner = meant("sequence.ring_attention", state)
    xp = array_api_compat.array_namespace(query)
    size = ops.axis_size(axis, state=owner)
    width, length = key.shape[-1], query.shape[1]
    if causal and positions is None:
        positions = sequence_positions(query, length, axis, state=owner)
    heads_first = (0, 2, 1, 3)
    query = xp.permute_dims(query, heads_first) * (width**-0.5 if scale is None else scale)
    travelling = xp.permute_dims(xp.concat([key, value], axis=-1), heads_first)
    repeats = query.shape[1] // travelling.shape[1]
    seen = positions

    def attended() -> tuple[Any, Any, Any]:
        block = xp.repeat(travelling, repeats, axis=1) if repeats > 1 else travelling
        visible = seen[None, :] <= positions[:, None] if causal else None
        return _attended(xp, query, block[..., :width], block[..., width:], visible)

    parts = attended()
    for _ in range(size - 1):
        travelling = ops.shift(travelling, axis, 1, state=owner)
        seen = ops.shift(seen, axis, 1, state=owner) if causal else None
        parts = _merged(xp, parts, attended())
    numerator, denominator, _ = parts
    return xp.permute_dims(xp.astype(numerator / denominator, value.dtype), heads_first)


def _attended(xp: Any, query: Any, key: Any, value: Any, visible: Any) -> tuple[Any, Any, Any]:
    """Return numerator, denominator and maximum of softmax attention to one block."""
    scores = query @ xp.permute_dims(key, (0, 1, 3, 2))
    if scores.dtype.itemsize < 4:
        scores, value = xp.astype(scores, xp.float32), xp.astype(value, xp.float32)
    if visible is not None:
        scores = xp.where(visible, scores, xp.full_like(scores, _MASKED))
    highest = xp.max(scores, axis=-1, keepdims=True)
    weights = xp.exp(scores - highest)
    if visible is not None:
        weights = xp.where(visible, weights, xp.zeros_like(weights))
    return weights @ value, xp.sum(weights, axis=-1, keepdims=True), highest


def _merged(xp: Any, first: tuple[Any, Any, Any], second: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    highest = xp.maximum(first[2], second[2])
    old, new = xp.exp(first[2] - highest), xp.exp(second[2] - highest)
    return first[0] * old + second[0] * new, first[1] * old + second[1] * new, highest


def _check_shapes(query: Any, key: Any, value: Any) -> None:
    shapes = tuple(tuple(x.shape) for x in (query, key, value))
    fits = all(len(shape) == 4 for shape in shapes) and shapes[0][:2] == shapes[1][:2] == shapes[2][:2]
    fits = fits and shapes[1][2] == shapes[2][2] and shapes[0][3] == shapes[1][3]
    if not fits or shapes[1][2] == 0 or shapes[0][2] % shapes[1][2]:
        raise ShapeError(
            f"sequence.ring_attention: query, key and value have shapes {shapes[0]}, {shapes[1]}, {shapes[2]}. They "
            f"must be (batch, s, heads, dim), (batch, s, kv_heads, dim), (batch, s, kv_heads, value dim) with kv_heads "
            f"dividing heads.",
            shapes=shapes,
        )
