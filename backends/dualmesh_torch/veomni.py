"""The seed's names: what `veomni.distributed.parallel_state` and `.sequence_parallel` export, over what dualmesh has.

Modules written for the seed import from here instead. What differs from a function of dualmesh is the order of its
arguments, or a rule of the seed that its docstring says. Left out are the seed's kernels: `async_ulysses_*` (their
overlap is `dm.ops.all_to_all(async_=True)`) and the vision encoder's load balancing.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import dualmesh as dm
from dualmesh import scope
from dualmesh.errors import ArgumentError, ScopeError
from dualmesh.initialization import get_parallel_state_by_name
from dualmesh.registry import registry
from dualmesh.scope import get_parallel_state, use_parallel_state
from dualmesh.sequence import (
    gather_outputs,
    gather_seq_scatter_heads_qkv,
    get_context_parallel_group,
    get_context_parallel_rank,
    get_context_parallel_world_size,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_world_size,
    get_ulysses_sequence_parallel_group,
    get_ulysses_sequence_parallel_rank,
    get_ulysses_sequence_parallel_world_size,
    get_unified_sequence_parallel_group,
    get_unified_sequence_parallel_rank,
    get_unified_sequence_parallel_world_size,
    is_context_parallel_initialized,
    is_ulysses_sequence_parallel_initialized,
    pad_tensor,
    reduce_sequence_parallel_loss,
    slice_input_tensor,
    slice_input_tensor_scale_grad,
    sp_gather_seqs,
    sp_pad,
    sp_pad_and_slice,
    sp_take_own_seq,
    unpad_tensor,
)
from dualmesh.sequence.native_groups import found, is_native
from dualmesh.session import clear_parallel_state
from dualmesh.state import ParallelState

Result = TypeVar("Result")
Group = dist.ProcessGroup | str | tuple[str, ...] | None
_SIGNATURE = inspect.signature(dm.init_parallel_state)
_FROM_ACCELERATOR = (
    *("dp_size", "dp_replicate_size", "dp_shard_size", "tp_size", "pp_size", "cp_size", "ulysses_size"),
    *("extra_parallel_sizes", "extra_parallel_placement_innermost", "extra_parallel_names"),
)


def init_parallel_state(*args: Any, **kwargs: Any) -> ParallelState:
    """Register a state, as `dm.init_parallel_state` does; with `name=None` it takes no name that one would look up."""
    bound = _SIGNATURE.bind(*args, **kwargs)
    if bound.arguments.get("name", "base") is None:
        taken = registry.names()
        bound.arguments["name"] = next(f"unnamed {n}" for n in range(len(taken) + 1) if f"unnamed {n}" not in taken)
    return dm.init_parallel_state(*bound.args, **bound.kwargs)


def init_parallel_state_from_accelerator(accelerator: Any, name: str | None) -> ParallelState:
    """Register the state that a trainer's settings describe: any object with the seed's fields. *Collective.*"""
    sizes = {field: getattr(accelerator, field) for field in _FROM_ACCELERATOR}
    mode = accelerator.fsdp_config.fsdp_mode
    return init_parallel_state(**sizes, dp_mode=mode, async_enabled=accelerator.enable_async, name=name)


def set_parallel_state(parallel_state: ParallelState | None) -> ParallelState | None:
    """Make a state the default and return the one before; `use_parallel_state` is the scoped way. *Local.*

    None means a single process, as in the seed: a state over this rank alone, whose collectives are the identity.

    Raises:
        ScopeError: A scope is open, whose state would stay the ambient one.
    """
    if scope.current_scope() is not None:
        raise ScopeError(
            f"set_parallel_state: the scope {dm.scope_name()!r} is open, and its state would stay ambient. Use "
            f"use_parallel_state, or leave the scope first.",
            name=dm.scope_name(),
        )
    before = scope.default_state()
    if parallel_state is None and dist.is_initialized():
        parallel_state = init_parallel_state(dp_size=1, ranks=(dist.get_rank(),), backend="torch", name=None)
    scope.set_default(parallel_state, parallel_state.names[0] if parallel_state is not None else "base")
    return before


def gather_seq_scatter_heads(
    x: torch.Tensor, seq_dim: int, head_dim: int, unpadded_dim_size: int | None = 0, group: Group = None
) -> torch.Tensor:
    """Trade a split sequence for split heads; cut it to `unpadded_dim_size` where the size does not divide that."""

    def traded(axis: Any, size: int) -> torch.Tensor:
        cut = unpadded_dim_size if unpadded_dim_size and unpadded_dim_size % size else None
        options = {"seq_dim": seq_dim, "head_dim": head_dim, "axis": axis, "unpadded_length": cut}
        gathered: torch.Tensor = dm.sequence.gather_seq_scatter_heads(x, **options)
        return gathered

    return _over(group, traded)


def gather_heads_scatter_seq(x: torch.Tensor, head_dim: int, seq_dim: int, group: Group = None) -> torch.Tensor:
    """Trade split heads for a split sequence, padded to a multiple of the size. *Collective over the group.*"""

    def traded(axis: Any, size: int) -> torch.Tensor:
        scattered: torch.Tensor = dm.sequence.gather_heads_scatter_seq(x, seq_dim=seq_dim, head_dim=head_dim, axis=axis)
        return scattered

    return _over(group, traded)


def all_to_all_tensor(
    x: torch.Tensor, scatter_dim: int, gather_dim: int, group: Group = None, async_op: bool = False
) -> Any:
    """Send blocks of `scatter_dim`, concatenate along `gather_dim`; with `async_op` a function that waits for it."""

    def exchanged(axis: Any, size: int) -> Any:
        started = dm.ops.all_to_all(x, axis, split_dim=scatter_dim, concat_dim=gather_dim, async_=async_op)
        return started.wait if async_op else started

    return _over(group, exchanged)


def all_to_all_images(image_embeds: torch.Tensor, in_splits: Sequence[int], out_splits: Sequence[int]) -> torch.Tensor:
    """Send the first rows to each ulysses rank in turn; without `in_splits`, nothing. *Collective over ulysses.*"""
    if not in_splits:
        return image_embeds
    moved: torch.Tensor = dm.ops.ragged_all_to_all(image_embeds, "ulysses", in_splits, out_splits)
    return moved


def roll_with_sequence_parallel(input: torch.Tensor, shifts: int, dims: int, group: Group = None) -> torch.Tensor:
    """Roll the whole sequence of which `input` is this rank's block. *Collective over the group.*"""

    def rolled(axis: Any, size: int) -> torch.Tensor:
        moved: torch.Tensor = dm.sequence.roll(input, shifts, dims, axis)
        return moved

    return _over(group, rolled)


def padding_tensor_for_seqeunce_parallel(x: torch.Tensor, dim: int, group: Group = None) -> torch.Tensor:
    """Append zeros along `dim` up to a multiple of the size. *Local.*"""
    padded: torch.Tensor = _over(group, lambda axis, size: pad_tensor(x, dim, -x.shape[dim] % size))
    return padded


def unpadding_tensor_for_seqeunce_parallel(
    x: torch.Tensor, dim: int, unpadded_dim_size: int, group: Group = None
) -> torch.Tensor:
    """Cut what `padding_tensor_for_seqeunce_parallel` appended to `unpadded_dim_size` elements. *Local.*"""
    cut: torch.Tensor = _over(group, lambda axis, size: unpad_tensor(x, dim, -unpadded_dim_size % size))
    return cut


def remove_last_rank_padding(x: torch.Tensor, dim: int, unpad_dim_size: int, group: Group = None) -> torch.Tensor:
    """Cut the part of this rank's block that lies beyond the unpadded sequence. *Local.*"""

    def cut(axis: Any, size: int) -> torch.Tensor:
        left = unpad_dim_size - dm.ops.axis_index(axis) * x.shape[dim]
        return x.narrow(dim, 0, min(max(left, 0), x.shape[dim]))

    return _over(group, cut)


def vlm_images_a2a_meta(
    sp_rank: int, sp_size: int, image_lens: Sequence[int], image_masks: torch.Tensor
) -> tuple[list[int], list[int], torch.Tensor]:
    """Plan how image embeddings move from the ranks that encode them to those that hold their tokens. *Pure.*

    Images are encoded in equal runs, tokens lie in equal runs of the sequence. Returns the rows that this rank sends
    to each rank, those that it receives, and its part of the mask.

    Args:
        image_lens: Rows of every image of the batch, in order.
        image_masks: (batch, length), where tokens are images.
    """
    if sum(image_lens) != int(image_masks.sum()):
        raise ArgumentError(
            f"vlm_images_a2a_meta: image_lens add up to {sum(image_lens)}, but image_masks marks "
            f"{int(image_masks.sum())} tokens. They must be equal.",
            image_lens=tuple(image_lens),
        )
    masks = torch.split(image_masks, -(-image_masks.shape[1] // sp_size), dim=1)
    held = [int(mask.sum()) for mask in masks] + [0] * (sp_size - len(masks))
    per_rank = -(-len(image_lens) // sp_size)
    encoded = [sum(image_lens[rank * per_rank : (rank + 1) * per_rank]) for rank in range(sp_size)]
    sent, kept = _runs(encoded), _runs(held)
    send = [_overlap(sent[sp_rank], kept[rank]) for rank in range(sp_size)]
    receive = [_overlap(sent[rank], kept[sp_rank]) for rank in range(sp_size)]
    mine = masks[sp_rank] if sp_rank < len(masks) else image_masks[:, :0]
    return send, receive, mine


def divide_qkv_linear_weight(weight: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
    """Cut a fused projection into query, key and value. *Pure.*"""
    return weight.chunk(3, dim=dim)


def divide_qkv_linear_bias(bias: torch.Tensor | None, dim: int) -> tuple[torch.Tensor | None, ...]:
    """Cut a fused bias into query, key and value; three Nones where there is none. *Pure.*"""
    return (None, None, None) if bias is None else bias.chunk(3, dim=dim)


def _over(group: Group, fn: Callable[[Any, int], Result]) -> Result:
    """Return fn(axis, size) of a group, in the state that the group belongs to; without one, of ulysses."""
    if not is_native(group):
        axis: Any = "ulysses" if group is None else group
        return fn(axis, dm.ops.axis_size(axis))
    state, name = found(group)
    with use_parallel_state(state):
        return fn(name, state.size(name))


def _runs(lengths: Sequence[int]) -> list[range]:
    ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
    return [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def _overlap(one: range, other: range) -> int:
    return max(0, min(one.stop, other.stop) - max(one.start, other.start))


_init_parallel_state = init_parallel_state  # how the seed's newest releases call it

__all__ = [
    "ParallelState",
    "all_to_all_images",
    "all_to_all_tensor",
    "clear_parallel_state",
    "divide_qkv_linear_bias",
    "divide_qkv_linear_weight",
    "gather_heads_scatter_seq",
    "gather_outputs",
    "gather_seq_scatter_heads",
    "gather_seq_scatter_heads_qkv",
    "get_context_parallel_group",
    "get_context_parallel_rank",
    "get_context_parallel_world_size",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_parallel_state",
    "get_parallel_state_by_name",
    "get_ulysses_sequence_parallel_group",
    "get_ulysses_sequence_parallel_rank",
    "get_ulysses_sequence_parallel_world_size",
    "get_unified_sequence_parallel_group",
    "get_unified_sequence_parallel_rank",
    "get_unified_sequence_parallel_world_size",
    "init_parallel_state",
    "init_parallel_state_from_accelerator",
    "is_context_parallel_initialized",
    "is_ulysses_sequence_parallel_initialized",
    "pad_tensor",
    "padding_tensor_for_seqeunce_parallel",
    "reduce_sequence_parallel_loss",
    "remove_last_rank_padding",
    "roll_with_sequence_parallel",
    "set_parallel_state",
    "slice_input_tensor",
    "slice_input_tensor_scale_grad",
    "sp_gather_seqs",
    "sp_pad",
    "sp_pad_and_slice",
    "sp_take_own_seq",
    "unpad_tensor",
    "unpadding_tensor_for_seqeunce_parallel",
    "use_parallel_state",
    "vlm_images_a2a_meta",
]
