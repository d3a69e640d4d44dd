"""Moving a whole tree of arrays from one topology to another, as integers: messages between pairs of ranks.

Where one array's blocks come from is in `redistribution`, what a tree holds in `endpoints`; carrying messages is in
`executor`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from math import lcm, prod
from typing import Any, NamedTuple

from dualmesh.errors import ArgumentError, listed
from dualmesh.sharding.partition_spec import dim_layouts, local_shape
from dualmesh.sharding.redistribution import Reshard, Slices
from dualmesh.topology.resolve import positive
from dualmesh.weights.endpoints import Array, End, Held, end_of, pairs_of

MESSAGE_BYTES = 4 << 20
"""How much one message carries at most, unless told otherwise."""


_TURNS = 8
"""How many arrays in a row take other copies first; then it begins again, so that equal arrays are planned once."""


class Piece(NamedTuple):
    """A box of one array, and where it lies in the blocks of the sender and of the receiver."""

    source: str
    """The path of the sender's block."""
    source_slices: Slices
    target: str
    """The path of the receiver's block."""
    target_slices: Slices
    nbytes: int


class Message(NamedTuple):
    """What one rank sends another at once."""

    order: tuple[int, int, int]
    """Messages are carried in this order on all ranks, so that none waits for one that waits for it."""
    sender: int
    receiver: int
    pieces: tuple[Piece, ...]
    nbytes: int


_Part = tuple[int, Slices, Slices]
"""Peer, and where the part lies in the sender's block and in the receiver's."""


class _Route(NamedTuple):
    """One array: how its blocks go, in units, and how many elements a unit has along each dim."""

    units: Reshard
    scale: tuple[int, ...]
    itemsize: int
    given: Held
    taken: Held


class TransferPlan:
    """Who sends which boxes of which arrays to whom; made by `plan_transfer`. One rank's part takes its answer's time.

    Every byte goes once, and only to ranks that lack it. Ranks take from the nearest copy in the grid; copies that are
    equally near, and the copies of a source that a rank is no part of, take turns from array to array.
    """

    def __init__(self, arrays: Mapping[str, Array], source: End, target: End, message_bytes: int) -> None:
        self.message_bytes = message_bytes
        self.source, self.target = source, target
        self.span = max((rank for end in (source, target) for rank in end.members), default=0) + 1
        self.pairs = tuple(pairs_of(arrays, source, target))
        """Every array with where it lies at both ends, in the order of the source's."""
        self._routes = _routes(self.pairs, source, target)

    def target_blocks(self) -> dict[str, tuple[tuple[int, ...], Array]]:
        """Return {path: (shape of a rank's block, array)} of the target; of a fused path its first array. *Pure.*"""
        found: dict[str, tuple[tuple[int, ...], Array]] = {}
        for array, _, taken in self.pairs:
            shape = list(local_shape(self.target.topology, taken.spec, array.shape))
            if taken.dim >= 0:
                before, first = found.get(taken.path, ((0,) * len(shape), array))
                shape[taken.dim] = max(before[taken.dim], taken.start + shape[taken.dim])
                array = first
            found[taken.path] = tuple(shape), array
        return found

    def kept(self, rank: int) -> tuple[Piece, ...]:
        """Return what a rank holds in both layouts and copies for itself. *Pure.*"""
        return tuple(piece for peer, piece in self._taken(rank) if peer == rank)

    def receives(self, rank: int) -> tuple[Message, ...]:
        """Return the messages to a rank, in the order in which all ranks carry them. *Pure.*"""
        return self._messages([(peer, rank, peer, piece) for peer, piece in self._taken(rank) if peer != rank])

    def sends(self, rank: int) -> tuple[Message, ...]:
        """Return the messages from a rank, in the order in which all ranks carry them. *Pure.*"""
        return self._messages([(rank, peer, peer, piece) for peer, piece in self._given(rank) if peer != rank])

    def bytes_received(self, rank: int) -> int:
        """Return how much a rank gets from others. *Pure.*"""
        return sum(message.nbytes for message in self.receives(rank))

    def bytes_sent(self, rank: int) -> int:
        """Return how much a rank gives others. *Pure.*"""
        return sum(message.nbytes for message in self.sends(rank))

    @cached_property
    def members(self) -> tuple[int, ...]:
        """All ranks of both ends, rising."""
        return tuple(sorted({*self.source.members, *self.target.members}))

    def _taken(self, rank: int) -> Iterator[tuple[int, Piece]]:
        return self._pieces(lambda units: [(part.sources[0], *part[1:]) for part in units.receives(rank)])

    def _given(self, rank: int) -> Iterator[tuple[int, Piece]]:
        return self._pieces(lambda units: units.sends(rank))

    def _pieces(
        self, parts_of: Callable[[Reshard], Iterable[tuple[int, Slices, Slices]]]
    ) -> Iterator[tuple[int, Piece]]:
        """Yield (peer, piece) of every array. Equal arrays are planned once, and arrays cut alike share the peers."""
        planned: dict[int, list[tuple[int, Slices, Slices]]] = {}
        scaled: dict[Any, list[tuple[int, Slices, Slices, int]]] = {}
        for units, scale, itemsize, given, taken in self._routes:
            key = id(units), scale, given.start, taken.start, given.dim, taken.dim
            if key not in scaled:
                if id(units) not in planned:
                    planned[id(units)] = list(parts_of(units))
                scaled[key] = [
                    (peer, given.moved(_scale(one, scale)), taken.moved(_scale(other, scale)), _count(one, scale))
                    for peer, one, other in planned[id(units)]
                ]
            for peer, one, other, count in scaled[key]:
                yield peer, Piece(given.path, one, taken.path, other, count * itemsize)

    def _messages(self, pieces: Sequence[tuple[int, int, int, Piece]]) -> tuple[Message, ...]:
        """Pack the pieces of every pair, in the order of the arrays, which both ends know."""
        by_pair: dict[int, list[Piece]] = {}
        ends: dict[int, tuple[int, int]] = {}
        for sender, receiver, peer, piece in pieces:
            by_pair.setdefault(peer, []).append(piece)
            ends[peer] = sender, receiver
        found = []
        for peer, every in by_pair.items():
            sender, receiver = ends[peer]
            shift = (receiver - sender) % self.span
            for number, packed in enumerate(_pack(every, self.message_bytes)):
                size = sum(piece.nbytes for piece in packed)
                found.append(Message((number, shift, sender), sender, receiver, tuple(packed), size))
        return tuple(sorted(found))


def plan_transfer(
    arrays: Mapping[str, Any],
    *,
    src: Any,
    dst: Any,
    message_bytes: int = MESSAGE_BYTES,
    renames: Mapping[str, str] | None = None,
) -> TransferPlan:
    """Return who sends which parts of a tree of arrays to whom, from one topology to another. *Pure.*

    Args:
        arrays: {path: (shape, bytes of an element)} of what the source holds, global shapes; a third item may name the
            dtype.
        src: (topology, specs), (topology, specs, ranks), or (state or its name, specs). Specs: one `dm.P` for all; a
            mapping {path: `dm.P` or `dm.Fused`}; or a `dm.ShardingPlan`.
        dst: Likewise; a mapping may have `dm.Fused` paths that the source holds as several arrays, or the reverse.
        message_bytes: How much one message carries at most; small arrays share one, large ones are cut.
        renames: {path in the target: path in the source}.

    Raises:
        ArgumentError: An argument is none of these.
        ShapeError: A dim that the axes of one end do not divide.
        ShardingError: An array without a spec, or a source or target that is a sum still to be taken.

    >>> import dualmesh as dm
    >>> topology = dm.TopologySpec({"tp": 2}).resolve(2)
    >>> plan = plan_transfer({"w": ((4, 2), 4)}, src=(topology, dm.P("tp")), dst=(topology, dm.P(None, "tp")))
    >>> [(message.receiver, message.nbytes) for message in plan.sends(0)], plan.kept(0)[0].nbytes
    ([(1, 8)], 8)
    """
    where = "plan_transfer"
    size = positive(where, "message_bytes", message_bytes)
    if not isinstance(arrays, Mapping):
        raise ArgumentError(f"{where}: arrays={arrays!r}. Give {{path: (shape, bytes of an element)}}.", arrays=arrays)
    known = {path: Array.of(where, path, given) for path, given in arrays.items()}
    wide = [path for path, array in known.items() if array.itemsize > size]
    if wide:
        raise ArgumentError(f"{where}: message_bytes={size} is less than one element of {listed(wide)}.", paths=wide)
    source, target = end_of(where, "src", src), end_of(where, "dst", dst, renames)
    return TransferPlan(known, source, target, size)


def _routes(pairs: Iterable[tuple[Array, Held, Held]], source: End, target: End) -> list[_Route]:
    """Return how each array goes; those cut alike share one plan, in units of which both ends' cuts are made."""
    planned: dict[Any, Reshard] = {}
    scales: dict[Any, tuple[tuple[int, ...], int]] = {}
    found = []
    for number, (array, given, taken) in enumerate(pairs):
        key = array.shape, given.spec, taken.spec
        if key not in scales:
            for end, held in ((source, given), (target, taken)):
                dim_layouts(end.topology, held.spec, array.shape, what=f"plan_transfer: {end.what}: {held.path!r}")
            plan = Reshard(array.shape, source.placed(given.spec), target.placed(taken.spec))
            scales[key] = tuple(map(_unit, array.shape, plan.counts)), plan.copies
        scale, copies = scales[key]
        if not copies:
            continue  # nothing to move
        turn = number % min(copies, _TURNS)
        shape = tuple(size // unit for size, unit in zip(array.shape, scale, strict=True))
        units = shape, given.spec, taken.spec, turn
        if units not in planned:
            planned[units] = Reshard(shape, source.placed(given.spec), target.placed(taken.spec), turn)
        found.append(_Route(planned[units], scale, array.itemsize, given, taken))
    return found


def _unit(size: int, counts: tuple[int, int]) -> int:
    return max(size // lcm(*counts), 1)


def _scale(slices: Slices, scale: tuple[int, ...]) -> Slices:
    return tuple(slice(cut.start * unit, cut.stop * unit) for cut, unit in zip(slices, scale, strict=True))


def _count(slices: Slices, scale: tuple[int, ...]) -> int:
    return prod((cut.stop - cut.start) * unit for cut, unit in zip(slices, scale, strict=True))


def _pack(pieces: Sequence[Piece], message_bytes: int) -> Iterator[list[Piece]]:
    """Yield the pieces in order, as many in a row as one message carries; larger ones cut."""
    packed: list[Piece] = []
    size = 0
    for piece in pieces:
        for box in (piece,) if piece.nbytes <= message_bytes else _boxes(piece, message_bytes):
            if packed and size + box.nbytes > message_bytes:
                yield packed
                packed, size = [], 0
            packed.append(box)
            size += box.nbytes
    if packed:
        yield packed


def _boxes(piece: Piece, most: int) -> Iterator[Piece]:
    """Cut a piece along its slowest dims into boxes of at most `most` bytes, in memory order."""
    if piece.nbytes <= most:
        yield piece
        return
    dim, cut = next((dim, cut) for dim, cut in enumerate(piece.source_slices) if cut.stop - cut.start > 1)
    count = cut.stop - cut.start
    rows = max(1, most // (piece.nbytes // count))
    for first in range(0, count, rows):
        last = min(first + rows, count)
        box = piece._replace(
            source_slices=_within(piece.source_slices, dim, first, last),
            target_slices=_within(piece.target_slices, dim, first, last),
            nbytes=piece.nbytes // count * (last - first),
        )
        yield from _boxes(box, most)


def _within(slices: Slices, dim: int, first: int, last: int) -> Slices:
    start = slices[dim].start
    return (*slices[:dim], slice(start + first, start + last), *slices[dim + 1 :])
