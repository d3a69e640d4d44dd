"""Ring attention: queries stay, keys and values travel around an axis, the softmax is put together online.

Trading the sequence for heads instead is in `ulysses`; both together split one sequence over two axes.
"""

import math
from typing import Any

from dualmesh import ops
from dualmesh.ambient import meant
from dualmesh.errors import ArgumentError, ArrayTypeError, ShapeError
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
    segments: Any = None,
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
        positions: Positions of this block in the whole sequence, integers of shape (s,) or (batch, s); None: blocks
            lie in index order. They travel with the keys, so any placement is right (see `balanced`).
        segments: The document of each token, integers of shape (s,) or (batch, s), where documents are packed into one
            sequence: a token sees its own document only. Positions may then start anew in each. Padding is a document
            of its own. `segment_ids` makes them from cumulative lengths.
        scale: Factor of the scores; None: dim ** -0.5.

    Returns:
        (batch, s, heads, value dim).

    Raises:
        ShapeError: Shapes that do not fit each other.
        ArrayTypeError: Positions or segments that are not integers.
        ArgumentError: Positions that repeat, with no `segments`: which document is meant by a position is not known.
            On every rank of the axis. Where looking would wait, in compiled code and on a GPU, the answer is NaN.
    """
    _check_shapes(query, key, value)
    _check_tokens("positions", positions, query)
    _check_tokens("segments", segments, query)
    owner = meant("sequence.ring_attention", state)
    xp = array_api_compat.array_namespace(query)
    size = ops.axis_size(axis, state=owner)
    width, length = key.shape[-1], query.shape[1]
    repeated = None
    if positions is None:
        positions = sequence_positions(query, length, axis, state=owner) if causal else None
    elif segments is None:
        repeated = _repeated(xp, positions, axis, owner)
    heads_first = (0, 2, 1, 3)
    query = xp.permute_dims(query, heads_first) * (width**-0.5 if scale is None else scale)
    travelling = xp.permute_dims(xp.concat([key, value], axis=-1), heads_first)
    repeats = query.shape[1] // travelling.shape[1]
    # What the mask is made from, of the queries and of the keys that are here: (1 or batch, s) each.
    mine = {"position": positions if causal else None, "segment": segments}
    mine = {name: x[None, :] if len(x.shape) == 1 else x for name, x in mine.items() if x is not None}
    theirs = mine

    def attended() -> tuple[Any, Any, Any]:
        block = xp.repeat(travelling, repeats, axis=1) if repeats > 1 else travelling
        visible = _visible(mine, theirs)
        return _attended(xp, query, block[..., :width], block[..., width:], visible)

    parts = attended()
    for _ in range(size - 1):
        travelling = ops.shift(travelling, axis, 1, state=owner)
        theirs = {name: ops.shift(x, axis, 1, state=owner) for name, x in theirs.items()}
        parts = _merged(xp, parts, attended())
    numerator, denominator, _ = parts
    if repeated is not None:
        denominator = xp.where(repeated, xp.full_like(denominator, math.nan), denominator)
    return xp.permute_dims(xp.astype(numerator / denominator, value.dtype), heads_first)


def segment_ids(cumulative: Any, length: int) -> Any:
    """Return the document of each token of a packed sequence, for `ring_attention(segments=)`. *Pure.*

    Slice it like the tokens: `slice_sequence(ids, -1)`.

    Args:
        cumulative: Where documents begin and the last one ends, rising integers from 0, of shape (documents + 1,), as
            flash attention's `cu_seqlens`. They are believed.
        length: Of the whole sequence; what lies behind the last document is padding, and a document of its own.

    >>> import numpy as np
    >>> segment_ids(np.array([0, 3, 5]), 6).tolist()
    [0, 0, 0, 1, 1, 2]
    """
    xp = array_api_compat.array_namespace(cumulative)
    tokens = xp.arange(length, dtype=cumulative.dtype, device=array_api_compat.device(cumulative))
    return xp.searchsorted(cumulative[1:], tokens, side="right")


def _visible(mine: dict[str, Any], theirs: dict[str, Any]) -> Any:
    """Return which keys each query sees, (1 or batch, 1, s, s); None: all."""
    visible = None
    for name, own in mine.items():
        query, key = own[:, None, :, None], theirs[name][:, None, None, :]
        allowed = key <= query if name == "position" else key == query
        visible = allowed if visible is None else visible & allowed
    return visible


def _repeated(xp: Any, positions: Any, axis: Axis, owner: ParallelState) -> Any:
    """Return whether a position of the whole sequence comes twice; None where it was seen that none does."""
    every = ops.all_gather(positions, axis, len(positions.shape) - 1, state=owner)
    ordered = xp.sort(every, axis=-1)
    repeated = xp.any(ordered[..., 1:] == ordered[..., :-1])
    known = owner.collectives.known_number(repeated)
    if known is None:
        return repeated
    if known:
        raise ArgumentError(
            f"sequence.ring_attention: positions come more than once over {axis!r}, as where documents are packed. "
            f"Give segments=, the document of each token, or positions in the whole sequence.",
            axis=axis,
        )
    return None


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


def _check_tokens(name: str, given: Any, query: Any) -> None:
    batch, length = query.shape[:2]
    if given is not None and tuple(given.shape) not in ((length,), (1, length), (batch, length)):
        raise ShapeError(
            f"sequence.ring_attention: {name} has shape {tuple(given.shape)}. It must be (s,) = ({length},) or "
            f"(batch, s) = ({batch}, {length}): one integer per token of this rank's block.",
            shape=tuple(given.shape),
        )
    if given is not None and "int" not in str(given.dtype):
        raise ArrayTypeError(f"sequence.ring_attention: {name} are {given.dtype}. Give integers.", dtype=given.dtype)


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
