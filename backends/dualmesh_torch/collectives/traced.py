"""The collectives of `transpose_rules` in compiled code: functional operators that torch.compile traces.

Outside compiled code `eager` and the gradients in `collectives` take their place.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from dualmesh.backend.transpose_rules import WITHOUT_GRADIENT, Call, call, gradient
from dualmesh.topology.topology import Axis
from dualmesh_torch.collectives import ragged, tensor_parallel
from dualmesh_torch.collectives.block_layout import bring_to_front, gathered_shape, join_blocks
from dualmesh_torch.collectives.compile_errors import refuse_gradient
from dualmesh_torch.collectives.dtypes import from_carried, resolve_memory, summable, to_carried, unsummable
from dualmesh_torch.collectives.eager import Pairs
from dualmesh_torch.collectives.group_member import GroupMember
from dualmesh_torch.collectives.ragged import Counts
from dualmesh_torch.private import FUNCTIONAL

Tensor = torch.Tensor


def all_reduce(x: Tensor, member: GroupMember, *, op: str) -> Tensor:
    """Reduce elementwise."""
    if not x.numel():
        return x.clone()
    total = FUNCTIONAL.all_reduce(summable("ops.all_reduce", x), "sum" if op == "mean" else op, member.name)
    total = FUNCTIONAL.wait_tensor(total)
    return unsummable(total / member.size if op == "mean" else total, x.dtype)


def all_gather(x: Tensor, member: GroupMember, *, dim: int) -> Tensor:
    """Concatenate along a dim."""
    if not x.numel():
        return x.new_empty(gathered_shape(x, dim, member.size))
    sent = to_carried(x.contiguous())
    blocks = FUNCTIONAL.wait_tensor(FUNCTIONAL.all_gather_into_tensor(sent, member.size, member.name))
    found = from_carried(blocks, x.dtype)
    return found if dim == 0 else join_blocks(torch.unflatten(found, 0, (member.size, x.shape[0])), dim)


def reduce_scatter(x: Tensor, member: GroupMember, *, dim: int, op: str) -> Tensor:
    """Reduce, keep block `index`."""
    blocks = summable("ops.reduce_scatter", bring_to_front(x, dim, member.size))
    if not blocks.numel():
        return unsummable(blocks.new_empty(blocks.shape[1:]), x.dtype)
    # The operator scatters dim 0, which must hold the blocks one after another.
    whole = blocks.flatten(0, 1) if blocks.dim() > 1 else blocks
    total = FUNCTIONAL.wait_tensor(FUNCTIONAL.reduce_scatter_tensor(whole, "sum", member.size, member.name))
    total = total.view(blocks.shape[1:])
    return unsummable(total / member.size if op == "mean" else total, x.dtype)


def all_to_all(x: Tensor, member: GroupMember, *, split_dim: int, concat_dim: int) -> Tensor:
    """Trade blocks of one dim for blocks of another."""
    sent = bring_to_front(x, split_dim, member.size).contiguous()
    if not sent.numel():
        return join_blocks(sent, concat_dim)
    each = [1] * member.size
    found = FUNCTIONAL.wait_tensor(FUNCTIONAL.all_to_all_single(_rows(sent), each, each, member.name))
    return join_blocks(from_carried(found.view(-1), x.dtype).view(sent.shape), concat_dim)


def broadcast(x: Tensor, member: GroupMember, *, src: int) -> Tensor:
    """Return the bits of index `src`."""
    if not x.numel():
        return x.clone()
    found = FUNCTIONAL.wait_tensor(FUNCTIONAL.broadcast(to_carried(x.contiguous().view(-1)), src, member.name))
    return from_carried(found, x.dtype).view(x.shape)


def reduce(x: Tensor, member: GroupMember, *, src: int) -> Tensor:
    """Sum to index `src`, zeros elsewhere: the transpose of `broadcast`."""
    total = all_reduce(x, member, op="sum")
    return total if member.index == src else torch.zeros_like(total)


def permute(x: Tensor, member: GroupMember, *, pairs: Pairs) -> Tensor:
    """Send to a pair's dst, receive from a pair's src, zeros where there is none."""
    target = next((dst for src, dst in pairs if src == member.index), None)
    source = next((src for src, dst in pairs if dst == member.index), None)
    return _send(x, member, target, source)


def shift(x: Tensor, member: GroupMember, *, offset: int, wrap: bool) -> Tensor:
    """Send `offset` indices on, around the end or zeros where nothing comes."""
    return _send(x, member, member.at(member.index + offset, wrap), member.at(member.index - offset, wrap))


def _send(x: Tensor, member: GroupMember, target: int | None, source: int | None) -> Tensor:
    if not x.numel():
        return x.clone()
    if member.size == 1:
        return torch.zeros_like(x)
    flat = to_carried(x.contiguous().view(-1))
    count = flat.shape[0]
    out = [count if index == source else 0 for index in range(member.size)]
    into = [count if index == target else 0 for index in range(member.size)]
    sent = flat if target is not None else flat[:0]
    found = FUNCTIONAL.wait_tensor(FUNCTIONAL.all_to_all_single(sent, out, into, member.name))
    if source is None:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    return from_carried(found, x.dtype).view(x.shape)


def _rows(blocks: Tensor) -> Tensor:
    """Return blocks (count, ...) as carried rows (count, bytes or elements)."""
    return to_carried(blocks.flatten(1) if blocks.dim() > 1 else blocks.unsqueeze(1))


def trade_rows(rows: Tensor, member: GroupMember, into: Counts, out: Counts) -> Tensor:
    """Send `out[i]` rows to index i, receive `into[i]` rows from it."""
    found: Tensor = FUNCTIONAL.wait_tensor(FUNCTIONAL.all_to_all_single(rows, list(into), list(out), member.name))
    return found


def _summed_apart(x: Tensor, member: GroupMember, *, op: str) -> Tensor:
    """Sum as `all_reduce` does, told apart from it by a shape.

    Torch makes equal computations of one graph one, results included, though they have different gradients.
    """
    return all_reduce(x.unsqueeze(0), member, op=op).squeeze(0)


VERBS: dict[str, Callable[..., Tensor]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "broadcast": broadcast,
    "reduce": reduce,
    "permute": permute,
    "shift": shift,
    "ragged_all_to_all": partial(ragged.all_to_all, trade_rows),
    "enter": tensor_parallel.enter,
    "leave": partial(tensor_parallel.leave, _summed_apart),
}


def apply_collective(verb: str, x: Tensor, axis: Axis, member: GroupMember, settings: dict[str, Any]) -> Tensor:
    """Return what a collective makes of a block, with its gradient. *Collective over the group.*"""
    if x.requires_grad and torch.is_grad_enabled():
        if settings.get("op") in WITHOUT_GRADIENT:
            refuse_gradient(axis, settings["op"])
        found: Tensor = _apply(x, call(verb, axis, member.size, **settings), member)
        return found
    return VERBS[verb](resolve_memory(x), member, **settings)


def backward(cotangent: Tensor, forward: Call, member: GroupMember) -> Tensor:
    """Return the cotangent of what a collective was given. *Collective over the group.*"""
    # The graph of a gradient is kept only where gradients of gradients are asked for.
    run = _apply if torch.is_grad_enabled() and cotangent.requires_grad else _carried_out
    found: Tensor = run(cotangent, gradient(forward), member)
    return found


def _carried_out(x: Tensor, what: Call, member: GroupMember) -> Tensor:
    found = VERBS[what.verb](resolve_memory(x), member, **dict(what.settings))
    return found if what.scale == 1.0 else found * what.scale


class _Linear(torch.autograd.Function):
    """Any collective and, as its gradient, the one that the op table names."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Call, member: GroupMember) -> Tensor:
        ctx.call, ctx.member = forward, member
        found = _carried_out(x, forward, member)
        # Torch 2.11 gives a gradient of zeros to a result that is an intermediate under two names, as `.contiguous()`
        # returns one that lies so already; not seen in 2.13. The view costs nothing in compiled code.
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None, None]:
        (cotangent,) = cotangents
        return backward(cotangent, ctx.call, ctx.member), None, None


_apply: Any = _Linear.apply
