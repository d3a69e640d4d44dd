"""What VeOmni's modules and tests call by `.apply`: its autograd functions, over functions that exist.

Functions are in `functions` and `projections`; which module has which name is in `scoped_modules`.
"""

from functools import partial
from typing import Any

import torch

import dualmesh as dm
from dualmesh.sequence.packed import agree_on_segments, join_segments
from dualmesh.sequence.veomni import scale_gradient
from dualmesh_torch.veomni import projections
from dualmesh_torch.veomni.functions import (
    all_to_all_tensor,
    gather_outputs,
    reduce_sequence_parallel_loss,
    slice_input_tensor_scale_grad,
)
from dualmesh_torch.veomni.groups import Group, of_any_group


class AllToAllOfSequences:
    """VeOmni's autograd function of that exchange."""

    @staticmethod
    def apply(group: Group, local_input: torch.Tensor, scatter_dim: int, gather_dim: int, *_: bool) -> Any:
        """Send blocks of `scatter_dim`, concatenate along `gather_dim`. *Collective over the group.*"""
        return all_to_all_tensor(local_input, scatter_dim, gather_dim, group)


class SliceOfSequence:
    """VeOmni's autograd function that cuts."""

    @staticmethod
    def apply(group: Group, local_input: torch.Tensor, dim: int, scale_grad: bool) -> Any:
        """Return this rank's block; gradients are gathered. *Its gradient is collective over the group.*"""
        return slice_input_tensor_scale_grad(local_input, dim, group, scale_grad)


class GatherOfSequence:
    """VeOmni's autograd function that gathers."""

    @staticmethod
    def apply(
        group: Group, local_input: torch.Tensor, dim: int, grad_scale: bool = False, sum_grad: bool = True
    ) -> torch.Tensor:
        """Concatenate blocks, of any lengths. *Collective over the group.*

        Args:
            grad_scale: Whether the gradient is multiplied by the size.
            sum_grad: Whether it is the sum of what all ranks have for this block; else it is this rank's own.
        """
        if sum_grad:
            whole: torch.Tensor = gather_outputs(local_input, dim, scale_grad=grad_scale, group=group)
            return whole
        return _gather_with_own_gradient(local_input, dim, grad_scale, group=group)


class ReduceLoss:
    """VeOmni's autograd function of a mean over tokens."""

    @staticmethod
    def apply(loss: torch.Tensor, num_valid_tokens: torch.Tensor, group: Group = None) -> Any:
        """Return the mean over the tokens of all indices. *Collective over the group.*"""
        return reduce_sequence_parallel_loss(loss, num_valid_tokens, group)


class AsyncUlyssesQKVProjection:
    """VeOmni's autograd function of the projections before attention, of `async_ulysses`."""

    apply = staticmethod(projections.async_ulysses_qkv_projection)


class AsyncUlyssesOutputProjection:
    """VeOmni's autograd function of the projection after attention, of `async_ulysses`."""

    apply = staticmethod(projections.async_ulysses_output_projection)


class AsyncUlyssesQKVProjectionDit:
    """VeOmni's autograd function of the projections before attention, of `async_ulysses_dit`."""

    apply = staticmethod(projections.async_ulysses_qkv_projection_dit)


class AsyncUlyssesOutputProjectionDit:
    """VeOmni's autograd function of the projection after attention, of `async_ulysses_dit`."""

    apply = staticmethod(projections.async_ulysses_output_projection_dit)


@partial(of_any_group, default="sp")
def _gather_with_own_gradient(x: torch.Tensor, dim: int, is_scaled: bool, group: Group = None) -> torch.Tensor:
    axis: Any = "sp" if group is None else group
    x, lengths = agree_on_segments(x, dim, axis, None)
    index = dm.ops.axis_index(axis)
    blocks = list(join_segments(x.detach(), dim, axis, lengths).split(list(lengths), dim))
    blocks[index] = scale_gradient(x, dm.ops.axis_size(axis)) if is_scaled else x
    return torch.cat(blocks, dim)
