"""Who sends what to whom when a global array moves from one layout over ranks to another. Integers only.

Everything is closed form per rank: nothing is listed but the answer. Moving the bytes is in the backends, the
differentiable function that does so in `distribute`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple

from dualmesh.errors import RankError, ShardingError, counted, listed
from dualmesh.sharding.partition_spec import P, dim_layouts
from dualmesh.topology.layout import Layout
from dualmesh.topology.topology import Topology

Slices = tuple[slice, ...]


class Received(NamedTuple):
    """One part of what a rank gets."""

    sources: tuple[int, ...]
    """The rank that sends it (the receiver itself if it holds it); several: the parts of a sum, to be added up."""
    source_slices: Slices
    """Where it lies in each source's block."""
    target_slices: Slices
    """Where it lies in the receiver's block."""


class Sent(NamedTuple):
    """One part of what a rank gives."""

    target: int
    source_slices: Slices
    target_slices: Slices


@dataclass(frozen=True)
class Placed:
    """A spec over a topology over ranks.

    Args:
        topology: The grid.
        spec: How it splits a global array.
        ranks: The session ranks in grid order; None: the topology's own.

    Raises:
        RankError: Not one rank per place of the grid, or one rank twice.
    """

    topology: Topology
    spec: P
    ranks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        ranks, size = self.ranks, self.topology.size("world")
        if ranks is not None and (len(ranks) != size or len(set(ranks)) != size):
            raise RankError(
                f"{self.topology!r} was placed on the ranks {listed(ranks)}: "
                f"{counted(len(set(ranks)), 'different rank')} for {counted(size, 'place')}. Give one rank per place.",
                ranks=ranks,
            )

    @property
    def members(self) -> Sequence[int]:
        """The ranks, in grid order."""
        return self.topology.members if self.ranks is None else self.ranks

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self.ranks or ())}

    def position(self, rank: int) -> int | None:
        """Return a rank's place in the grid, or None if it has none. *Pure.*"""
        if self.ranks is not None:
            return self._positions.get(rank)
        position = rank - self.topology.rank_offset
        return position if 0 <= position < self.topology.world_size else None

    def rank(self, position: int) -> int:
        """Return the rank at a place in the grid. *Pure.*"""
        return position + self.topology.rank_offset if self.ranks is None else self.ranks[position]


class _Blocks:
    """One side's blocks: which indices a place has, and which places hold a block (its copies, its addends)."""

    def __init__(self, placed: Placed, shape: tuple[int, ...], what: str) -> None:
        topology, spec = placed.topology, placed.spec
        layouts = dim_layouts(topology, spec, shape, what=what)
        self.placed = placed
        self.dims = [layout or Layout(()) for layout in layouts]
        self.steps = [size // layout.size for size, layout in zip(shape, self.dims, strict=True)]
        self.addends = topology.layout(spec.partial)
        self.split = Layout.joined(self.dims)
        self.copies = Layout.joined([self.split, self.addends]).complement(topology.size("world"))
        self._near: dict[int, Layout] = {}

    def indices(self, position: int) -> tuple[int, ...]:
        """Return which block of every dim a place holds."""
        return tuple(layout.index(position) for layout in self.dims)

    def start(self, indices: Sequence[int]) -> int:
        """Return the place that holds a block as its first copy and first addend."""
        return sum(layout.offset(index) for layout, index in zip(self.dims, indices, strict=True))

    def nearby_copies(self, one: int, other: int) -> Layout:
        """Return the digits of the copies that are faster than the slowest digit in which two blocks differ.

        Copies of the other block that differ in these only are equally far from `one`.
        """
        differing = [stride for size, stride in self.split.digits if (one // stride - other // stride) % size]
        reach = max(differing, default=0)
        if reach not in self._near:
            self._near[reach] = Layout.of(digit for digit in self.copies.digits if digit.stride < reach)
        return self._near[reach]

    def touching(self, indices: Sequence[int], steps: Sequence[int]) -> list[range]:
        """Return, per dim, which blocks here have elements of a block of another cut, whose block sizes are `steps`."""
        return [
            range(index * other // own, ((index + 1) * other - 1) // own + 1)
            for index, other, own in zip(indices, steps, self.steps, strict=True)
        ]


class Reshard:
    """The transfers that turn one layout of a global array into another; every element arrives exactly once.

    A rank that holds a part takes its own. Another member of the source takes it from a copy nearest in the grid:
    one that shares its slower digits; those equally near take turns. Ranks outside the source share the copies of a
    block evenly, in rank order. Where the source is partial, every addend is a source.

    Args:
        shape: The global shape.
        source: How it lies.
        target: How it shall lie; partial sums cannot be a target.
        turn: Which copy is first in turn; another for every array of a tree lets all copies give alike.

    Raises:
        ShapeError: A dim that the axes of one side do not divide.
        ShardingError: More entries than dims, or a partial target.
        UnknownAxisError: An axis that its topology does not have.

    >>> import dualmesh as dm
    >>> topology = dm.TopologySpec({"dp": 2}).resolve(2)
    >>> plan = Reshard((4,), Placed(topology, P("dp")), Placed(topology, P(), ranks=(1, 2)))
    >>> [(part.sources, part.target_slices) for part in plan.receives(1)]
    [((0,), (slice(0, 2, None),)), ((1,), (slice(2, 4, None),))]
    """

    def __init__(self, shape: Sequence[int], source: Placed, target: Placed, turn: int = 0) -> None:
        self.shape = tuple(shape)
        self.turn = turn
        self.source = source
        self.target = target
        if target.spec.partial:
            raise ShardingError(
                f"Reshard: the target {target.spec!r} is partial over {listed(target.spec.partial)}. A value has no "
                f"one way to be cut into addends: leave `partial` out of the target.",
                spec=target.spec,
            )
        self._from = _Blocks(source, self.shape, "Reshard: source array")
        self._to = _Blocks(target, self.shape, "Reshard: target array")

    @property
    def counts(self) -> tuple[tuple[int, int], ...]:
        """Into how many blocks each dim is cut, at the source and at the target."""
        return tuple((one.size, other.size) for one, other in zip(self._from.dims, self._to.dims, strict=True))

    @property
    def copies(self) -> int:
        """How many ranks of the source hold each block; 0 where the array has no elements."""
        return 0 if 0 in self.shape else self._from.copies.size

    def receives(self, rank: int) -> tuple[Received, ...]:
        """Return what a rank gets and from whom, in the order of the global array; nothing if it is no target. *Pure.*

        The target slices are disjoint and cover the rank's new block.
        """
        position = self.target.position(rank)
        if position is None or 0 in self.shape:
            return ()
        block = self._to.indices(position)
        parts = product(*self._from.touching(block, self._to.steps))
        return tuple(Received(self._sources(part, rank, position), *self._cut(part, block)) for part in parts)

    def sends(self, rank: int) -> tuple[Sent, ...]:
        """Return what a rank gives and to whom (itself included), by target rank. *Pure.*

        The exact counterpart of `receives`: one entry per part that names this rank as a source.
        """
        position = self.source.position(rank)
        if position is None or 0 in self.shape:
            return ()
        part = self._from.indices(position)
        takers = self._takers(part, position)
        sent = [Sent(target, *self._cut(part, self._to.indices(place))) for target, place in takers]
        return tuple(sorted(sent, key=lambda each: each.target))

    def _cut(self, part: Sequence[int], block: Sequence[int]) -> tuple[Slices, Slices]:
        """Return where the common elements of a source block and a target block lie in the one and in the other."""
        source, target = [], []
        for i, given, j, taken in zip(part, self._from.steps, block, self._to.steps, strict=True):
            low, high = max(i * given, j * taken), min((i + 1) * given, (j + 1) * taken)
            source.append(slice(low - i * given, high - i * given))
            target.append(slice(low - j * taken, high - j * taken))
        return tuple(source), tuple(target)

    def _sources(self, part: tuple[int, ...], rank: int, position: int) -> tuple[int, ...]:
        """Return the ranks from which a target rank takes a source block: one, or all its addends."""
        blocks = self._from
        own = self.source.position(rank)
        if own is None:
            place = blocks.start(part) + blocks.copies.offset(self._copy_for(part, position))
        else:
            same_copy = own + blocks.start(part) - blocks.start(blocks.indices(own))
            place = self._turned(same_copy, own, same_copy, 1)
        return tuple(self.source.rank(addend) for addend in blocks.addends.ranks(place))

    def _turned(self, place: int, taker: int, giver: int, sign: int) -> int:
        """Return the place among the copies near a taker's that its turn comes to (sign 1), or the taker's (-1)."""
        blocks = self._from
        if blocks.copies.size == 1:
            return place
        near = blocks.nearby_copies(taker, giver)
        turn = self.turn + blocks.split.index(taker) - blocks.split.index(giver)
        return near.member(place, (near.index(place) + sign * turn) % near.size)

    def _copy_for(self, part: tuple[int, ...], position: int) -> int:
        """Return which copy of a source block a place outside the source takes."""
        touched = self._to.touching(part, self._from.steps)
        number = 0
        for index, choices in zip(self._to.indices(position), touched, strict=True):
            number = number * len(choices) + index - choices.start
        copies = self._to.copies
        number = number * copies.size + copies.index(position)
        count = self._from.copies.size
        return (number * count // (prod(map(len, touched)) * copies.size) + self.turn) % count

    def _takers(self, part: tuple[int, ...], position: int) -> Iterator[tuple[int, int]]:
        """Yield (rank, target place) of all whose sources (`_sources`) for a block include the place that holds it."""
        blocks, copies = self._from, self._to.copies
        touched = self._to.touching(part, blocks.steps)
        for same_copy in Layout.joined([blocks.split, blocks.addends]).ranks(position):
            rank = self.source.rank(self._turned(same_copy, same_copy, position, -1))
            target = self.target.position(rank)
            if target is not None and all(i in r for i, r in zip(self._to.indices(target), touched, strict=True)):
                yield rank, target
        total = prod(map(len, touched)) * copies.size
        count = blocks.copies.size
        copy = (blocks.copies.index(position) - self.turn) % count
        for number in range(-(-copy * total // count), -(-(copy + 1) * total // count)):
            rest, copied = divmod(number, copies.size)
            indices: list[int] = []
            for choices in reversed(touched):
                rest, index = divmod(rest, len(choices))
                indices.insert(0, choices[index])
            target = self._to.start(indices) + copies.offset(copied)
            rank = self.target.rank(target)
            if self.source.position(rank) is None:
                yield rank, target
