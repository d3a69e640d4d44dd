"""Sequence parallelism, written once over `ops` and the array API.

A sequence is split along one dim over an axis: "ulysses" trades it for heads around attention, "sp" is all of it.
"""

from typing import Any

from dualmesh import ops
from dualmesh.errors import ShapeError
from dualmesh.lazy import array_api_compat
from dualmesh.resolution import positive
from dualmesh.state import ParallelState
from dualmesh.topology import Axis


def gather_seq_scatter_heads(
    x: Any,
    *,
    seq_dim: int,
    head_dim: int,
    axis: Axis = "ulysses",
    unpadded_length: int | None = None,
    state: ParallelState | None = None,
) -> Any:
    """Trade a split sequence for split heads: what Ulysses attention does before attention.

    *Collective over the axis.* Shape: `seq_dim` grows from s to size * s, `head_dim` shrinks from h to h / size.
    With fewer heads than positions (grouped KV heads), each head is repeated so that every index holds one; size
    must be a multiple of h. Gradient: the exact transpose.

    Args:
        x: This rank's block, (..., s, ..., h, ...).
        seq_dim: The dim that is split over the axis.
        head_dim: The dim of heads, all of them here.
        unpadded_length: Cut the gathered sequence to this length (see `pad_sequence`).
    """
    where = "sequence.gather_seq_scatter_heads"
    seq_dim, head_dim = _two_dims(where, x, seq_dim, head_dim)
    size = ops.axis_size(axis, state=state)
    x = _repeated_heads(where, x, head_dim, size, axis)
    x = ops.all_to_all(x, axis, split_dim=head_dim, concat_dim=seq_dim, state=state)
    return x if unpadded_length is None else unpad_sequence(x, seq_dim, unpadded_length)


def gather_heads_scatter_seq(
    x: Any, *, seq_dim: int, head_dim: int, axis: Axis = "ulysses", state: ParallelState | None = None
) -> Any:
    """Trade split heads for a split sequence: what Ulysses attention does after attention.

    *Collective over the axis.* Shape: `seq_dim` is padded with zeros to a multiple of size, then shrinks by size;
    `head_dim` grows from h to size * h. Gradient: the exact transpose.
    """
    seq_dim, head_dim = _two_dims("sequence.gather_heads_scatter_seq", x, seq_dim, head_dim)
    x = pad_sequence(x, seq_dim, axis, state=state)
    return ops.all_to_all(x, axis, split_dim=seq_dim, concat_dim=head_dim, state=state)


def slice_sequence(x: Any, dim: int, axis: Axis = "sp", *, state: ParallelState | None = None) -> Any:
    """Return my block of a sequence that every index holds whole; padded with zeros to a multiple of size. *Local.*

    Gradient: zeros outside the block, so that the sum over ranks is the gradient of the whole sequence.
    """
    return ops.take_block(pad_sequence(x, dim, axis, state=state), axis, dim, state=state)


def gather_sequence(
    x: Any, dim: int, axis: Axis = "sp", *, unpadded_length: int | None = None, state: ParallelState | None = None
) -> Any:
    """Return the whole sequence on every index. *Collective over the axis.*

    Gradient: reduce_scatter(sum): every index' use of the whole sequence counts.
    """
    x = ops.all_gather(x, axis, dim, state=state)
    return x if unpadded_length is None else unpad_sequence(x, dim, unpadded_length)


def pad_sequence(x: Any, dim: int, axis: Axis = "sp", *, value: float = 0.0, state: ParallelState | None = None) -> Any:
    """Append `value` along `dim` up to the next multiple of the size of the axis. *Local.*"""
    dim = ops.checked_dim("sequence.pad_sequence", x, dim)
    missing = -x.shape[dim] % ops.axis_size(axis, state=state)
    if missing == 0:
        return x
    xp = array_api_compat.array_namespace(x)
    shape = (*x.shape[:dim], missing, *x.shape[dim + 1 :])
    padding = xp.full(shape, value, dtype=x.dtype, device=array_api_compat.device(x))
    return xp.concat([x, padding], axis=dim)


def unpad_sequence(x: Any, dim: int, length: int) -> Any:
    """Cut `dim` to its first `length` elements. *Local.*"""
    where = "sequence.unpad_sequence"
    dim = ops.checked_dim(where, x, dim)
    length = positive(where, "length", length, least=0)
    if length > x.shape[dim]:
        raise ShapeError(
            f"{where}: length {length} is more than dim {dim} of shape {tuple(x.shape)} has.", length=length, dim=dim
        )
    return x if length == x.shape[dim] else x[(*(slice(None),) * dim, slice(0, length))]


def roll(x: Any, shift: int, dim: int, axis: Axis = "sp", *, state: ParallelState | None = None) -> Any:
    """Roll the whole sequence of which `x` is my block: element i of it moves to i + shift, cyclically.

    *Collective over the axis.* Sends one whole block and one remainder at most. Gradient: the roll by -shift.
    """
    where = "sequence.roll"
    dim = ops.checked_dim(where, x, dim)
    block = x.shape[dim]
    if block == 0:
        return x
    whole_blocks, rest = divmod(shift % (block * ops.axis_size(axis, state=state)), block)
    near = ops.shift(x, axis, whole_blocks, state=state) if whole_blocks else x
    if rest == 0:
        return near
    lead = (slice(None),) * dim
    tail = ops.shift(x[(*lead, slice(block - rest, block))], axis, whole_blocks + 1, state=state)
    xp = array_api_compat.array_namespace(x)
    return xp.concat([tail, near[(*lead, slice(0, block - rest))]], axis=dim)


def _repeated_heads(where: str, x: Any, head_dim: int, size: int, axis: Axis) -> Any:
    """Repeat grouped heads so that every index gets one."""
    heads = x.shape[head_dim]
    if heads % size == 0:
        return x
    if heads == 0 or size % heads:
        raise ShapeError(
            f"{where}: dim {head_dim} of shape {tuple(x.shape)} has {heads} heads, which axis {axis!r} of size {size} "
            f"neither divides nor is a multiple of. Heads must be a multiple or a divisor of {size}.",
            heads=heads,
            size=size,
            axis=axis,
        )
    xp = array_api_compat.array_namespace(x)
    return xp.repeat(x, size // heads, axis=head_dim)


def _two_dims(where: str, x: Any, seq_dim: int, head_dim: int) -> tuple[int, int]:
    seq, head = ops.checked_dim(where, x, seq_dim), ops.checked_dim(where, x, head_dim)
    if seq == head:
        raise ShapeError(f"{where}: seq_dim {seq_dim} and head_dim {head_dim} are one dim. Name two.", dim=seq)
    return seq, head
