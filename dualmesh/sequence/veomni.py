"""VeOmni's sequence-parallel functions under their own names, arguments and gradients.

New code uses `blocks` and `ulysses`, whose gradients are exact transposes; here each gradient is what VeOmni's
callers count on. So is the padding: with 0 where nothing is said, integers and masks too. `group` is an axis, a tuple
of axes, or a native group of the ambient or another registered state.
"""

from collections.abc import Sequence
from typing import Any

from dualmesh import ops
from dualmesh._support.optional_imports import array_api_compat
from dualmesh.errors import ArgumentError, ShapeError
from dualmesh.ops.checks import checked_dim
from dualmesh.runtime.scope import get_parallel_state
from dualmesh.sequence.blocks import token_weighted_mean, unpad_sequence
from dualmesh.sequence.packed import agree_on_segments, join_segments, own_segment
from dualmesh.sequence.veomni_groups import find_state_of_group, in_state_of_group, is_native
from dualmesh.topology.resolve import positive
from dualmesh.topology.topology import Axis


def pad_tensor(x: Any, dim: int, padding_size: int, padding_value: float = 0) -> Any:
    """Append `padding_size` elements of `padding_value` along `dim`. *Local.*

    Args:
        padding_value: As in VeOmni 0 where nothing is said, for integers and masks too, where it is a token, a class or
            a position: `pad_sequence` asks there.
    """
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


def sp_pad(tensor: Any, dim: int = -1, pad_value: float = 0) -> Any:
    """Append `pad_value` along `dim` up to a multiple of the size of sp. *Local.*

    Args:
        pad_value: As in VeOmni 0 where nothing is said, for integers and masks too: `pad_sequence` asks there.
    """
    return _pad(tensor, dim, pad_value, 1)


def sp_pad_and_slice(tensor: Any, dim: int = -1, pad_value: float = 0, pad_scale: int = 1) -> Any:
    """Return my block over sp of a padded sequence. *Local.* Gradient: zeros outside the block.

    Args:
        pad_value: Appended along `dim` up to a multiple of the size of sp times `pad_scale`. As in VeOmni 0 where
            nothing is said, for integers and masks too: `slice_sequence` asks there.
    """
    return ops.take_block(_pad(tensor, dim, pad_value, pad_scale), "sp", dim)


def _pad(x: Any, dim: int, value: float, scale: int) -> Any:
    dim = checked_dim("sequence.sp_pad", x, dim)
    unit = ops.axis_size("sp") * positive("sequence.sp_pad", "pad_scale", scale)
    return pad_tensor(x, dim, -x.shape[dim] % unit, value)


@in_state_of_group
def slice_input_tensor(x: Any, dim: int, padding: bool = True, padding_value: float = 0, group: Any = None) -> Any:
    """Return my block of a sequence that every index holds whole. *Local.* Gradient: zeros outside the block.

    Args:
        padding: Append `padding_value` where the size does not divide `dim`. Without it every block has the length of
            the first, ceil(length / size), but what is left for the last ones is shorter or empty.
        padding_value: As in VeOmni 0 where nothing is said, for integers and masks too: `slice_sequence` asks there.
        group: What it is split over; None: sp.

    Raises:
        ShapeError: JAX, where blocks have one shape: the size does not divide `dim`, and `padding` is off.
    """
    axis = _axis(group, "sp")
    dim = checked_dim("sequence.slice_input_tensor", x, dim)
    if padding:
        return ops.take_block(pad_tensor(x, dim, -x.shape[dim] % ops.axis_size(axis), padding_value), axis, dim)
    index, block = ops.axis_index(axis), -(-x.shape[dim] // ops.axis_size(axis))
    if not isinstance(index, int):
        return ops.take_block(x, axis, dim)
    length = x.shape[dim]
    return x[(*(slice(None),) * dim, slice(min(block * index, length), min(block * (index + 1), length)))]


@in_state_of_group
def slice_input_tensor_scale_grad(x: Any, dim: int, group: Any = None, scale_grad: bool = True) -> Any:
    """Return my block of a sequence that every index holds whole; the gradient is whole on every index.

    *Local; its gradient is collective.* Gradient: the blocks' cotangents of all indices concatenated, divided by the
    size where `scale_grad`. Two indices, cotangents 4 and 6: (2, 3) on both, (4, 6) without `scale_grad`.

    Args:
        group: What it is split over; None: ulysses.
    """
    axis = _axis(group, "ulysses")
    x = ops.enter(scale_gradient(x, 1 / ops.axis_size(axis)) if scale_grad else x, axis)
    return ops.take_block(x, axis, dim)


@in_state_of_group
def gather_outputs(
    x: Any,
    gather_dim: int,
    padding_dim: int | None = None,
    unpad_dim_size: int | None = None,
    scale_grad: bool = False,
    group: Any = None,
    *,
    lengths: Sequence[int] | None = None,
) -> Any:
    """Return the whole sequence on every index. *Collective.*

    Gradient: my part of the summed cotangents, times the size where `scale_grad`. Two indices, cotangents (1, 2) and
    (3, 4): 4 and 6, or 8 and 12 with `scale_grad`.

    Args:
        padding_dim: Cut off this dim what brought `unpad_dim_size` to a multiple of the size; None: cut nothing.
        group: What it is split over; None: sp.
        lengths: The length of every index' part; None: they are exchanged (JAX: equal).
    """
    axis = _axis(group, "sp")
    size = ops.axis_size(axis)
    if padding_dim is not None and unpad_dim_size is None:
        raise ArgumentError("sequence.gather_outputs: padding_dim is given, unpad_dim_size is not. Give both or none.")
    x, known = agree_on_segments(scale_gradient(x, size) if scale_grad else x, gather_dim, axis, lengths)
    whole = join_segments(x, gather_dim, axis, known)
    if padding_dim is None or unpad_dim_size is None:
        return whole
    missing = -positive("sequence.gather_outputs", "unpad_dim_size", unpad_dim_size, least=0) % size
    return unpad_tensor(whole, padding_dim, missing)


def sp_gather_seqs(local: Any, dim: int, *, lengths: Sequence[int] | None = None) -> tuple[Any, list[int], Any]:
    """Concatenate the sequences of all indices of sp, of any lengths. *Collective over sp.*

    Unlike float dtypes become their common one. Gradient: my part of the summed cotangents.

    Args:
        local: This rank's sequence. Where shapes must be equal on all ranks (JAX), of the longest length, the rest
            padding.
        lengths: The length of every index' sequence; None: they are exchanged (JAX: equal).

    Returns:
        (the packed sequence, the lengths in index order, this rank's index).
    """
    local, known = agree_on_segments(local, dim, "sp", lengths)
    return join_segments(local, dim, "sp", known), list(known), ops.axis_index("sp")


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
    transpose. Where no group is given and ulysses has size 1, the input is returned as it is.

    Args:
        unpadded_dim_size: Cut the gathered sequence to this length, where the size does not divide it.
        restore_shape: Return (..., 3 p / size) instead of (..., 3, p / size).
        group: What it is split over; None: ulysses.
    """
    where = "sequence.gather_seq_scatter_heads_qkv"
    axis = _axis(group, "ulysses")
    size = ops.axis_size(axis)
    if group is None and size == 1:
        return qkv_tensor
    seq_dim, width = checked_dim(where, qkv_tensor, seq_dim), qkv_tensor.shape[-1]
    if width % (3 * size) or seq_dim == len(qkv_tensor.shape) - 1:
        raise ShapeError(
            f"{where}: shape {tuple(qkv_tensor.shape)} with seq_dim {seq_dim}. The last dim holds three projections, "
            f"so 3 * {size} must divide it, and the sequence must be another dim.",
            shape=tuple(qkv_tensor.shape),
        )
    xp = array_api_compat.array_namespace(qkv_tensor)
    split = xp.reshape(qkv_tensor, (*qkv_tensor.shape[:-1], 3, width // 3))
    traded = ops.all_to_all(split, axis, split_dim=-1, concat_dim=seq_dim)
    if restore_shape:
        traded = xp.reshape(traded, (*traded.shape[:-2], 3 * traded.shape[-1]))
    if not unpadded_dim_size or unpadded_dim_size % size == 0:
        return traded
    return unpad_sequence(traded, seq_dim, unpadded_dim_size)


@in_state_of_group
def reduce_sequence_parallel_loss(loss: Any, num_valid_tokens: Any, group: Any = None) -> Any:
    """Return the mean over the tokens of all indices, of each index' mean; 0 where nobody has tokens. *Collective.*

    Gradient of the own mean: size * own tokens / all tokens: VeOmni's trainers average gradients over the sequence
    axes too, which takes the size back. Two indices with 3 tokens and 1: 1.5 and 0.5. `token_weighted_mean` is the same
    value with a factor of one. The count is not overwritten by the sum, as it is there.

    Args:
        loss: The mean over this index' tokens; may be NaN where it has none.
        num_valid_tokens: Their number.
        group: What the tokens are split over; None: sp.
    """
    axis = _axis(group, "sp")
    size = ops.axis_size(axis)
    return token_weighted_mean(scale_gradient(loss, size), num_valid_tokens, axis)


def _axis(group: Any, default: str) -> Axis:
    """Return the axis that a seed's caller means."""
    if group is None:
        return default
    axis: Axis = find_state_of_group(group)[1] if is_native(group) else group
    return axis


def scale_gradient(x: Any, factor: float) -> Any:
    """Return `x`, whose gradient is multiplied by a factor; the value keeps its bits."""
    xp = array_api_compat.array_namespace(x)
    if factor == 1 or not xp.isdtype(x.dtype, ("real floating", "complex floating")):
        return x
    still = get_parallel_state().collectives.stop_gradient(x)
    return xp.where(xp.isfinite(still), still - factor * (still - x), still)
