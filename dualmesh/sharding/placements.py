"""DTensor-like placements as plain data: what a `P` is on a mesh, one placement per mesh dim, and back.

Exact or refused by name. Turning them into a framework's objects is in the backends; which slice a rank holds is in
`partition_spec`.

A mesh is a list of digits of the rank, one per mesh dim. DTensor splits a tensor dim over mesh dims in mesh order, a
`P` in listed order. When the mesh order comes to an axis, the axes listed before it that are still to come already
lie outside it: their sizes multiply to its split factor, and a split factor of 1 is a plain shard.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from dualmesh._support.warn import caution
from dualmesh.errors import ShardingError, counted, listed
from dualmesh.sharding.partition_spec import P, check_axes, named_axes, named_set, split_axes
from dualmesh.topology.layout import Digit, Layout, refinement
from dualmesh.topology.topology import Topology

QUIET_DIMS = 3
"""Mesh dims up to which array operations are cheap to plan for DTensor."""


@dataclass(frozen=True)
class Replicate:
    """Every position of the mesh dim holds the same."""


@dataclass(frozen=True)
class Shard:
    """What the mesh dims before left of a tensor dim is cut into one contiguous block per position."""

    dim: int


@dataclass(frozen=True)
class StridedShard:
    """It is first cut into `split_factor` parts, each part into one block per position; a position's are joined."""

    dim: int
    split_factor: int


@dataclass(frozen=True)
class Partial:
    """The positions' values are still to be reduced."""

    reduce_op: str = "sum"


Placement = Replicate | Shard | StridedShard | Partial


def placements_of(topology: Topology, spec: P, mesh: Sequence[Digit]) -> tuple[Placement, ...]:
    """Return the placement of a spec on every mesh dim. *Pure.*

    Raises:
        ShardingError: The spec cuts a mesh dim, or names ranks that the mesh does not tell apart.
        UnknownAxisError: An axis that the topology does not have.

    >>> import dualmesh as dm
    >>> topology = dm.TopologySpec({"dp": 2, "tp": 2}).resolve(4)
    >>> placements_of(topology, P(("tp", "dp")), [Digit(2, 2), Digit(2, 1)])
    (StridedShard(dim=0, split_factor=2), Shard(dim=0))
    """
    check_axes(topology, spec)
    placements: list[Placement] = [Replicate()] * len(mesh)
    for dim, entry in enumerate(spec.entries):
        for mesh_dim, factor in _splits(topology.layout(split_axes(entry)).digits, mesh, spec):
            placements[mesh_dim] = Shard(dim) if factor == 1 else StridedShard(dim, factor)
    for mesh_dim, _ in _splits(_sum_layout(topology, spec).digits, mesh, spec):
        placements[mesh_dim] = Partial()
    return tuple(placements)


def spec_for(topology: Topology, placements: Sequence[Placement], mesh: Sequence[Digit]) -> P:
    """Return the spec that placements on a mesh mean, in canonical names (`partition_spec.canonical`). *Pure.*

    Raises:
        ShardingError: No `P` of the topology means the same.

    >>> import dualmesh as dm
    >>> topology = dm.TopologySpec({"dp": 2, "tp": 2}).resolve(4)
    >>> spec_for(topology, [StridedShard(0, 2), Shard(0)], [Digit(2, 2), Digit(2, 1)])
    P(('tp', 'dp'))
    """
    if len(placements) != len(mesh):
        raise ShardingError(
            f"Placements {list(placements)} are {len(placements)}, but the mesh has {counted(len(mesh), 'dim')}. Give "
            f"one placement per mesh dim.",
            placements=tuple(placements),
        )
    split: dict[int, list[Digit]] = {}
    summed: list[Digit] = []
    for mesh_dim in reversed(range(len(mesh))):
        placement, digit = placements[mesh_dim], mesh[mesh_dim]
        if digit.size == 1 or isinstance(placement, Replicate):
            continue
        if isinstance(placement, Partial):
            _require_sum(placement, mesh_dim)
            summed.append(digit)
            continue
        factor = placement.split_factor if isinstance(placement, StridedShard) else 1
        inserted = _insert_digit(split.get(placement.dim, []), digit, factor)
        if inserted is None or placement.dim < 0:
            raise _no_spec(placement, mesh_dim, mesh)
        split[placement.dim] = inserted
    dims = range(max(split, default=-1) + 1)
    entries = [_named(topology, Layout.of(split.get(dim, ())), dim, placements) for dim in dims]
    return P(*entries, partial=_named_partial(topology, summed, placements))


def array_mesh(topology: Topology, specs: Iterable[P]) -> tuple[Digit, ...]:
    """Return the mesh with the fewest dims on which all the specs have placements. *Pure.*

    Axes of size 1 are left out, neighbours that no spec tells apart are one dim; slowest first. Warns when there are
    more than three dims, because planning DTensor operations then takes seconds to minutes.

    Raises:
        ShardingError: The specs have no common mesh.

    >>> import dualmesh as dm
    >>> topology = dm.parallel_spec(dp_shard_size=2, ulysses_size=2, tp_size=2).resolve(8)
    >>> array_mesh(topology, [P("dp_shard_sp", "tp"), P("tp")])
    (Digit(size=4, stride=2), Digit(size=2, stride=1))
    """
    specs = list(specs)
    layouts = []
    for spec in specs:
        check_axes(topology, spec)
        layouts += [topology.layout(split_axes(entry)) for entry in spec.entries]
        layouts.append(_sum_layout(topology, spec))
    mesh = refinement(layouts, topology.world_size)
    if mesh is None:
        raise ShardingError(
            f"Array mesh: {listed(specs)} cut the {topology.world_size} ranks of {topology!r} at places that do not "
            f"divide each other, so no mesh has them all. Use one mesh per view, and keep their arrays apart.",
            specs=tuple(specs),
        )
    if len(mesh) > QUIET_DIMS:
        sizes = "x".join(str(digit.size) for digit in mesh)
        caution(
            f"The array mesh of {listed(specs)} has {len(mesh)} dims ({sizes}). The first DTensor operation of each "
            f"kind takes about 0.1 s on 3 dims, 1 s on 4, 6 s on 5, a minute on 6. Split by fewer separate axes."
        )
    return mesh or (Digit(1, 1),)


def _sum_layout(topology: Topology, spec: P) -> Layout:
    """Return the layout of the partial axes with their digits by falling stride: the order of a sum is no matter."""
    return Layout.of(reversed(topology.layout(spec.partial).ascending))


def _splits(digits: Sequence[Digit], mesh: Sequence[Digit], spec: P) -> list[tuple[int, int]]:
    """Return (mesh dim, split factor) of every mesh dim that the digits of one tensor dim use, in mesh order."""
    waiting = [piece for digit in digits for piece in _pieces(digit, mesh, spec)]
    splits = []
    for mesh_dim in sorted({owner for owner, _ in waiting}):
        places = [place for place, (owner, _) in enumerate(waiting) if owner == mesh_dim]
        together = places[-1] - places[0] == len(places) - 1
        whole = Layout.of(waiting[place][1] for place in places).digits == (mesh[mesh_dim],)
        if not together or not whole:
            raise _no_placements(spec, mesh, f"it cuts mesh dim {mesh_dim} of size {mesh[mesh_dim].size}")
        splits.append((mesh_dim, prod(digit.size for _, digit in waiting[: places[0]])))
        waiting = [piece for piece in waiting if piece[0] != mesh_dim]
    return splits


def _pieces(digit: Digit, mesh: Sequence[Digit], spec: P) -> list[tuple[int, Digit]]:
    """Cut a digit where mesh dims begin and end; return (mesh dim, digit), slowest first."""
    pieces: list[tuple[int, Digit]] = []
    low, top = digit.stride, digit.stride * digit.size
    while low < top:
        mesh_dim = next((i for i, (size, stride) in enumerate(mesh) if stride <= low < stride * size), None)
        if mesh_dim is None:
            raise _no_placements(spec, mesh, f"it splits over ranks {low} apart, which no mesh dim tells apart")
        size, stride = mesh[mesh_dim]
        high = min(stride * size, top)
        if low % stride or high % low:
            raise _no_placements(spec, mesh, f"it cuts mesh dim {mesh_dim} of size {size} where that does not divide")
        pieces.insert(0, (mesh_dim, Digit(high // low, low)))
        low = high
    return pieces


def _insert_digit(digits: Sequence[Digit], digit: Digit, factor: int) -> list[Digit] | None:
    """Return the digits with one put in where those before it multiply to `factor`, or None."""
    before: list[Digit] = []
    after = list(digits)
    while factor > 1:
        if not after:
            return None
        size, stride = after.pop(0)
        if factor % size == 0:
            before.append(Digit(size, stride))
            factor //= size
        elif size % factor == 0:
            before.append(Digit(factor, stride * size // factor))
            after.insert(0, Digit(size // factor, stride))
            factor = 1
        else:
            return None
    return [*before, digit, *after] if factor == 1 else None


def _named(topology: Topology, layout: Layout, dim: int, placements: Sequence[Placement]) -> tuple[str, ...]:
    names = named_axes(topology, layout)
    if names is None:
        raise _no_names(topology, f"dim {dim}", layout, placements)
    return names


def _named_partial(topology: Topology, summed: list[Digit], placements: Sequence[Placement]) -> tuple[str, ...]:
    layout = Layout.of(sorted(summed, key=lambda digit: -digit.stride))
    names = named_set(topology, layout)
    if names is None:
        raise _no_names(topology, "the sum", layout, placements)
    return names


def _require_sum(placement: Partial, mesh_dim: int) -> None:
    if placement.reduce_op != "sum":
        raise ShardingError(
            f"Placement {placement} on mesh dim {mesh_dim}: a P can say that a sum is missing, not a "
            f"{placement.reduce_op!r}. Redistribute the value to replicated first.",
            placement=placement,
            mesh_dim=mesh_dim,
        )


def _no_placements(spec: P, mesh: Sequence[Digit], why: str) -> ShardingError:
    return ShardingError(
        f"{spec!r} has no placements on the mesh {_show_mesh(mesh)}: {why}. Use a mesh that is cut where the spec is "
        f"(placements.array_mesh(topology, [spec])).",
        spec=spec,
        mesh=tuple(mesh),
    )


def _no_spec(placement: Shard | StridedShard, mesh_dim: int, mesh: Sequence[Digit]) -> ShardingError:
    return ShardingError(
        f"Placement {placement} on mesh dim {mesh_dim} of {_show_mesh(mesh)} is no P: dims count from 0, and a split "
        f"factor is a product of sizes of later mesh dims that split the same tensor dim. Redistribute to plain shards "
        f"first.",
        placement=placement,
        mesh_dim=mesh_dim,
        mesh=tuple(mesh),
    )


def _no_names(topology: Topology, part: str, layout: Layout, placements: Sequence[Placement]) -> ShardingError:
    return ShardingError(
        f"Placements {list(placements)}: {part} is split by (size, stride) {[tuple(d) for d in layout.digits]}, which "
        f"no axes of the topology spell. Axes: {listed(topology.axis_names)}. Declare an axis or a view for it.",
        placements=tuple(placements),
    )


def _show_mesh(mesh: Sequence[Digit]) -> str:
    return f"{'x'.join(str(size) for size, _ in mesh)} (strides {listed(stride for _, stride in mesh)})"
