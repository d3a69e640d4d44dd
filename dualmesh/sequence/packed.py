"""Sequences of different length on every index, packed into one and taken apart again.

Blocks of equal length are in `blocks`.
"""

from collections.abc import Sequence
from typing import Any

from dualmesh import ops
from dualmesh.errors import ShapeError
from dualmesh.lazy import array_api_compat
from dualmesh.ops.checks import checked_dim
from dualmesh.ops.ragged import plain_counts
from dualmesh.topology import Axis


def gathered_lengths(x: Any, dim: int, axis: Axis, lengths: Sequence[int] | None) -> tuple[int, ...]:
    """Return the length of every index' sequence, exchanged where they are not given. *Collective then.*"""
    where, size = "sequence lengths", ops.axis_size(axis)
    dim = checked_dim(where, x, dim)
    if lengths is None:
        xp = array_api_compat.array_namespace(x)
        own = xp.asarray([x.shape[dim]], device=array_api_compat.device(x))
        # Traced lengths: compiled for all ranks at once, so shapes are equal on all of them.
        return plain_counts(ops.all_gather(own, axis)) or (x.shape[dim],) * size
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
    return known


def joined_segments(x: Any, dim: int, axis: Axis, lengths: tuple[int, ...]) -> Any:
    """Return the sequences of all indices one after another. *Collective over the axis.*"""
    dim = checked_dim("sequence lengths", x, dim)
    longest = max(lengths)
    whole = ops.all_gather(_lengthened(x, dim, longest), axis, dim)
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
    taken = xp.take(_lengthened(full, dim, full.shape[dim] + longest), before + steps, axis=dim)
    held = xp.reshape(steps < known[index], (longest,) + (1,) * (len(full.shape) - dim - 1))
    return xp.where(held, taken, xp.zeros_like(taken))


def _lengthened(x: Any, dim: int, length: int) -> Any:
    """Append zeros up to a length."""
    if x.shape[dim] == length:
        return x
    xp = array_api_compat.array_namespace(x)
    shape = (*x.shape[:dim], length - x.shape[dim], *x.shape[dim + 1 :])
    return xp.concat([x, xp.zeros(shape, dtype=x.dtype, device=array_api_compat.device(x))], axis=dim)
