"""The seed's sequence-parallel functions with its arguments, where they differ from those of `dualmesh.sequence`.

States and names of the seed's modules are in `veomni` and `seed_modules`. New code uses `dualmesh.sequence`.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.nn import functional

import dualmesh as dm
from dualmesh import scope, sequence
from dualmesh.errors import ArgumentError
from dualmesh.registry import registry
from dualmesh.sequence.native_groups import found
from dualmesh.state import ParallelState

Params = ParamSpec("Params")
Result = TypeVar("Result")
Group = dist.ProcessGroup | str | tuple[str, ...] | None
_NORMS: dict[str, Callable[..., torch.Tensor]] = {
    "rmsnorm": lambda x, shape, weight, bias, eps: functional.rms_norm(x, shape, weight, eps),
    "layernorm": lambda x, shape, weight, bias, eps: functional.layer_norm(x, shape, weight, bias, eps or 1e-5),
}


def of_any_group(fn: Callable[Params, Result]) -> Callable[Params, Result]:
    """Return `fn` such that its `group` may be one that the trainer made itself. *Collective over it*, once.

    A state over its ranks is registered then, under the group's name; the default stays what it was.
    """
    described = signature(fn)

    @wraps(fn)
    def wrapper(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        bound = described.bind(*args, **kwargs)
        group = bound.arguments.get("group")
        if not isinstance(group, dist.ProcessGroup):
            return fn(*args, **kwargs)
        state, axis = _meant(group)
        bound.arguments["group"] = axis
        with scope.use_parallel_state(state):
            return fn(*bound.args, **bound.kwargs)

    return wrapper


def _meant(group: dist.ProcessGroup) -> tuple[ParallelState, str]:
    """Return the state and the axis of a group; a foreign one is adopted."""
    name = f"group {group.group_name}"
    known = registry.named.get(name)
    if known is not None and known.is_live:
        return known, "group"
    try:
        return found(group)
    except ArgumentError:
        has_default = scope.default_state() is not None
        ranks = dist.get_process_group_ranks(group)
        spec = dm.TopologySpec({"group": len(ranks)})
        state = dm.init_parallel_state(spec=spec, ranks=ranks, backend="torch", name=name)
        if not has_default:
            scope.set_default(None)
        return state, "group"


gather_outputs = of_any_group(sequence.gather_outputs)
gather_seq_scatter_heads_qkv = of_any_group(sequence.gather_seq_scatter_heads_qkv)
reduce_sequence_parallel_loss = of_any_group(sequence.reduce_sequence_parallel_loss)
slice_input_tensor = of_any_group(sequence.slice_input_tensor)
slice_input_tensor_scale_grad = of_any_group(sequence.slice_input_tensor_scale_grad)


@of_any_group
def get_ulysses_sequence_parallel_rank(group: Group = None) -> Any:
    """Return this rank's index along ulysses, or in a group. *Pure.*"""
    return sequence.get_ulysses_sequence_parallel_rank() if group is None else dm.ops.axis_index(_axis(group))


@of_any_group
def get_ulysses_sequence_parallel_world_size(group: Group = None) -> int:
    """Return the size of ulysses, or of a group. *Pure.*"""
    size: int = sequence.get_ulysses_sequence_parallel_world_size() if group is None else dm.ops.axis_size(_axis(group))
    return size


@of_any_group
def gather_seq_scatter_heads(
    x: torch.Tensor, seq_dim: int, head_dim: int, unpadded_dim_size: int | None = 0, group: Group = None
) -> torch.Tensor:
    """Trade a split sequence for split heads; cut it to `unpadded_dim_size` where the size does not divide that."""
    axis = _axis(group)
    cut = unpadded_dim_size if unpadded_dim_size and unpadded_dim_size % dm.ops.axis_size(axis) else None
    options = {"seq_dim": seq_dim, "head_dim": head_dim, "axis": axis, "unpadded_length": cut}
    gathered: torch.Tensor = sequence.gather_seq_scatter_heads(x, **options)
    return gathered


@of_any_group
def gather_heads_scatter_seq(x: torch.Tensor, head_dim: int, seq_dim: int, group: Group = None) -> torch.Tensor:
    """Trade split heads for a split sequence, padded to a multiple of the size. *Collective over the group.*"""
    options = {"seq_dim": seq_dim, "head_dim": head_dim, "axis": _axis(group)}
    scattered: torch.Tensor = sequence.gather_heads_scatter_seq(x, **options)
    return scattered


@of_any_group
def all_to_all_tensor(
    x: torch.Tensor, scatter_dim: int, gather_dim: int, group: Group = None, async_op: bool = False
) -> Any:
    """Send blocks of `scatter_dim`, concatenate along `gather_dim`; with `async_op` a function that waits for it."""
    started = dm.ops.all_to_all(x, _axis(group), split_dim=scatter_dim, concat_dim=gather_dim, async_=async_op)
    return started.wait if async_op else started


def all_to_all_images(image_embeds: torch.Tensor, in_splits: Sequence[int], out_splits: Sequence[int]) -> torch.Tensor:
    """Send the first rows to each ulysses rank in turn; without `in_splits`, nothing. *Collective over ulysses.*"""
    if not in_splits:
        return image_embeds
    moved: torch.Tensor = dm.ops.ragged_all_to_all(image_embeds, "ulysses", in_splits, out_splits)
    return moved


@of_any_group
def roll_with_sequence_parallel(input: torch.Tensor, shifts: int, dims: int, group: Group = None) -> torch.Tensor:
    """Roll the whole sequence of which `input` is this rank's block. *Collective over the group.*"""
    moved: torch.Tensor = sequence.roll(input, shifts, dims, _axis(group))
    return moved


@of_any_group
def padding_tensor_for_seqeunce_parallel(x: torch.Tensor, dim: int, group: Group = None) -> torch.Tensor:
    """Append zeros along `dim` up to a multiple of the size. *Local.*"""
    padded: torch.Tensor = sequence.pad_tensor(x, dim, -x.shape[dim] % dm.ops.axis_size(_axis(group)))
    return padded


@of_any_group
def unpadding_tensor_for_seqeunce_parallel(
    x: torch.Tensor, dim: int, unpadded_dim_size: int, group: Group = None
) -> torch.Tensor:
    """Cut what `padding_tensor_for_seqeunce_parallel` appended to `unpadded_dim_size` elements. *Local.*"""
    cut: torch.Tensor = sequence.unpad_tensor(x, dim, -unpadded_dim_size % dm.ops.axis_size(_axis(group)))
    return cut


@of_any_group
def remove_last_rank_padding(x: torch.Tensor, dim: int, unpad_dim_size: int, group: Group = None) -> torch.Tensor:
    """Cut the part of this rank's block that lies beyond the unpadded sequence. *Local.*"""
    left = unpad_dim_size - dm.ops.axis_index(_axis(group)) * x.shape[dim]
    return x.narrow(dim, 0, min(max(left, 0), x.shape[dim]))


def async_ulysses_qkv_projection(
    hidden_states: torch.Tensor,
    seq_dimension: int,
    head_dimension: int,
    q_weight: torch.Tensor,
    q_bias: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    k_bias: torch.Tensor | None = None,
    v_weight: torch.Tensor | None = None,
    v_bias: torch.Tensor | None = None,
    norm_type: str | None = None,
    norm_q_weight: torch.Tensor | None = None,
    norm_q_bias: torch.Tensor | None = None,
    norm_k_weight: torch.Tensor | None = None,
    norm_k_bias: torch.Tensor | None = None,
    normalized_shape: int | Sequence[int] | None = None,
    eps: float | None = None,
    unpadded_dim_size: int | None = None,
    head_dim: int | None = None,
    group: Group = None,
) -> tuple[torch.Tensor, ...]:
    """Return query, key and value with whole sequences and split heads, query and key normalized. *Collective.*

    The numbers and gradients of the seed's function; its overlap of exchanges and products is not imitated.

    Raises:
        ArgumentError: A `norm_type` other than None, "rmsnorm" and "layernorm"; weights that are missing.
    """
    if norm_type is not None and norm_type not in _NORMS:
        raise ArgumentError(
            f"async_ulysses_qkv_projection: norm_type={norm_type!r}. Give None or one of {list(_NORMS)}."
        )
    if head_dim is None or k_weight is None or v_weight is None:
        raise ArgumentError("async_ulysses_qkv_projection: give q_weight, k_weight, v_weight and head_dim.")
    pairs = ((q_weight, q_bias), (k_weight, k_bias), (v_weight, v_bias))
    made = [functional.linear(hidden_states, *pair) for pair in pairs]
    heads = [x.reshape(*x.shape[:-1], -1, head_dim) for x in made]
    q, k, v = (gather_seq_scatter_heads(x, seq_dimension, head_dimension, unpadded_dim_size, group) for x in heads)
    if norm_type is not None:
        given = (head_dim,) if normalized_shape is None else normalized_shape
        shape = (given,) if isinstance(given, int) else tuple(given)
        q = _NORMS[norm_type](q, shape, norm_q_weight, norm_q_bias, eps)
        k = _NORMS[norm_type](k, shape, norm_k_weight, norm_k_bias, eps)
    return q, k, v


def async_ulysses_output_projection(
    hidden_states: torch.Tensor,
    seq_dimension: int,
    head_dimension: int,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor | None = None,
    unpadded_dim_size: int | None = None,
    group: Group = None,
) -> torch.Tensor:
    """Return the projection of what attention returned, a block of the sequence. *Collective.*

    The numbers and gradients of the seed's function, without its overlap; `unpadded_dim_size` is known from the shape.
    """
    traded = gather_heads_scatter_seq(hidden_states, head_dimension, seq_dimension, group)
    return functional.linear(traded.flatten(-2), proj_weight, proj_bias)


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


def _axis(group: Group) -> Any:
    return "ulysses" if group is None else group


def _runs(lengths: Sequence[int]) -> list[range]:
    ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
    return [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def _overlap(one: range, other: range) -> int:
    return max(0, min(one.stop, other.stop) - max(one.start, other.start))
