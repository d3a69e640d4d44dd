"""An array handed from one state to another: one exchange among the ranks of both, and the exchange back.

Who sends what to whom is planned in `dualmesh.sharding.redistribution`; layouts within a state are in `arrays`.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dualmesh.errors import ArrayTypeError, DualmeshError, ShapeError, ShardingError, listed
from dualmesh.sharding.partition_spec import P, global_shape, local_shape
from dualmesh.sharding.redistribution import Placed, Reshard, Slices
from dualmesh_torch.arrays.assembly import assemble
from dualmesh_torch.collectives.dtypes import KINDS, from_carried, to_carried
from dualmesh_torch.collectives.exchanges import exchange
from dualmesh_torch.collectives.group_member import GroupMember

if TYPE_CHECKING:
    from dualmesh_torch.state import TorchState

Tensor = torch.Tensor
Pieces = tuple[tuple[int, Slices], ...]

_DTYPES = sorted(KINDS, key=str)
_MOST_DIMS = 12
_HEAD_SIZE = 4 + _MOST_DIMS
_REFUSED = -1
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}

NO_BLOCK = (
    "reshard: rank {rank} is in {source}, so it gives a DTensor or its block; found {found}. Only ranks outside the "
    "source give None."
)
NO_SOURCE = (
    "reshard: rank {rank} is not in {source}, so it has nothing to give; found {found}. Give None, or what an earlier "
    "reshard returned here."
)
OTHER_RANKS = (
    "reshard: the DTensor lies on the ranks {found}, but {source} is over {ranks}. Name the state that it lies on in "
    "src=."
)
SUM_ELSEWHERE = (
    "reshard: src says {spec!r}, but the DTensor lies as {placements} on {mesh}. A sum still to be taken moves only as "
    "it lies: say that, or lay it out with dm.constrain first."
)


class Route(NamedTuple):
    """What one rank does in an exchange. Places count in the group of the exchange."""

    sends: Pieces
    receives: Pieces
    shape: tuple[int, ...]
    """Of the result here; (0,) where there is none."""
    adds: bool
    """Whether what arrives may overlap, and is added up."""


@dataclass(frozen=True)
class Journey:
    """From one layout to another, among all ranks of both."""

    shape: tuple[int, ...]
    source: Placed
    target: Placed
    is_global: bool
    """Whether a gradient belongs to the value of the array, or to the blocks."""
    turned: bool = False

    def back(self) -> "Journey":
        """Return the way that gradients take. *Pure.*"""
        if self.is_global:
            whole = Placed(self.source.topology, P(*self.source.spec.entries), self.source.ranks)
            return Journey(self.shape, self.target, whole, True)
        return Journey(self.shape, self.source, self.target, False, not self.turned)


class _Head(NamedTuple):
    """What the ranks of the target must know of the array."""

    is_global: bool
    needs_gradient: bool
    dtype: torch.dtype
    shape: tuple[int, ...]


def reshard(x: Any, source: "TorchState", source_spec: P, target: "TorchState", spec: P) -> Any:
    """Return this rank's part of the array in the target; see `dualmesh.reshard`. *Collective over both.*"""
    ends = _Ends(source, source.placed(source_spec), target.placed(spec))
    block, head = _gather_heads(x, ends)
    journey = Journey(head.shape, ends.given, ends.taken, head.is_global)
    route_of(journey, ends.rank)  # refuses what does not divide, alike on all ranks and before anything moves
    needs = head.needs_gradient and torch.is_grad_enabled()
    uninvited = block is None and not _is_tie(x)
    if block is None:
        block = x if isinstance(x, Tensor) and not uninvited else torch.empty(0)
        if needs and not block.requires_grad:
            block = torch.empty(0, dtype=head.dtype, requires_grad=True)
        block = block.to(source.device_type)
    found: Tensor = _apply(block, journey, ends.rank, ends.member, head.dtype)
    if uninvited:  # said only now, so that nobody waits for this rank
        raise ArrayTypeError(NO_SOURCE.format(rank=ends.rank, source=source.label, found=_describe(x)), found=x)
    if ends.taken.position(ends.rank) is None or not head.is_global:
        return found
    mesh, placements = target.sharding(spec)
    return assemble(found, mesh, placements, head.shape, placements)


@lru_cache(maxsize=256)
def union(source: Placed, target: Placed) -> tuple[int, ...]:
    """Return the ranks of both ends, rising. *Pure.*"""
    return tuple(sorted({*source.members, *target.members}))


@lru_cache(maxsize=512)
def route_of(journey: Journey, rank: int) -> Route:
    """Return what a rank does in a journey. *Pure.*

    Raises:
        ShapeError: A dim that the axes of one end do not divide.
        ShardingError: A target that is partial.
    """
    source, target, shape = journey.source, journey.target, journey.shape
    plan = Reshard(shape, source, target)
    place = {member: index for index, member in enumerate(union(source, target))}
    sends = sorted((place[part.target], part.source_slices) for part in plan.sends(rank))
    receives = sorted(
        ((place[giver], part.target_slices) for part in plan.receives(rank) for giver in part.sources),
        key=lambda piece: piece[0],
    )
    end = source if journey.turned else target
    block = (0,) if end.position(rank) is None else local_shape(end.topology, end.spec, shape)
    if journey.turned:
        return Route(tuple(receives), tuple(sends), block, True)
    return Route(tuple(sends), tuple(receives), block, source.topology.size(source.spec.partial) > 1)


class _Moved(torch.autograd.Function):
    """The exchange; its gradient is the exchange back, in the same group."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, journey: Journey, rank: int, member: GroupMember | None, dtype: torch.dtype
    ) -> Tensor:
        ctx.journey, ctx.rank, ctx.member, ctx.dtype = journey, rank, member, x.dtype
        return _exchange(x, route_of(journey, rank), member, dtype)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (cotangent,) = cotangents
        back = _apply(cotangent, ctx.journey.back(), ctx.rank, ctx.member, cotangent.dtype)
        return back.to(ctx.dtype), None, None, None, None


_apply: Any = _Moved.apply


def _exchange(x: Tensor, route: Route, member: GroupMember | None, dtype: torch.dtype) -> Tensor:
    pieces = [x[cut].reshape(-1) for _, cut in route.sends]
    sent = torch.cat(pieces) if pieces else torch.empty(0, dtype=dtype, device=x.device)
    out = torch.empty if not route.adds and route.receives else torch.zeros
    found = out(route.shape, dtype=_WIDE.get(dtype, dtype) if route.adds else dtype, device=x.device)
    sizes = [found[cut].numel() for _, cut in route.receives]
    arrived = sent if member is None else _trade(sent, route, sizes, [piece.numel() for piece in pieces], member)
    for (_, cut), piece in zip(route.receives, torch.split(arrived, sizes), strict=True):
        part = found[cut]
        (part.add_ if route.adds else part.copy_)(piece.view(part.shape))
    return found.to(dtype)


def _trade(sent: Tensor, route: Route, sizes: list[int], gone: list[int], member: GroupMember) -> Tensor:
    """Send pieces one after another, receive pieces one after another. *Collective over the group.*"""
    moved = to_carried(sent)
    width = moved.numel() // sent.numel() if sent.numel() else to_carried(sent.new_empty(1)).numel()
    counts = [[0] * member.size, [0] * member.size]
    for side, (pieces, lengths) in enumerate(((route.receives, sizes), (route.sends, gone))):
        for (place, _), length in zip(pieces, lengths, strict=True):
            counts[side][place] += length * width
    arrived = moved.new_empty(sum(counts[0]))
    with exchange("reshard", member):
        dist.all_to_all_single(arrived, moved, counts[0], counts[1], group=member.group)
    return from_carried(arrived, sent.dtype)


# -- what the array is ---------------------------------------------------------------------------------------------


class _Ends:
    """Both ends as this rank sees them."""

    def __init__(self, source: "TorchState", given: Placed, taken: Placed) -> None:
        self.source, self.given, self.taken = source, given, taken
        self.rank: int = source.world.local_ranks[0]
        self.ranks = union(given, taken)
        self.member = source.member_over(self.ranks) if len(self.ranks) > 1 else None
        self.reaches_out = len(self.ranks) > len(given.members)
        """Whether the target has ranks outside the source, which know nothing of the array."""

    def told(self, numbers: list[int]) -> list[int]:
        """Return what the source's first rank says. *Collective over both ends.*"""
        if self.member is None:
            return numbers
        sent = torch.tensor(numbers, dtype=torch.int64, device=self.source.device_type)
        with exchange("reshard", self.member):
            dist.broadcast(sent, group=self.member.group, group_src=self.ranks.index(self.given.rank(0)))
        found: list[int] = sent.tolist()
        return found


def _gather_heads(x: Any, ends: _Ends) -> tuple[Tensor | None, _Head]:
    """Return this rank's block (None outside the source) and what every rank knows of the array."""
    if ends.given.position(ends.rank) is None:
        return None, _heard(ends.told([0] * _HEAD_SIZE), ends.source)
    try:
        block, own = _read(x, ends)
    except DualmeshError:
        if ends.reaches_out:
            ends.told([_REFUSED] * _HEAD_SIZE)
        raise
    if ends.reaches_out:
        ends.told(_head_to_tensor(own))
    return block, own


def _read(x: Any, ends: _Ends) -> tuple[Tensor, _Head]:
    source, spec = ends.source, ends.given.spec
    if isinstance(x, DTensor):
        whole = source.sharding(P(*spec.entries))[1]
        block: Tensor = as_said(x, source, spec).to_local(grad_placements=whole)
        shape = tuple(x.shape)
    elif isinstance(x, Tensor):
        block, shape = x, global_shape(source.topology, spec, x.shape, what="reshard: block")
    else:
        raise ArrayTypeError(NO_BLOCK.format(rank=ends.rank, source=source.label, found=_describe(x)), found=x)
    if len(shape) > _MOST_DIMS:
        raise ShapeError(f"reshard: {len(shape)} dims. At most {_MOST_DIMS} can move: flatten some.", shape=shape)
    return block, _Head(isinstance(x, DTensor), block.requires_grad, block.dtype, shape)


def as_said(x: DTensor, source: "TorchState", spec: P) -> DTensor:
    """Return the array laid out as the source end says."""
    mesh, placements = source.sharding(spec)
    if x.device_mesh == mesh and tuple(x.placements) == tuple(placements):
        return x
    if spec.partial:
        raise ShardingError(
            SUM_ELSEWHERE.format(spec=spec, placements=x.placements, mesh=x.device_mesh), spec=spec, found=x.placements
        )
    found = x.device_mesh.mesh.flatten().tolist()
    if set(found) != set(source.members):
        raise ShardingError(
            OTHER_RANKS.format(found=listed(found), source=source.label, ranks=listed(source.members)), found=found
        )
    laid_out: DTensor = source.arrays.constrain(x, spec)
    return laid_out


def _head_to_tensor(head: _Head) -> list[int]:
    numbers = [head.is_global, head.needs_gradient, _DTYPES.index(head.dtype), len(head.shape), *head.shape]
    return [int(number) for number in (*numbers, *[0] * (_HEAD_SIZE - len(numbers)))]


def _heard(numbers: list[int], source: "TorchState") -> _Head:
    if numbers[0] == _REFUSED:
        raise ShardingError(f"reshard: rank {source.members[0]} of {source.label} refused its array; see its error.")
    is_global, needs, dtype, ndim, *sizes = numbers
    return _Head(bool(is_global), bool(needs), _DTYPES[dtype], tuple(sizes[:ndim]))


def _is_tie(x: Any) -> bool:
    """Tell whether this is nothing, or what a reshard returns on ranks outside its target."""
    return x is None or (isinstance(x, Tensor) and not isinstance(x, DTensor) and x.shape == (0,))


def _describe(x: Any) -> str:
    return f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__qualname__}"
