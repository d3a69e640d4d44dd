"""Trees of torch tensors moved between states by point-to-point messages.

Who sends what to whom is planned in `dualmesh.weights.plan`, when in `dualmesh.weights.executor`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dualmesh.errors import AgreementError, ArrayTypeError, DualmeshError, ShapeError, ShardingError, listed
from dualmesh.sharding.param_paths import leaves_by_path, path_tree
from dualmesh.sharding.partition_spec import P, global_shape
from dualmesh.weights.endpoints import End, Fused
from dualmesh.weights.executor import Blocks, Wire, carry, message_bytes
from dualmesh.weights.plan import Message, Piece, TransferPlan, plan_transfer
from dualmesh.weights.transfer import TransferJob
from dualmesh_torch.arrays.assembly import assemble
from dualmesh_torch.arrays.reshard import as_said, union
from dualmesh_torch.collectives.exchanges import exchange
from dualmesh_torch.collectives.group_member import GroupMember

if TYPE_CHECKING:
    from dualmesh_torch.state import TorchState

Tensor = torch.Tensor


class _Tree(NamedTuple):
    """What a rank of the source holds, and what the others must know of it."""

    arrays: dict[str, tuple[tuple[int, ...], int, str]]
    is_global: dict[str, bool]
    skeleton: Any
    """The containers, with paths in place of arrays."""


def transfer(tree: Any, job: TransferJob) -> Any:
    """Return this rank's part of the tree in the target; see `dualmesh.transfer`. *Collective over both ends.*"""
    source: Any = job.source
    target: Any = job.target
    given, taken = source.placed(P()), target.placed(P())
    ranks, rank = union(given, taken), source.world.local_ranks[0]
    member = source.member_over(ranks)
    blocks: dict[str, Tensor] = {}
    mine: _Tree | DualmeshError | None = None
    if given.position(rank) is not None:
        try:
            mine, blocks = _hold_tree(tree, job.given, source)
        except DualmeshError as error:
            mine = error
    known = _agree(mine, member, ranks, [place for place, one in enumerate(ranks) if given.position(one) is not None])
    plan = plan_transfer(
        known.arrays,
        src=(source, job.given.specs),
        dst=(target, job.taken.specs),
        message_bytes=message_bytes(job.buffer_bytes),
        renames=job.taken.renames,
    )
    room = _room(plan, target) if taken.position(rank) is not None else {}
    with exchange("transfer", member):
        wire = _TorchWire(member, ranks)
        run = partial(carry, plan, [rank], wire, _TorchBlocks(blocks, room, torch.device(source.device_type)))
        run(buffer_bytes=job.buffer_bytes, checksum=job.checksum)
    return _rebuilt(room, plan, known, job, target) if taken.position(rank) is not None else None


class _TorchWire(Wire):
    """Messages over a process group, whose indices are places in a list of ranks."""

    def __init__(self, member: GroupMember, ranks: tuple[int, ...]) -> None:
        self._group = member.group
        self._place = {rank: place for place, rank in enumerate(ranks)}

    def send(self, message: Message, buffer: Tensor) -> Callable[[], None]:
        work: Any = dist.isend(buffer, group=self._group, group_dst=self._place[message.receiver])
        return lambda: work.wait()

    def receive(self, message: Message, buffer: Tensor) -> Callable[[], None]:
        work: Any = dist.irecv(buffer, group=self._group, group_src=self._place[message.sender])
        return lambda: work.wait()


class _TorchBlocks(Blocks):
    """This rank's blocks by path; buffers are bytes on its device."""

    def __init__(self, given: Mapping[str, Tensor], taken: Mapping[str, Tensor], device: torch.device) -> None:
        self._given, self._taken, self._device = given, taken, device

    def keep(self, rank: int, piece: Piece) -> None:
        self._taken[piece.target][piece.target_slices].copy_(self._given[piece.source][piece.source_slices])

    def packed(self, message: Message, extra: int) -> Tensor:
        buffer, start = self.room(message.nbytes + extra), 0
        for piece in message.pieces:
            box = self._given[piece.source][piece.source_slices].resolve_conj().resolve_neg()
            buffer[start : start + piece.nbytes].copy_(box.contiguous().view(-1).view(torch.uint8))
            start += piece.nbytes
        return buffer

    def room(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def unpack(self, message: Message, buffer: Tensor) -> None:
        start = 0
        for piece in message.pieces:
            box = self._taken[piece.target][piece.target_slices]
            # A copy, since a dtype cannot be read where its bytes do not begin at a multiple of its size.
            part = buffer[start : start + piece.nbytes].clone().view(box.dtype)
            box.copy_(part.view(box.shape))
            start += piece.nbytes

    def as_bytes(self, buffer: Tensor) -> Any:
        return buffer.cpu().numpy()

    def write(self, buffer: Tensor, start: int, data: bytes) -> None:
        buffer[start : start + len(data)].copy_(torch.from_numpy(np.frombuffer(data, np.uint8).copy()))


# -- what the tree is --------------------------------------------------------------------------------------------------


def _hold_tree(tree: Any, end: End, source: "TorchState") -> tuple[_Tree, dict[str, Tensor]]:
    """Return what is known of a rank's tree, and its blocks. *Collective over the source* where it is laid out anew."""
    blocks: dict[str, Tensor] = {}
    arrays, is_global = {}, {}
    for path, x in leaves_by_path("transfer", tree).items():
        if not isinstance(x, Tensor):
            raise ArrayTypeError(
                f"transfer: {path!r} is a {type(x).__qualname__}. Give tensors on every rank of {source.label}; leave "
                f"the rest out of the tree.",
                path=path,
            )
        shape, blocks[path] = _block(path, x.detach(), end, source)
        arrays[path] = shape, x.dtype.itemsize, str(x.dtype).removeprefix("torch.")
        is_global[path] = isinstance(x, DTensor)
    if not arrays:
        raise ArrayTypeError(f"transfer: rank {source.own_rank()} of {source.label} gave no tensors.", tree=tree)
    return _Tree(arrays, is_global, path_tree(tree)), blocks


def _block(path: str, x: Tensor, end: End, source: "TorchState") -> tuple[tuple[int, ...], Tensor]:
    spec = end.spec_of(path, tuple(x.shape))
    if isinstance(x, DTensor):
        if isinstance(spec, Fused):
            raise ShardingError(f"transfer: {path!r} is a DTensor, and fused blocks are plain tensors.", path=path)
        return tuple(x.shape), as_said(x, source, P.of(spec)).to_local()
    plain = spec.spec if isinstance(spec, Fused) else P.of(spec)
    return global_shape(source.topology, plain, x.shape, what=f"transfer: block {path!r}"), x


def _agree(mine: _Tree | DualmeshError | None, member: GroupMember, ranks: tuple[int, ...], givers: list[int]) -> _Tree:
    """Return what all ranks know of the tree, or refuse on all of them. *Collective over both ends.*"""
    said: list[Any] = [None] * member.size
    word = f"{type(mine).__name__}: {mine}" if isinstance(mine, DualmeshError) else mine
    with exchange("transfer", member):
        dist.all_gather_object(said, word, group=member.group)
    if isinstance(mine, DualmeshError):
        raise mine
    first: Any = said[givers[0]]
    for place in givers:
        if isinstance(said[place], str):
            raise AgreementError(
                f"transfer: rank {ranks[place]} refused its tree, so nothing was moved. It said: {said[place]}",
                ranks=(ranks[place],),
            )
        if said[place] != first:
            raise AgreementError(
                f"transfer: ranks {ranks[givers[0]]} and {ranks[place]} gave different trees: "
                f"{_difference(first, said[place])}. Nothing was moved. Give the same paths, shapes and dtypes.",
                ranks=(ranks[givers[0]], ranks[place]),
            )
    known: _Tree = first
    return known


def _difference(one: _Tree, other: _Tree) -> str:
    paths = [path for path in {**one.arrays, **other.arrays} if one.arrays.get(path) != other.arrays.get(path)]
    if not paths:
        return "blocks here and global arrays there"
    return listed(f"{path}: {one.arrays.get(path)} against {other.arrays.get(path)}" for path in paths[:4])


def _room(plan: TransferPlan, target: "TorchState") -> dict[str, Tensor]:
    device = target.device_type
    blocks = plan.target_blocks()
    for array, _, taken in plan.pairs:
        wanted = blocks[taken.path][1].dtype
        if array.dtype != wanted:
            raise ShapeError(f"transfer: {taken.path!r} would be fused of {wanted} and {array.dtype}.", path=taken.path)
    return {
        path: torch.empty(shape, dtype=getattr(torch, array.dtype), device=device)
        for path, (shape, array) in blocks.items()
    }


def _rebuilt(
    room: Mapping[str, Tensor], plan: TransferPlan, known: _Tree, job: TransferJob, target: "TorchState"
) -> Any:
    """Return the arrays of the target, as DTensors where the source had them."""
    found: dict[str, Tensor] = dict(room)
    for array, given, taken in plan.pairs:
        if taken.dim < 0 and known.is_global.get(given.path, False) and given.dim < 0:
            mesh, placements = target.sharding(taken.spec)
            found[taken.path] = assemble(room[taken.path], mesh, placements, array.shape)
    return job.formed(found, known.skeleton)
