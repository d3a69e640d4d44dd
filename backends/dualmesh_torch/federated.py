"""Federated averaging of torch tensors, whole or as the shards of DTensors.

Who exchanges what is planned in `dualmesh.topology.averaging`; whose groups carry it, the caller says.
"""

import hashlib
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from dualmesh.errors import AgreementError, ArrayTypeError, ShardingError, listed
from dualmesh.sharding.tree import leaves, mapped
from dualmesh.topology.averaging import AveragingPlan, Step
from dualmesh_torch.collectives.exchanges import exchange
from dualmesh_torch.collectives.group_member import GroupMember
from dualmesh_torch.private import gather

Tensor = torch.Tensor
PartyOf = Callable[[str], GroupMember]
"""Returns this rank's place in the group of a step: "mean", "exchange", "broadcast", or "everyone" for all ranks."""


class _Window(NamedTuple):
    """Where a shard lies in what its group sums."""

    dim: int
    start: int
    length: int
    action: str = "exchange"


def average(tree: Any, plan: AveragingPlan, rank: int, member_of: PartyOf, home: tuple[int, ...]) -> Any:
    """Return the tree of means. *Collective over the plan's ranks.*

    Args:
        rank: This rank in the plan.
        member_of: The groups.
        home: The ranks of the world that make up this rank's federation, on which DTensors must lie.

    Raises:
        ArrayTypeError: A leaf is no tensor of floating or complex numbers.
        ShardingError: A DTensor whose shards cannot be those of the plan.
        AgreementError: Ranks gave different trees or weights.
    """
    for x in leaves(tree):
        _check(x, plan, home)
    _agree(tree, plan, member_of("everyone"))
    return mapped(lambda x: _mean(x.detach(), plan, rank, member_of), tree)


def _mean(x: Tensor, plan: AveragingPlan, rank: int, member_of: PartyOf) -> Tensor:
    held = x.to_local() if isinstance(x, DTensor) else x
    value = held.to(torch.float32) if held.dtype.itemsize < 4 else held
    window = _window(x, plan, rank)
    for action in ("mean", "exchange", "broadcast"):
        if window is not None and action == "exchange":
            value = _sum_pieces(value, window, plan.shares[plan.topology.federated_rank(rank)], member_of)
            continue
        step = plan.step(action, rank)
        if len(step.ranks) > 1:
            value = _take_step(value, step, rank, member_of(action))
    value = value.to(held.dtype) if value is not held else held.clone()
    if not isinstance(x, DTensor):
        return value
    return DTensor.from_local(value, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())


def _take_step(value: Tensor, step: Step, rank: int, member: GroupMember) -> Tensor:
    """Return the value after a step on whole values or like shards."""
    place = step.ranks.index(rank)
    if step.action == "broadcast":
        found = value.clone(memory_format=torch.contiguous_format)
        if found.numel():
            with exchange("federated_mean", member, found, src=step.src):
                dist.broadcast(found, group=member.group, group_src=step.src)
        return found
    weight = step.weights[place] if step.pieces[place].place == 0 else 0.0
    total = value.mul(weight).contiguous() if weight else torch.zeros_like(value, memory_format=torch.contiguous_format)
    return _sum(total, member)


def _sum_pieces(value: Tensor, window: _Window, share: float, member_of: PartyOf) -> Tensor:
    """Return what lies at this rank's place in the sum of shards of different sizes."""
    shape = list(value.shape)
    shape[window.dim] = window.length
    total = value.new_zeros(shape)
    own = total.narrow(window.dim, window.start, value.shape[window.dim])
    if share:
        own.copy_(value).mul_(share)
    return _sum(total, member_of(window.action)).narrow(window.dim, window.start, value.shape[window.dim]).contiguous()


def _sum(total: Tensor, member: GroupMember) -> Tensor:
    if total.numel():
        with exchange("federated_mean", member, total):
            dist.all_reduce(torch.view_as_real(total) if total.is_complex() else total, group=member.group)
    return total


def _window(x: Tensor, plan: AveragingPlan, rank: int) -> _Window | None:
    """Return where a shard lies, where federations cut the model into shards of different sizes; else None."""
    topology = plan.topology
    cuts = list(_cuts(x))
    if topology.shard_size is not None or topology.is_symmetric or not cuts:
        return None
    ((size, dim),) = cuts
    length, index = x.shape[dim], topology.federated_index(rank)
    if all(length % other == 0 for other in topology.sizes):
        width = length // size
        return _Window(dim, plan.piece(rank).place * width, length // topology.parts)
    start = min(index * -(-length // size), length)  # torch's uneven shards have no common borders
    return _Window(dim, start, length, "everyone")


def _cuts(x: Any) -> Iterator[tuple[int, int]]:
    """Yield (ranks, dim) of every mesh dim that splits a tensor."""
    if isinstance(x, DTensor):
        for size, placement in zip(x.device_mesh.shape, x.placements, strict=True):
            if not placement.is_replicate() and size > 1:
                yield size, getattr(placement, "dim", -1)


def _check(x: Any, plan: AveragingPlan, home: tuple[int, ...]) -> None:
    if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
        found = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__qualname__}"
        raise ArrayTypeError(
            f"federated_mean: found {found}. A mean is taken of floating or complex tensors: leave it out of the tree.",
            found=type(x),
        )
    if not isinstance(x, DTensor):
        return
    ranks, width = x.device_mesh.mesh.flatten().tolist(), plan.topology.shard_size or len(home)
    partial = any(placement.is_partial() for placement in x.placements)
    parts = prod(size for size, _ in _cuts(x))
    uneven = plan.topology.shard_size is None and not plan.topology.is_symmetric
    plain = all(isinstance(p, Shard) or p.is_replicate() for p in x.placements)
    if not set(ranks) <= set(home) or partial or width % parts or (uneven and (len(list(_cuts(x))) > 1 or not plain)):
        raise ShardingError(
            f"federated_mean: a DTensor of shape {tuple(x.shape)} is {x.placements} on ranks {listed(ranks)}. It must "
            f"lie on this rank's federation ({listed(home)}) only, split into shards of one replica ({width} ranks), "
            f"and not be partial{'; over one mesh dim, where federations differ in size' if uneven else ''}.",
            placements=x.placements,
        )


def _agree(tree: Any, plan: AveragingPlan, member: GroupMember) -> None:
    """Refuse on every rank when some gave another tree, before anything is sent."""
    said = f"shares {plan.shares}, averages_replicas={plan.averages_replicas}, " + _describe(tree, plan)
    device = next((x.device for x in leaves(tree)), torch.device("cpu"))
    mine = torch.tensor([_digest(said)], dtype=torch.int64, device=device)
    every = mine.new_empty(member.size)
    with exchange("federated_mean", member):
        gather(every, mine, group=member.group)
    if bool((every == mine).all()):
        return
    words: list[Any] = [None] * member.size
    with exchange("federated_mean", member):
        dist.all_gather_object(words, said, group=member.group)
    others = {place: text for place, text in enumerate(words) if text != said}
    place, text = next(iter(others.items()))
    raise AgreementError(
        f"federated_mean: ranks {listed(others)} gave other trees or weights than rank {member.index}. Rank {place}: "
        f"{text}. Rank {member.index}: {said}. Give the same containers, shapes, dtypes and weights on every rank.",
        ranks=tuple(others),
    )


def _digest(said: str) -> int:
    return int.from_bytes(hashlib.sha256(said.encode()).digest()[:7])


def _describe(tree: Any, plan: AveragingPlan) -> str:
    """Say what must be alike on all ranks: structure, global shapes, dtypes and splits."""
    sized = plan.topology.shard_size is not None or plan.topology.is_symmetric

    def words(x: Tensor) -> str:
        cuts = [f"{dim}/{size}" if sized else f"{dim}" for size, dim in _cuts(x)]
        return f"{tuple(x.shape)} {x.dtype}{' cut ' + ','.join(cuts) if cuts else ''}"

    return repr(mapped(words, tree))
