"""The collectives of `transpose_rules` in eager code, on `torch.distributed`, without gradients.

In compiled code `traced` takes their place; gradients are in `collectives`.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist

from dualmesh_torch.collectives import ragged, tensor_parallel
from dualmesh_torch.collectives.block_layout import bring_to_front, gathered_shape, join_blocks
from dualmesh_torch.collectives.dtypes import from_carried, summable, summable_copy, to_carried, unsummable, wire
from dualmesh_torch.collectives.group_member import GroupMember
from dualmesh_torch.collectives.ragged import Counts
from dualmesh_torch.private import gather, scatter

Tensor = torch.Tensor
Pairs = tuple[tuple[int, int], ...]

_SUM = dist.ReduceOp.SUM
OPS = {"sum": _SUM, "mean": _SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def _options(kind: Callable[[], Any], **fields: Any) -> Any:
    """Return options of a collective that its caller waits for at once, as torch's own functions set them. *Pure.*"""
    options = kind()
    for name, value in {"asyncOp": False, **fields}.items():
        setattr(options, name, value)
    return options


# What moves a tensor within tens of us asks the group itself: torch's functions look up every time whose it is.
_REDUCED = {op: _options(dist.AllreduceOptions, reduceOp=value) for op, value in OPS.items()}
_from: Any = lru_cache(256)(lambda index: _options(dist.BroadcastOptions, rootRank=index))
_to: Any = lru_cache(256)(lambda index: _options(dist.ReduceOptions, rootRank=index, reduceOp=_SUM))


def all_reduce(x: Tensor, member: GroupMember, *, op: str) -> Tensor:
    """Reduce elementwise."""
    total = summable_copy("ops.all_reduce", x)
    if total.numel():
        member.group.allreduce([total], _REDUCED[op]).wait()
    if op == "mean":
        total.div_(member.size)
    return unsummable(total, x.dtype)


def all_gather(x: Tensor, member: GroupMember, *, dim: int) -> Tensor:
    """Concatenate along a dim."""
    if not x.numel():
        return x.new_empty(gathered_shape(x, dim, member.size))
    sent = to_carried(x.contiguous())
    blocks = sent.new_empty((member.size * sent.shape[0], *sent.shape[1:]))
    gather(blocks, sent, group=member.group)
    found = from_carried(blocks, x.dtype)
    return found if dim == 0 else join_blocks(torch.unflatten(found, 0, (member.size, x.shape[0])), dim)


def reduce_scatter(x: Tensor, member: GroupMember, *, dim: int, op: str) -> Tensor:
    """Reduce, keep block `index`."""
    blocks = summable("ops.reduce_scatter", x if dim == 0 else bring_to_front(x, dim, member.size).flatten(0, 1))
    total = blocks.new_empty((blocks.shape[0] // member.size, *blocks.shape[1:]))
    if total.numel():
        scatter(total, blocks, _SUM, group=member.group)
    if op == "mean":
        total.div_(member.size)
    return unsummable(total, x.dtype)


def all_to_all(x: Tensor, member: GroupMember, *, split_dim: int, concat_dim: int) -> Tensor:
    """Trade blocks of one dim for blocks of another."""
    sent = bring_to_front(x, split_dim, member.size).contiguous()
    found = torch.empty_like(sent)
    if sent.numel():
        dist.all_to_all_single(wire(found), wire(sent), group=member.group)
    return join_blocks(found, concat_dim)


def broadcast(x: Tensor, member: GroupMember, *, src: int) -> Tensor:
    """Return the bits of index `src`."""
    is_source = member.index == src
    found = (torch.clone if is_source else torch.empty_like)(x, memory_format=torch.contiguous_format)
    if x.numel():
        member.group.broadcast([wire(found)], _from(src)).wait()
    return found


def reduce(x: Tensor, member: GroupMember, *, src: int) -> Tensor:
    """Sum to index `src`, zeros elsewhere: the transpose of `broadcast`."""
    total = summable_copy("ops.broadcast", x)
    if total.numel():
        member.group.reduce([total], _to(src)).wait()
    return unsummable(total if member.index == src else total.zero_(), x.dtype)


def permute(x: Tensor, member: GroupMember, *, pairs: Pairs) -> Tensor:
    """Send to a pair's dst, receive from a pair's src, zeros where there is none."""
    target, source = dict(pairs).get(member.index), {dst: src for src, dst in pairs}.get(member.index)
    return _send(x, member, target, source)


def shift(x: Tensor, member: GroupMember, *, offset: int, wrap: bool) -> Tensor:
    """Send `offset` indices on, around the end or zeros where nothing comes."""
    return _send(x, member, member.at(member.index + offset, wrap), member.at(member.index - offset, wrap))


def _send(x: Tensor, member: GroupMember, target: int | None, source: int | None) -> Tensor:
    if source == member.index and member.is_gloo:
        return x.clone(memory_format=torch.contiguous_format)
    sent = x.contiguous()
    found = torch.zeros_like(sent) if source is None else torch.empty_like(sent)
    if not x.numel():
        return found
    if not member.is_gloo:
        return _sent_by_all(sent, found, member, target, source)
    arriving = None if source is None else member.group.recv([wire(found)], source, 0)
    leaving = None if target is None else member.group.send([wire(sent)], target, 0)
    if arriving is not None:
        arriving.wait()
    if leaving is not None:
        leaving.wait()
    return found


def _sent_by_all(sent: Tensor, found: Tensor, member: GroupMember, target: int | None, source: int | None) -> Tensor:
    """Send by an exchange that every index takes part in: NCCL sets up its communicator with all of them."""
    count = _flat(sent).numel()
    out = [count if index == source else 0 for index in range(member.size)]
    into = [count if index == target else 0 for index in range(member.size)]
    moved = _flat(sent) if target is not None else _flat(sent)[:0]
    arrived = _flat(found) if source is not None else _flat(found)[:0]
    dist.all_to_all_single(arrived, moved, out, into, group=member.group)
    return found


def _flat(x: Tensor) -> Tensor:
    return to_carried(x.view(-1))


def trade_rows(rows: Tensor, member: GroupMember, into: Counts, out: Counts) -> Tensor:
    """Send `out[i]` rows to index i, receive `into[i]` rows from it."""
    found = rows.new_empty((sum(into), rows.shape[1]))
    dist.all_to_all_single(found, rows, list(into), list(out), group=member.group)
    return found


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
    "leave": partial(tensor_parallel.leave, all_reduce),
}
