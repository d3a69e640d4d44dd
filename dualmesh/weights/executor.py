"""Carrying a transfer plan out: messages in the plan's order, with a bounded number of bytes under way.

Who sends what is in `plan`. What a buffer is and who carries it, a backend or a link says.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from dualmesh._support.optional_imports import np
from dualmesh.errors import ChecksumError
from dualmesh.weights.plan import Message, Piece, TransferPlan

BUFFER_BYTES = 64 << 20
"""How much memory a transfer uses beside the arrays, unless told otherwise."""
CHECK_BYTES = 4
_SHARE = 4
"""A bound on memory is this many messages: half of it under way, and the temporary copy of one piece."""


def message_bytes(buffer_bytes: int) -> int:
    """Return how large messages may be for a bound on memory. *Pure.*"""
    return max(buffer_bytes // _SHARE, 1)


class Wire(ABC):
    """Carries buffers between ranks; those of one pair arrive in the order in which they were sent."""

    @abstractmethod
    def send(self, message: Message, buffer: Any) -> Callable[[], None]:
        """Begin to send, and return what waits for the end. *Local.*"""

    @abstractmethod
    def receive(self, message: Message, buffer: Any) -> Callable[[], None]:
        """Begin to receive into a buffer, and return what waits for the end. *Local.*"""


class Blocks(ABC):
    """The blocks that this process' ranks hold at both ends, and buffers to pack them in."""

    @abstractmethod
    def keep(self, rank: int, piece: Piece) -> None:
        """Copy what a rank holds at both ends. *Local.*"""

    @abstractmethod
    def packed(self, message: Message, extra: int) -> Any:
        """Return the bytes of a message, and room for some more behind. *Local.*"""

    @abstractmethod
    def room(self, nbytes: int) -> Any:
        """Return an empty buffer. *Local.*"""

    @abstractmethod
    def unpack(self, message: Message, buffer: Any) -> None:
        """Copy a message's bytes to where they belong. *Local.*"""

    @abstractmethod
    def as_bytes(self, buffer: Any) -> Any:
        """Return a buffer as a numpy array of bytes, on the host; writing to it changes the buffer if it lies there."""

    @abstractmethod
    def write(self, buffer: Any, start: int, data: bytes) -> None:
        """Write bytes into a buffer. *Local.*"""


@dataclass
class Traffic:
    """What was moved."""

    sent: int = 0
    received: int = 0
    kept: int = 0
    peak: int = 0
    """Most bytes in buffers at one time."""


def carry(
    plan: TransferPlan,
    ranks: Iterable[int],
    wire: Wire,
    blocks: Blocks,
    *,
    buffer_bytes: int = BUFFER_BYTES,
    checksum: bool = False,
) -> Traffic:
    """Carry out the parts of some ranks. *Collective over the plan's members*, each rank in one process.

    Messages are taken up in the order that all ranks share, so the earliest one unfinished has both its ends at work:
    nobody waits in a circle, however few are under way.

    Raises:
        ChecksumError: What arrived is not what was sent; said once everything else has arrived.
    """
    traffic, extra = Traffic(), CHECK_BYTES if checksum else 0
    work = []
    for rank in ranks:
        for piece in plan.kept(rank):
            blocks.keep(rank, piece)
            traffic.kept += piece.nbytes
        work += [(message.order, False, message) for message in plan.sends(rank)]
        work += [(message.order, True, message) for message in plan.receives(rank)]
    wrong: list[Message] = []
    under_way: deque[tuple[int, Callable[[], None]]] = deque()
    held = 0
    for _, arrives, message in sorted(work, key=lambda each: each[:2]):
        size = message.nbytes + extra
        while under_way and held + size > buffer_bytes // 2:
            held -= _finish(under_way)
        held += size
        traffic.peak = max(traffic.peak, held + max(piece.nbytes for piece in message.pieces))
        if arrives:
            under_way.append((size, _receiving(message, wire, blocks, extra, wrong)))
            traffic.received += message.nbytes
        else:
            under_way.append((size, _sending(message, wire, blocks, extra)))
            traffic.sent += message.nbytes
    while under_way:
        _finish(under_way)
    if wrong:
        raise _spoilt(wrong)
    return traffic


def _finish(under_way: deque[tuple[int, Callable[[], None]]]) -> int:
    size, wait = under_way.popleft()
    wait()
    return size


def _sending(message: Message, wire: Wire, blocks: Blocks, extra: int) -> Callable[[], None]:
    buffer = blocks.packed(message, extra)
    if extra:
        blocks.write(buffer, message.nbytes, _check(blocks, buffer, message))
    return wire.send(message, buffer)


def _receiving(message: Message, wire: Wire, blocks: Blocks, extra: int, wrong: list[Message]) -> Callable[[], None]:
    buffer = blocks.room(message.nbytes + extra)
    wait = wire.receive(message, buffer)

    def finish() -> None:
        wait()
        if extra and blocks.as_bytes(buffer)[message.nbytes :].tobytes() != _check(blocks, buffer, message):
            wrong.append(message)
            return
        blocks.unpack(message, buffer)

    return finish


def _check(blocks: Blocks, buffer: Any, message: Message) -> bytes:
    return crc32(blocks.as_bytes(buffer)[: message.nbytes].data).to_bytes(CHECK_BYTES, "big")


def _spoilt(wrong: Sequence[Message]) -> ChecksumError:
    first = wrong[0]
    return ChecksumError(
        f"transfer: {len(wrong)} messages are not what was sent, the first from rank {first.sender} to rank "
        f"{first.receiver} with parts of {first.pieces[0].target!r}. Those parts were not written. Transfer again; if "
        f"it happens again, a device or a network between these ranks is broken.",
        messages=tuple(wrong),
    )


class HostBlocks(Blocks):
    """Blocks in host memory, as numpy arrays by rank and path.

    Args:
        given: What ranks of the source hold.
        taken: Where ranks of the target take it.
    """

    def __init__(self, given: Mapping[int, Mapping[str, Any]], taken: Mapping[int, Mapping[str, Any]]) -> None:
        self._given, self._taken = given, taken

    def keep(self, rank: int, piece: Piece) -> None:
        self._taken[rank][piece.target][piece.target_slices] = self._given[rank][piece.source][piece.source_slices]

    def packed(self, message: Message, extra: int) -> Any:
        buffer, start = self.room(message.nbytes + extra), 0
        own = self._given[message.sender]
        for piece in message.pieces:
            box = np.ascontiguousarray(own[piece.source][piece.source_slices])
            buffer[start : start + piece.nbytes] = box.reshape(-1).view(np.uint8)
            start += piece.nbytes
        return buffer

    def room(self, nbytes: int) -> Any:
        return np.empty(nbytes, np.uint8)

    def unpack(self, message: Message, buffer: Any) -> None:
        start, own = 0, self._taken[message.receiver]
        for piece in message.pieces:
            block = own[piece.target]
            box = block[piece.target_slices]
            part = np.frombuffer(buffer[start : start + piece.nbytes].tobytes(), block.dtype)
            block[piece.target_slices] = part.reshape(np.shape(box))
            start += piece.nbytes

    def as_bytes(self, buffer: Any) -> Any:
        return buffer

    def write(self, buffer: Any, start: int, data: bytes) -> None:
        buffer[start : start + len(data)] = np.frombuffer(data, np.uint8)
