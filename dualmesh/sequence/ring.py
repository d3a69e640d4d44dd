"""Ring attention: queries stay, keys and values travel around an axis, the softmax is put together online.

Trading the sequence for heads instead is in `ulysses`; both together split one sequence over two axes.
"""

import math
from typing import Any

from dualmesh import ops
from dualmesh._support.optional_imports import array_api_compat
from dualmesh.backend.state import ParallelState
from dualmesh.errors import ArgumentError, ArrayTypeError, ShapeError
from dualmesh.runtime.scope import get_parallel_state, resolve_state, scope_name
from dualmesh.sequence.blocks import sequence_positions
from dualmesh.topology.resolve import positive
from dualmesh.topology.topology import Axis

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
            lie in index order over the axis, as "sp" slices inside `ulysses_attention` do not. They travel with the
            keys, so any placement is right (see `balanced`); that none comes twice is looked at with one all_gather of
            integers, one for the position and one for the segment of every token.
        segments: The document of each token, integers of shape (s,) or (batch, s), where documents are packed into one
            sequence: a token sees its own document only. Positions may then start anew in each. Padding is a document
            of its own, whose positions count on like others. `segment_ids` makes them from cumulative lengths. Given on
            all ranks of the axis or on none: where positions are given, others are an error; without positions they
            wait for each other, and debug mode names them.
        scale: Factor of the scores; None: dim ** -0.5.

    Returns:
        (batch, s, heads, value dim).

    Raises:
        ShapeError: Shapes that do not fit each other.
        ArrayTypeError: Positions or segments that are not integers.
        ArgumentError: Positions that repeat within a document, or within the sequence where no `segments` say which
            document is meant; or segments on some ranks only. On every rank of the axis. Where looking would wait, in
            compiled code and on a GPU, the lines of the batch with such positions are NaN.
    """
    _check_shapes(query, key, value)
    positions = _tokens("positions", positions, query)
    segments = _tokens("segments", segments, query)
    owner = resolve_state("sequence.ring_attention", state)
    xp = array_api_compat.array_namespace(query)
    size = ops.axis_size(axis, state=owner)
    width, length = key.shape[-1], query.shape[1]
    repeated = None
    if positions is None:
        positions = sequence_positions(query, length, axis, state=owner) if causal else None
    else:
        repeated = _find_repeated(xp, positions, segments, query.shape[:2], axis, owner)
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
        return _attend(xp, query, block[..., :width], block[..., width:], visible)

    parts = attended()
    for _ in range(size - 1):
        travelling = ops.shift(travelling, axis, 1, state=owner)
        theirs = {name: ops.shift(x, axis, 1, state=owner) for name, x in theirs.items()}
        parts = _merge(xp, parts, attended())
    numerator, denominator, _ = parts
    if repeated is not None:
        wrong = xp.reshape(repeated, (-1, 1, 1, 1))
        denominator = xp.where(wrong, xp.full_like(denominator, math.nan), denominator)
    return xp.permute_dims(xp.astype(numerator / denominator, value.dtype), heads_first)


def segment_ids(cumulative: Any, length: int) -> Any:
    """Return the document of each token of a packed sequence, for `ring_attention(segments=)`. *Pure.*

    Slice it like the tokens: `slice_sequence(ids, -1)`.

    Args:
        cumulative: Where documents begin and the last one ends, rising integers from 0 to `length` at most, of shape
            (documents + 1,), as flash attention's `cu_seqlens`; two alike are an empty document. Where looking would
            wait, in compiled code and on a GPU, and for arrays of another framework than the ambient state's, they are
            believed.
        length: Of the whole sequence; what lies behind the last document is padding, and a document of its own.

    Raises:
        ArrayTypeError: `cumulative` is no array of integers.
        ShapeError: It has another shape.
        ArgumentError: It falls, does not begin at 0, or goes beyond `length`.

    >>> import numpy as np
    >>> segment_ids(np.array([0, 3, 5]), 6).tolist()
    [0, 0, 0, 1, 1, 2]
    """
    where = "sequence.segment_ids"
    length = positive(where, "length", length, least=0)
    if not hasattr(cumulative, "dtype") or not _holds_integers(cumulative):
        found = getattr(cumulative, "dtype", type(cumulative).__qualname__)
        raise ArrayTypeError(f"{where}: cumulative is {found}. Give an array of integers.", found=found)
    if len(cumulative.shape) != 1 or cumulative.shape[0] == 0:
        raise ShapeError(
            f"{where}: cumulative has shape {tuple(cumulative.shape)}. It must be (documents + 1,): where each "
            f"document begins, and where the last one ends.",
            shape=tuple(cumulative.shape),
        )
    xp = array_api_compat.array_namespace(cumulative)
    tokens = xp.arange(length, device=array_api_compat.device(cumulative))
    ends = xp.astype(cumulative, tokens.dtype)  # the dtype given may be too narrow for the length
    rises = xp.all(ends[1:] >= ends[:-1]) & (ends[0] == 0) & (ends[-1] <= length)
    if _known(cumulative, rises) == 0:
        raise ArgumentError(
            f"{where}: cumulative={cumulative} for length={length}. It must rise from 0 to {length} at most: where "
            f"each document begins, and where the last one ends.",
            cumulative=cumulative,
            length=length,
        )
    return xp.searchsorted(ends[1:], tokens, side="right")


def _known(array: Any, flag: Any) -> float | None:
    """Return a flag made of an array, where looking at it waits for nothing, else None."""
    if array_api_compat.is_numpy_array(array):
        return float(flag)
    return get_parallel_state().collectives.known_number(flag) if scope_name() is not None else None


def _visible(mine: dict[str, Any], theirs: dict[str, Any]) -> Any:
    """Return which keys each query sees, (1 or batch, 1, s, s); None: all."""
    visible = None
    for name, own in mine.items():
        query, key = own[:, None, :, None], theirs[name][:, None, None, :]
        allowed = key <= query if name == "position" else key == query
        visible = allowed if visible is None else visible & allowed
    return visible


def _find_repeated(
    xp: Any, positions: Any, segments: Any, shape: tuple[int, int], axis: Axis, owner: ParallelState
) -> Any:
    """Return which lines of the batch hold a (segment, position) twice; None where it was seen that none does.

    *Collective over the axis.* One message holds the positions, the segments, and whether segments are given, in one
    shape whatever is given: so ranks that do not mean the same find out, rather than wait for each other.
    """
    batch, length = shape
    device = array_api_compat.device(positions)
    number = xp.arange(1, device=device).dtype
    given = segments is not None
    rows = [xp.broadcast_to(xp.astype(x, number), shape) for x in (positions, segments if given else positions)]
    said = xp.full((1, length), int(given), dtype=number, device=device)
    every = ops.all_gather(xp.concat([*rows, said], axis=0), axis, 1, state=owner)
    size, known_number = ops.axis_size(axis, state=owner), owner.collectives.known_number
    flags = every[2 * batch]
    if length and known_number(xp.all(flags == flags[0])) == 0:
        lacking = [index for index in range(size) if not known_number(flags[index * length])]
        raise ArgumentError(
            f"sequence.ring_attention: segments are given over {axis!r}, but not at the indices {lacking}. Give them "
            f"on every rank of the axis, or on none.",
            axis=axis,
            lacking=tuple(lacking),
        )
    ordered, documents = every[:batch], every[batch : 2 * batch]
    if given:
        # By segment, and by position within each: the second sort keeps the order of the first.
        for keys in (0, 1):
            both = ordered, documents
            ordered, documents = _sorted_by(xp, both[keys], *both)
        pairs = (ordered[:, 1:] == ordered[:, :-1]) & (documents[:, 1:] == documents[:, :-1])
    else:
        ordered = xp.sort(ordered, axis=-1)
        pairs = ordered[:, 1:] == ordered[:, :-1]
    repeated = xp.any(pairs, axis=-1)
    known = known_number(xp.any(repeated))
    if known is None:
        return repeated
    if known and given:
        raise ArgumentError(
            f"sequence.ring_attention: positions come more than once within a document of segments, over {axis!r}. "
            f"Let them count on in each, in padding too.",
            axis=axis,
        )
    if known:
        raise ArgumentError(
            f"sequence.ring_attention: positions come more than once over {axis!r}, as where documents are packed. "
            f"Give segments=, the document of each token, or positions in the whole sequence.",
            axis=axis,
        )
    return None


def _sorted_by(xp: Any, keys: Any, *arrays: Any) -> tuple[Any, ...]:
    """Return arrays (lines, n), each line in the order of the keys; equal keys stay in theirs. *Local.*"""
    lines, count = keys.shape
    order = xp.argsort(keys, axis=-1, stable=True)
    starts = xp.arange(lines, dtype=order.dtype, device=array_api_compat.device(keys)) * count
    places = xp.reshape(order + starts[:, None], (-1,))
    return tuple(xp.reshape(xp.take(xp.reshape(x, (-1,)), places, axis=0), keys.shape) for x in arrays)


def _attend(xp: Any, query: Any, key: Any, value: Any, visible: Any) -> tuple[Any, Any, Any]:
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


def _merge(xp: Any, first: tuple[Any, Any, Any], second: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    highest = xp.maximum(first[2], second[2])
    old, new = xp.exp(first[2] - highest), xp.exp(second[2] - highest)
    return first[0] * old + second[0] * new, first[1] * old + second[1] * new, highest


def _tokens(name: str, given: Any, query: Any) -> Any:
    """Return an integer per token of the block, checked, in the framework of the query; None for None. *Local.*"""
    if given is None:
        return None
    xp, (batch, length) = array_api_compat.array_namespace(query), query.shape[:2]
    if not hasattr(given, "dtype") or (
        array_api_compat.is_numpy_array(given) and not array_api_compat.is_numpy_array(query)
    ):
        try:
            given = xp.asarray(given, device=array_api_compat.device(query))
        except (TypeError, ValueError) as error:
            raise ArrayTypeError(
                f"sequence.ring_attention: {name} is a {type(given).__qualname__}: {error}. Give an array of integers, "
                f"(s,) = ({length},) or (batch, s) = ({batch}, {length}).",
                found=type(given),
            ) from error
    if tuple(given.shape) not in ((length,), (1, length), (batch, length)):
        raise ShapeError(
            f"sequence.ring_attention: {name} has shape {tuple(given.shape)}. It must be (s,) = ({length},) or "
            f"(batch, s) = ({batch}, {length}): one integer per token of this rank's block.",
            shape=tuple(given.shape),
        )
    if not _holds_integers(given):
        raise ArrayTypeError(f"sequence.ring_attention: {name} are {given.dtype}. Give integers.", dtype=given.dtype)
    return given


def _holds_integers(x: Any) -> bool:
    return "int" in str(x.dtype)


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
