"""The seed's sequence-parallel functions under their own names, arguments and gradients.

New code uses `blocks` and `ulysses`, whose gradients are exact transposes; here each gradient is what the seed's
callers count on. `group` is an axis, a tuple of axes, or a native group of the ambient or another registered state.
"""

from collections.abc import Sequence
from typing import Any

from dualmesh import ops
from dualmesh.errors import ArgumentError, ShapeError
from dualmesh.lazy import array_api_compat
from dualmesh.ops.checks import checked_dim
from dualmesh.resolution import positive
from dualmesh.scope import get_parallel_state
from dualmesh.sequence.blocks import pad_sequence, unpad_sequence
from dualmesh.sequence.native_groups import found, in_state_of_group, is_native
from dualmesh.sequence.packed import gathered_lengths, joined_segments, own_segment
from dualmesh.topology import Axis


def pad_tensor(x: Any, dim: int, padding_size: int, padding_value: float = 0) -> Any:
    """Append `padding_size` elements of `padding_value` along `dim`. *Local.*"""
    where = "sequence.pad_tensor"
    dim = checked_dim(where, x, dim)
    if positive(where, "padding_size", padding_size, least=0) == 0:
        return x
    xp = array_api_compat.array_namespace(x)
    shape = (*x.shape[:dim], padding_size, *x.shape[dim + 1 :])
    padding = xp.full(shape, padding_value, dtype=x.dtype, device=array_api_compat.device(x))
    return xp.concat([x, padding], axis=dim)


def unpad_tensor(x: Any, dim: int, padding_size: int) -> Any:
    """Cut the last `padding_size` elements of `dim`. *Local.*"""
    where = "sequence.unpad_tensor"
    dim = checked_dim(where, x, dim)
    return unpad_sequence(x, dim, x.shape[dim] - positive(where, "padding_size", padding_size, least=0))


def sp_pad(tensor: Any, dim: int = -1, pad_value: float = 0, pad_scale: int = 1) -> Any:
    """Append `pad_value` along `dim` up to a multiple of the size of sp times `pad_scale`. *Local.*"""
    dim = checked_dim("sequence.sp_pad", tensor, dim)
    unit = ops.axis_size("sp") * positive("sequence.sp_pad", "pad_scale", pad_scale)
    return pad_tensor(tensor, dim, -tensor.shape[dim] % unit, pad_value)


def sp_pad_and_slice(tensor: Any, dim: int = -1, pad_value: float = 0, pad_scale: int = 1) -> Any:
    """Return my block over sp of what `sp_pad` returns. *Local.* Gradient: zeros outside the block."""
    return ops.take_block(sp_pad(tensor, dim, pad_value, pad_scale), "sp", dim)


@in_state_of_group
def slice_input_tensor(x: Any, dim: int, padding: bool = True, padding_value: float = 0, group: Any = None) -> Any:
    """Return my block of a sequence that every index holds whole. *Local.* Gradient: zeros outside the block.

    Args:
        group: What it is split over; None: sp.

    Raises:
        ShapeError: The size does not divide `dim`, and `padding` is off.
    """
    axis = _axis(group, "sp")
    return ops.take_block(pad_sequence(x, dim, axis, value=padding_value) if padding else x, axis, dim)


@in_state_of_group
def slice_input_tensor_scale_grad(x: Any, dim: int, group: Any = None, scale_grad: bool = True) -> Any:
    """Return my block of a sequence that every index holds whole; the gradient is whole on every index.

    *Local; its gradient is collective.* Gradient: the blocks' cotangents of all indices concatenated, divided by the
    size where `scale_grad`. Two indices, cotangents 4 and 6: (2, 3) on both, (4, 6) without `scale_grad`.

    Args:
        group: What it is split over; None: ulysses.
    """
    axis = _axis(group, "ulysses")
    x = ops.enter(scaled_gradient(x, 1 / ops.axis_size(axis)) if scale_grad else x, axis)
    return ops.take_block(x, axis, dim)


@in_state_of_group
def gather_outputs(
    x: Any,
    gather_dim: int,
    padding_dim: int | None = None,
    unpad_dim_size: int | None = None,
    scale_grad: bool = True,
    group: Any = None,
    *,
    lengths: Sequence[int] | None = None,
) -> Any:
    """Return the whole sequence on every index. *Collective.*

    Gradient: my part of the summed cotangents, times the size where `scale_grad`. Two indices, cotangents (1, 2) and
    (3, 4): 4 and 6, or 8 and 12 with `scale_grad`.

    Args:
        padding_dim: Cut this dim to `unpad_dim_size`; None: cut nothing.
        group: What it is split over; None: sp.
        lengths: The length of every index' part; None: they are exchanged (JAX: equal).
    """
    axis = _axis(group, "sp")
    x = scaled_gradient(x, ops.axis_size(axis)) if scale_grad else x
    whole = joined_segments(x, gather_dim, axis, gathered_lengths(x, gather_dim, axis, lengths))
    if padding_dim is None:
        return whole
    if unpad_dim_size is None:
        raise ArgumentError("sequence.gather_outputs: padding_dim is given, unpad_dim_size is not. Give both or none.")
    return unpad_sequence(whole, padding_dim, unpad_dim_size)


def sp_gather_seqs(local: Any, dim: int, *, lengths: Sequence[int] | None = None) -> tuple[Any, list[int], Any]:
    """Concatenate the sequences of all indices of sp, of any lengths. *Collective over sp.*

    Gradient: my part of the summed cotangents.

    Args:
        local: This rank's sequence. Where shapes must be equal on all ranks (JAX), of the longest length, the rest
            padding.
        lengths: The length of every index' sequence; None: they are exchanged (JAX: equal).

    Returns:
        (the packed sequence, the lengths in index order, this rank's index).
    """
    known = gathered_lengths(local, dim, "sp", lengths)
    return joined_segments(local, dim, "sp", known), list(known), ops.axis_index("sp")


def sp_take_own_seq(full: Any, dim: int, seg_lengths: Sequence[int], sp_rank: Any) -> Any:
    """Return my sequence of a packed one: `sp_gather_seqs` backwards. *Local.* Gradient: zeros outside it.

    With a traced `sp_rank` (JAX) the result has the longest length, zeros after my sequence.
    """
    return own_segment(full, dim, tuple(seg_lengths), sp_rank)


@in_state_of_group
def gather_seq_scatter_heads_qkv(
    qkv_tensor: Any,
    seq_dim: int,
    unpadded_dim_size: int | None = None,
    restore_shape: bool = True,
    group: Any = None,
) -> Any:
    """Trade a split sequence for split heads in one exchange of fused query, key and value. *Collective.*

    The last dim holds three projections of p each; every index gets p / size of each of them. Gradient: the exact
    transpose.

    Args:
        unpadded_dim_size: Cut the gathered sequence to this length.
        restore_shape: Return (..., 3 p / size) instead of (..., 3, p / size).
        group: What it is split over; None: ulysses.
    """
    where = "sequence.gather_seq_scatter_heads_qkv"
    axis = _axis(group, "ulysses")
    seq_dim, width = checked_dim(where, qkv_tensor, seq_dim), qkv_tensor.shape[-1]
    if width % (3 * ops.axis_size(axis)) or seq_dim == len(qkv_tensor.shape) - 1:
        raise ShapeError(
            f"{where}: shape {tuple(qkv_tensor.shape)} with seq_dim {seq_dim}. The last dim holds three projections, "
            f"so 3 * {ops.axis_size(axis)} must divide it, and the sequence must be another dim.",
            shape=tuple(qkv_tensor.shape),
        )
    xp = array_api_compat.array_namespace(qkv_tensor)
    split = xp.reshape(qkv_tensor, (*qkv_tensor.shape[:-1], 3, width // 3))
    traded = ops.all_to_all(split, axis, split_dim=-1, concat_dim=seq_dim)
    if restore_shape:
        traded = xp.reshape(traded, (*traded.shape[:-2], 3 * traded.shape[-1]))
    return traded if not unpadded_dim_size else unpad_sequence(traded, seq_dim, unpadded_dim_size)


@in_state_of_group
def reduce_sequence_parallel_loss(loss: Any, num_valid_tokens: Any, group: Any = None) -> Any:
    """Return the mean over the tokens of all indices, of each index' mean; 0 where nobody has tokens. *Collective.*

    Gradient of the own mean: own tokens / all tokens, with no sum: every index counts the same loss once. Indices
    without tokens may bring NaN.

    Args:
        group: What the tokens are split over; None: sp.
    """
    axis = _axis(group, "sp")
    xp = array_api_compat.array_namespace(loss)
    own = xp.zeros_like(loss) + num_valid_tokens
    total = ops.all_reduce(get_parallel_state().collectives.stop_gradient(own), axis)
    summed = ops.leave(xp.where(own > 0, loss, xp.zeros_like(loss)) * own, axis)
    return summed / xp.where(total > 0, total, xp.ones_like(total))


def _axis(group: Any, default: str) -> Axis:
    """Return the axis that a seed's caller means."""
    if group is None:
        return default
    axis: Axis = found(group)[1] if is_native(group) else group
    return axis


def scaled_gradient(x: Any, factor: float) -> Any:
    """Return `x`, whose gradient is multiplied by a factor; the value keeps its bits."""
    xp = array_api_compat.array_namespace(x)
    if factor == 1 or not xp.isdtype(x.dtype, ("real floating", "complex floating")):
        return x
    still = get_parallel_state().collectives.stop_gradient(x)
    return xp.where(xp.isfinite(still), still - factor * (still - x), still)
