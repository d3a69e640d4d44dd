"""Which of the ranks that hold the same block of a tensor counts it: by meshes and axes, or by what ranks say.

Norms are in `norms`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import combinations
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dualmesh.errors import ArgumentError, ShardingError, listed
from dualmesh.runtime.registry import registry
from dualmesh.topology.roles import expand_axes, stage_axes
from dualmesh.topology.topology import Axis
from dualmesh_torch import private

if TYPE_CHECKING:
    from dualmesh_torch.state import TorchState

Label = tuple[Any, ...]
OUTSIDE = (
    "{where}: a DTensor of shape {shape} lies on the ranks {found}, but {label} has {members}. Ask a state that has "
    "all of them."
)
UNEQUAL = (
    "{where}: some ranks hold {first} tensors of shape {shape}, others {second}, and nothing says which are copies "
    "of which. Give the module or a dict, whose names tell them apart, or blocks={{axis: tensors}} where each index "
    "has its own."
)


class Held(NamedTuple):
    """A tensor of this rank."""

    tensor: torch.Tensor
    axes: tuple[Axis, ...] = ()
    """The axes beyond its own mesh along which each index has another block of it."""
    name: str | None = None
    """What it is called on every rank, where it has a name."""


class Block(NamedTuple):
    """What this rank holds of a tensor, and who has it too, as meshes and axes have it."""

    label: Label
    """The same on all ranks that hold this block, another for other blocks."""
    is_first: bool
    copies: int


def is_here(tensor: torch.Tensor) -> bool:
    """Tell whether this rank is on the mesh of a tensor. *Pure.*"""
    return not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is not None


def blocks_of(where: str, state: "TorchState", held: Iterable[Held]) -> list[Block]:
    """Return the block of every tensor. *Local.*

    A mesh along axes of the state, or of another registered one, is repeated along that state's other axes: with equal
    blocks, but along pipeline stages and the rest of its view, where every index has its own. Any other mesh stands
    alone.

    Raises:
        ShardingError: A mesh has ranks that the state lacks.
    """
    known: dict[Any, tuple[Label, bool, int]] = {}
    found = []
    for tensor, axes, name in held:
        mesh, placements = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else (None, ())
        key = (mesh, placements, axes)
        if key not in known:
            _refuse_outside(where, state, mesh, tensor.shape)
            known[key] = _place_of(state, mesh, placements, axes)
        place, is_first, count = known[key]
        label = (name, tuple(tensor.shape), tensor.dtype, placements, *place)
        found.append(Block(label, is_first, count))
    return found


def imbalance(blocks: Iterable[Block]) -> tuple[float, float]:
    """Return two numbers whose sums over all ranks are 0 where every block is held by all whom meshes name. *Pure.*

    Each is the sum of whole numbers; that others than 0 cancel has a chance of about 2 ** -40.
    """
    sums = [0, 0]
    for label, is_first, count in blocks:
        number = _number_of(label)
        for place in (0, 1):
            sums[place] += (count * is_first - 1) * (1 + (number >> 20 * place) % 2**20)
    return float(sums[0]), float(sums[1])


def first_holders(where: str, state: "TorchState", blocks: Sequence[Block]) -> list[bool]:
    """Return whether this rank is the first one that really holds it, for every block. *Collective over the state.*

    Raises:
        ArgumentError: Ranks hold different numbers of tensors that look alike; on every rank.
    """
    own = Counter(_number_of(block.label) for block in blocks)
    shapes = {_number_of(block.label): block.label[1] for block in blocks}
    first: dict[int, tuple[int, int]] = {}
    for place, said in enumerate(state.host.all_gather({n: (own[n], shapes[n]) for n in own}, "world")):
        for number, (count, shape) in said.items():
            found = first.setdefault(number, (place, count))[1]
            if found != count:
                raise ArgumentError(UNEQUAL.format(where=where, first=found, second=count, shape=shape), shape=shape)
    here = state.topology.position(state.grid_rank(state.own_rank()))
    return [first[_number_of(block.label)][0] == here for block in blocks]


def make_up(runs: Iterable[Sequence[int]], ranks: Sequence[int], own: int) -> bool:
    """Tell whether lists of ranks, one for each dim of a grid around a rank, make up exactly some ranks. *Pure.*

    >>> make_up([(0, 2), (0, 1)], (0, 1, 2, 3), own=0), make_up([(0, 2)], (0, 1, 2, 3), own=0)
    (True, False)
    """
    large = [set(run) for run in runs if len(run) > 1]
    is_grid = all(one & other == {own} for one, other in combinations(large, 2))
    return is_grid and all(run <= set(ranks) for run in large) and prod(map(len, large)) == len(ranks)


def is_split(placement: Any) -> bool:
    """Tell whether each index of a mesh dim has another part. *Pure.*"""
    return placement.is_shard() or private.split_factor_of(placement) is not None


@lru_cache(maxsize=2**16)
def _number_of(label: Label) -> int:
    return int.from_bytes(blake2b(repr(label).encode(), digest_size=8).digest(), "big")


def _refuse_outside(where: str, state: "TorchState", mesh: DeviceMesh | None, shape: Sequence[int]) -> None:
    ranks = [] if mesh is None else mesh.mesh.flatten().tolist()
    if not all(state.has_rank(rank) for rank in ranks):
        words = {"found": listed(ranks), "label": state.label, "members": listed(state.members)}
        raise ShardingError(OUTSIDE.format(where=where, shape=tuple(shape), **words), ranks=tuple(ranks))


def _place_of(
    state: "TorchState", mesh: DeviceMesh | None, placements: Sequence[Any], axes: tuple[Axis, ...]
) -> tuple[Label, bool, int]:
    """Return (which block of the tensor this is, whether this rank is the first to hold it, how many hold it)."""
    members, blocks = tuple(state.members), {state.own_rank()}
    place: Label = ()
    splits = [(state, axis) for axis in axes]
    if mesh is not None:
        split = [is_split(one) for one in placements]
        blocks = set(ranks_along(mesh, split))
        place = tuple(index for index, one in zip(mesh.get_coordinate() or (), split, strict=True) if one)
        owner = _owner_of(state, mesh)
        members = tuple(mesh.mesh.flatten().tolist()) if owner is None else tuple(owner.members)
        splits += [(owner, axis) for axis in left_out_axes(owner, mesh)] if owner is not None else []
        if owner is not None and owner is not state:  # of the state asked they are among `axes`, if they are to be
            splits += [(owner, axis) for axis in stage_axes(owner.topology)]
    for one, axis in splits:
        if not set(one.ranks(axis)) <= blocks:
            blocks = {other for rank in blocks for other in one.ranks(axis, rank)} & set(members)
            place = (*place, one.index(axis))
    return (place, members[0], len(members)), members[0] in blocks, len(members) // len(blocks)


def ranks_along(mesh: DeviceMesh, dims: Sequence[bool]) -> list[int]:
    """Return the ranks that differ from this one in some dims of a mesh only. *Pure.*"""
    coordinate: Sequence[int] = mesh.get_coordinate() or ()
    found: list[int] = (
        mesh.mesh[tuple(slice(None) if one else index for one, index in zip(dims, coordinate, strict=True))]
        .flatten()
        .tolist()
    )
    return found


def _owner_of(state: "TorchState", mesh: DeviceMesh) -> "TorchState | None":
    """Return the state along whose axes a mesh lies: the one asked or the first registered one whose names it has.

    A mesh with other names, made by hand, lies along the axes of the state asked that have its ranks.
    """
    named = (one for one in _candidates(state) if _liesranks_along(one, mesh, is_named=True))
    return next(named, state if _liesranks_along(state, mesh, is_named=False) else None)


def _candidates(state: "TorchState") -> Iterator["TorchState"]:
    yield state
    for other in registry.states():
        if isinstance(other, type(state)) and other is not state and other.is_live and other.is_member:
            yield other


def _liesranks_along(state: "TorchState", mesh: DeviceMesh, *, is_named: bool) -> bool:
    ranks = mesh.mesh.flatten().tolist()
    if not all(state.has_rank(rank) for rank in ranks):
        return False
    if len(ranks) == state.world_size:
        return True
    topology, called = state.topology, state.meshes.dim_name
    axes: list[Axis] = [*topology.axis_names, *(axes for axes in topology.spec.roles.values() if axes)]
    runs = {called(axis): state.ranks(axis) for axis in axes}
    parts = {called(f"{name}.{n}") for name in topology.axis_names for n in range(4)}

    def is_run(dim: int) -> bool:
        along = tuple(ranks_along(mesh, [n == dim for n in range(mesh.ndim)]))
        name = (mesh.mesh_dim_names or ("",) * mesh.ndim)[dim]
        if is_named:
            return name in parts or runs.get(name) == along
        return len(along) == 1 or along in runs.values()

    return all(is_run(dim) for dim in range(mesh.ndim))


def left_out_axes(state: "TorchState", mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the axes of a view that a mesh of the same view leaves out: there each index has experts of its own.

    *Pure.*
    """
    names = mesh.mesh_dim_names or ()
    view = view_of(state, names)
    if view is None:
        return ()
    return tuple(axis for axis in state.topology.spec.views[view].axes if not _names_of(state, axis) & set(names))


def view_of(state: "TorchState", names: Iterable[str]) -> str | None:
    """Return the view of which one of some mesh dims is an axis, or None. *Pure.*"""
    named = set(names)
    for name, view in state.topology.spec.named_views:
        if any(_names_of(state, axis) & named for axis in view.axes):
            return name
    return None


def _names_of(state: "TorchState", axis: str) -> set[str]:
    """Return what the dims of meshes along an axis may be called: whole, or by its first part."""
    return {state.meshes.dim_name(axis), state.meshes.dim_name(f"{axis}.0")}


def summed_ranks(state: "TorchState", axes: Axis, view: str | None) -> tuple[tuple[int, ...], ...]:
    """Return over which ranks gradients may have to be summed: those that differ in tokens. *Pure.*

    Experts whose view spans other axes too, tensor parallel ones say, get the tokens that these split among them.
    """
    tokens = state.ranks(axes) if axes else (state.own_rank(),)
    if view is None:
        return (tokens,)
    topology = state.topology
    over = expand_axes(topology, topology.spec.views[view].over)
    loss = expand_axes(topology, (axes,) if isinstance(axes, str) else axes)
    wide = tuple(name for name in topology.base_axes if name in {*over, *loss})
    return (tokens,) if set(over) <= set(loss) else (tokens, state.ranks(wide))
