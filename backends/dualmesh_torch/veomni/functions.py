"""VeOmni's sequence-parallel functions with its arguments, where they differ from those of `dualmesh.sequence`.

States are in `states`, groups in `group_pool`, projections in `projections`. New code uses `dualmesh.sequence`.
"""

from functools import partial
from typing import Any

import torch

import dualmesh as dm
from dualmesh import sequence
from dualmesh_torch.veomni.groups import Group, axis_of, of_any_group

gather_seq_scatter_heads_qkv = of_any_group(sequence.gather_seq_scatter_heads_qkv)
reduce_sequence_parallel_loss = of_any_group(sequence.reduce_sequence_parallel_loss, default="sp")
slice_input_tensor = of_any_group(sequence.slice_input_tensor, default="sp")
slice_input_tensor_scale_grad = of_any_group(sequence.slice_input_tensor_scale_grad)


@partial(of_any_group, default="sp")
def gather_outputs(
    x: torch.Tensor,
    gather_dim: int,
    padding_dim: int | None = None,
    unpad_dim_size: int | None = None,
    scale_grad: bool = False,
    group: Group = None,
) -> torch.Tensor:
    """Return the whole sequence on every rank of the group (sp). *Collective over it*; see `dm.sequence`."""
    whole: torch.Tensor = sequence.gather_outputs(x, gather_dim, padding_dim, unpad_dim_size, scale_grad, group)
    return whole


def sp_gather_seqs(local: torch.Tensor, dim: int) -> tuple[torch.Tensor, list[int], int]:
    """Concatenate the sequences of all indices of sp, of any lengths. *Collective over sp*; see `dm.sequence`."""
    packed: tuple[torch.Tensor, list[int], int] = sequence.sp_gather_seqs(local, dim)
    return packed


@of_any_group
def get_ulysses_sequence_parallel_rank(group: Group = None) -> Any:
    """Return this rank's index along ulysses, or in a group. *Pure.*"""
    return sequence.get_ulysses_sequence_parallel_rank() if group is None else dm.ops.axis_index(axis_of(group))


@of_any_group
def get_ulysses_sequence_parallel_world_size(group: Group = None) -> int:
    """Return the size of ulysses, or of a group. *Pure.*"""
    size: int = (
        sequence.get_ulysses_sequence_parallel_world_size() if group is None else dm.ops.axis_size(axis_of(group))
    )
    return size


@of_any_group
def gather_seq_scatter_heads(
    x: torch.Tensor, seq_dim: int, head_dim: int, unpadded_dim_size: int | None = 0, group: Group = None
) -> torch.Tensor:
    """Trade a split sequence for split heads; cut it to `unpadded_dim_size` where the size does not divide that."""
    axis = axis_of(group)
    cut = unpadded_dim_size if unpadded_dim_size and unpadded_dim_size % dm.ops.axis_size(axis) else None
    options = {"seq_dim": seq_dim, "head_dim": head_dim, "axis": axis, "unpadded_length": cut}
    gathered: torch.Tensor = sequence.gather_seq_scatter_heads(x, **options)
    return gathered


@of_any_group
def gather_heads_scatter_seq(x: torch.Tensor, head_dim: int, seq_dim: int, group: Group = None) -> torch.Tensor:
    """Trade split heads for a split sequence, padded to a multiple of the size. *Collective over the group.*"""
    options = {"seq_dim": seq_dim, "head_dim": head_dim, "axis": axis_of(group)}
    padded = padding_tensor_for_seqeunce_parallel(x, seq_dim, group)  # with zeros, integers too
    scattered: torch.Tensor = sequence.gather_heads_scatter_seq(padded, **options)
    return scattered


@of_any_group
def all_to_all_tensor(x: torch.Tensor, scatter_dim: int, gather_dim: int, group: Group, async_op: bool = False) -> Any:
    """Send blocks of `scatter_dim`, concatenate along `gather_dim`; with `async_op` a function that waits for it."""
    started = dm.ops.all_to_all(x, axis_of(group), split_dim=scatter_dim, concat_dim=gather_dim, async_=async_op)
    return started.wait if async_op else started


@of_any_group
def roll_with_sequence_parallel(input: torch.Tensor, shifts: int, dims: int, group: Group = None) -> torch.Tensor:
    """Roll the whole sequence of which `input` is this rank's block. *Collective over the group.*"""
    moved: torch.Tensor = sequence.roll(input, shifts, dims, axis_of(group))
    return moved


@of_any_group
def padding_tensor_for_seqeunce_parallel(x: torch.Tensor, dim: int, group: Group = None) -> torch.Tensor:
    """Append zeros along `dim` up to a multiple of the size. *Local.*"""
    padded: torch.Tensor = sequence.pad_tensor(x, dim, -x.shape[dim] % dm.ops.axis_size(axis_of(group)))
    return padded


@of_any_group
def unpadding_tensor_for_seqeunce_parallel(
    x: torch.Tensor, dim: int, unpadded_dim_size: int, group: Group = None
) -> torch.Tensor:
    """Cut what `padding_tensor_for_seqeunce_parallel` appended to `unpadded_dim_size` elements. *Local.*"""
    cut: torch.Tensor = sequence.unpad_tensor(x, dim, -unpadded_dim_size % dm.ops.axis_size(axis_of(group)))
    return cut


@of_any_group
def remove_last_rank_padding(x: torch.Tensor, dim: int, unpad_dim_size: int, group: Group = None) -> torch.Tensor:
    """Cut the part of this rank's block that lies beyond the unpadded sequence. *Local.*"""
    left = unpad_dim_size - dm.ops.axis_index(axis_of(group)) * x.shape[dim]
    return x.narrow(dim, 0, min(max(left, 0), x.shape[dim]))
