"""Collectives that are under way while other work is done, without gradients.

The same run to their end in `eager`; gradients are in `collectives`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dualmesh.backend.pending import Pending
from dualmesh_torch import private
from dualmesh_torch.collectives import eager, exchanges
from dualmesh_torch.collectives.block_layout import bring_to_front, join_blocks
from dualmesh_torch.collectives.dtypes import from_carried, summable, summable_copy, to_carried, unsummable
from dualmesh_torch.collectives.exchanges import exchange
from dualmesh_torch.collectives.group_member import GroupMember

Tensor = torch.Tensor
Started = tuple[Any, tuple[Tensor, ...], Callable[[], Tensor]]
"""What to wait for, the buffers that must live until then, and how the result is made of them."""


class _Watched:
    """Work whose failure is said in dualmesh's words."""

    def __init__(self, work: Any, verb: str, member: GroupMember) -> None:
        self._work = work
        self._verb = verb
        self._party = member

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            exchanges.refuse_failure(self._verb, self._party, error)
            raise


class UnderWay(Pending):
    """A collective that torch.distributed carries out."""

    def __init__(self, started: Started, finish: Callable[[Tensor], Any] | None = None) -> None:
        self._started: Started | None = started
        self._finish = finish
        self._result: Any = None

    def wait(self) -> Any:
        if self._started is not None:
            work, _, made = self._started
            work.wait()
            result = made()
            self._result = result if self._finish is None else self._finish(result)
            self._started = None
        return self._result


def all_reduce(x: Tensor, member: GroupMember, *, op: str) -> Started:
    """Start to reduce elementwise."""
    total = summable_copy("ops.all_reduce", x)
    work = dist.all_reduce(total, eager.OPS[op], group=member.group, async_op=True)
    return work, (total,), lambda: unsummable(total.div_(member.size) if op == "mean" else total, x.dtype)


def all_gather(x: Tensor, member: GroupMember, *, dim: int) -> Started:
    """Start to concatenate along a dim."""
    sent = to_carried(x.contiguous())
    blocks = sent.new_empty((member.size * sent.shape[0], *sent.shape[1:]))
    work = private.gather(blocks, sent, group=member.group, async_op=True)

    def made() -> Tensor:
        found = from_carried(blocks, x.dtype)
        return found if dim == 0 else join_blocks(torch.unflatten(found, 0, (member.size, x.shape[0])), dim)

    return work, (sent, blocks), made


def reduce_scatter(x: Tensor, member: GroupMember, *, dim: int, op: str) -> Started:
    """Start to reduce and scatter."""
    blocks = summable("ops.reduce_scatter", bring_to_front(x, dim, member.size))
    total = blocks.new_empty(blocks.shape[1:])
    work = private.scatter(total.view(-1), blocks.view(-1), dist.ReduceOp.SUM, group=member.group, async_op=True)
    return work, (blocks, total), lambda: unsummable(total.div_(member.size) if op == "mean" else total, x.dtype)


def all_to_all(x: Tensor, member: GroupMember, *, split_dim: int, concat_dim: int) -> Started:
    """Start to trade blocks of one dim for blocks of another."""
    sent = bring_to_front(x, split_dim, member.size).contiguous()
    found = torch.empty_like(sent)
    into, out = to_carried(found.view(-1)), to_carried(sent.view(-1))
    work = dist.all_to_all_single(into, out, group=member.group, async_op=True)
    return work, (sent, found), lambda: join_blocks(found, concat_dim)


def start(verb: str, x: Tensor, member: GroupMember, **settings: Any) -> Started:
    """Start a collective. *Collective over the group*; waits for nobody, except in debug mode."""
    with exchange(f"ops.{verb}", member, x, **settings):
        work, held, made = STARTS[verb](x, member, **settings)
    return _Watched(work, f"ops.{verb}", member), held, made


STARTS: dict[str, Callable[..., Started]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
}
