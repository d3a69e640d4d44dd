"""Sequences of different length on every index, packed into one and taken apart again.

Blocks of equal length are in `blocks`.
"""

from collections.abc import Sequence
from typing import Any
from zlib import crc32

from dualmesh import ops
from dualmesh._support.optional_imports import array_api_compat
from dualmesh.errors import ArrayTypeError, ShapeError
from dualmesh.ops.checks import checked_dim
from dualmesh.ops.ragged import plain_counts
from dualmesh.topology.topology import Axis

_FLOATS = ("float32", "float64", "float16", "bfloat16")


def agree_on_segments(x: Any, dim: int, axis: Axis, lengths: Sequence[int] | None) -> tuple[Any, tuple[int, ...]]:
    """Return `x` in the common dtype, and the length of every index' sequence. *Collective where none are given.*

    Ranks hold sequences of their own, whose dtype may depend on what is in them: unlike floats are promoted to their
    common dtype, and the gradient comes back in the own one. What `lengths` says is believed, dtypes included: nothing
    is exchanged then.

    Raises:
        ArrayTypeError: Ranks hold unlike dtypes that are not all floats. On all of them.
        ShapeError: Ranks differ in another dim than `dim`, on all of them; or `lengths` do not fit.
    """
    where, size = "sequence lengths", ops.axis_size(axis)
    dim = checked_dim(where, x, dim)
    if lengths is None:
        xp = array_api_compat.array_namespace(x)
        own = xp.asarray([x.shape[dim], *_signature(x, dim)], device=array_api_compat.device(x))
        said = plain_counts(ops.all_gather(own, axis))
        # Traced: compiled for all ranks at once, so shapes and dtypes are equal on all of them.
        if said is None:
            return x, (x.shape[dim],) * size
        _check_rests(where, x, dim, said[2::3])
        return _promote(where, x, said[1::3]), said[::3]
    known = tuple(int(length) for length in lengths)
    if len(known) != size or min(known) < 0:
        raise ShapeError(f"{where}: {known}. Give one length per index of {axis!r}: {size}.", lengths=known)
    index = ops.axis_index(axis)
    fits = {max(known), known[index]} if isinstance(index, int) else {max(known)}
    if x.shape[dim] not in fits:
        raise ShapeError(
            f"{where}: dim {dim} of shape {tuple(x.shape)} fits none of lengths={known}. Here it must be one of "
            f"{sorted(fits)}: the own length, or the longest with padding after the own one.",
            lengths=known,
            shape=tuple(x.shape),
        )
    return x, known


def _signature(x: Any, dim: int) -> tuple[int, int]:
    """Return what ranks compare beside the length, as numbers of 31 bits: the dtype, and the other dims."""
    name = str(x.dtype).removeprefix("torch.")
    code = _FLOATS.index(name) if name in _FLOATS else len(_FLOATS) + (crc32(name.encode()) >> 2)
    rest = (*x.shape[:dim], "length", *x.shape[dim + 1 :])
    return code, crc32(repr(rest).encode()) >> 1


def _check_rests(where: str, x: Any, dim: int, said: tuple[int, ...]) -> None:
    own = _signature(x, dim)[1]
    if min(said) != max(said):
        unlike = [index for index, rest in enumerate(said) if rest != own] or "others"
        raise ShapeError(
            f"{where}: ranks hold arrays that differ in another dim than {dim}: here {tuple(x.shape)}, other shapes at "
            f"the indices {unlike}. Only dim {dim} may differ.",
            dim=dim,
            shape=tuple(x.shape),
        )


def _promote(where: str, x: Any, codes: tuple[int, ...]) -> Any:
    """Return `x` in the dtype that all ranks' floats have in common."""
    if min(codes) == max(codes):
        return x
    if max(codes) >= len(_FLOATS):
        names = [_FLOATS[code] if code < len(_FLOATS) else "no float" for code in codes]
        raise ArrayTypeError(
            f"{where}: ranks hold unlike dtypes, by index {names}; here {x.dtype}. Floats are promoted to their common "
            f"dtype, others are not: convert them first.",
            dtype=x.dtype,
        )
    xp = array_api_compat.array_namespace(x)
    return xp.astype(x, xp.result_type(*(getattr(xp, _FLOATS[code]) for code in sorted(set(codes)))))


def join_segments(x: Any, dim: int, axis: Axis, lengths: tuple[int, ...]) -> Any:
    """Return the sequences of all indices one after another. *Collective over the axis.*"""
    dim = checked_dim("sequence lengths", x, dim)
    longest = max(lengths)
    whole = ops.all_gather(_append_zeros(x, dim, longest), axis, dim)
    if min(lengths) == longest:
        return whole
    xp = array_api_compat.array_namespace(x)
    lead = (slice(None),) * dim
    parts = [whole[(*lead, slice(i * longest, i * longest + length))] for i, length in enumerate(lengths)]
    return xp.concat(parts, axis=dim)


def own_segment(full: Any, dim: int, lengths: tuple[int, ...], index: Any) -> Any:
    """Return the sequence of an index; with a traced index, of the longest length with zeros after it. *Local.*"""
    dim = checked_dim("sequence.sp_take_own_seq", full, dim)
    if len(lengths) == 1:
        return full
    lead = (slice(None),) * dim
    if isinstance(index, int):
        first = sum(lengths[:index])
        return full[(*lead, slice(first, first + lengths[index]))]
    xp, longest = array_api_compat.array_namespace(full), max(lengths)
    known, steps = xp.asarray(lengths), xp.arange(longest)
    before = xp.sum(xp.where(xp.arange(len(lengths)) < index, known, xp.zeros_like(known)))
    taken = xp.take(_append_zeros(full, dim, full.shape[dim] + longest), before + steps, axis=dim)
    held = xp.reshape(steps < known[index], (longest,) + (1,) * (len(full.shape) - dim - 1))
    return xp.where(held, taken, xp.zeros_like(taken))


def _append_zeros(x: Any, dim: int, length: int) -> Any:
    """Append zeros up to a length."""
    if x.shape[dim] == length:
        return x
    xp = array_api_compat.array_namespace(x)
    shape = (*x.shape[:dim], length - x.shape[dim], *x.shape[dim + 1 :])
    return xp.concat([x, xp.zeros(shape, dtype=x.dtype, device=array_api_compat.device(x))], axis=dim)
