"""Where the processes of several worlds meet: a small server of named rooms, and the door that a process keeps to it.

Standard library only, so a world of any framework can come. What a room's members then share is in `transfer_groups`.
Messages are lines of JSON.
"""

import contextlib
import json
import os
import select
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from dualmesh.errors import ArgumentError, SessionError, listed

_POLL_S = 0.1
_PATIENCE_S = 5.0
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(eq=False)
class _Entry:
    """One process that wants to be a rank of the next generation, or is one of the current."""

    rank: int
    size: int
    said: Any
    host: str
    door: socket.socket
    answer: dict[str, Any] | None = None


@dataclass
class _Room:
    """Who waits for the next generation of a group, and who makes up the current one."""

    generation: int = 0
    waiting: dict[int, _Entry] = field(default_factory=dict)
    members: dict[int, _Entry] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    """Who came since the current generation began, and did not wait for the next."""

    def enter(self, entry: _Entry) -> None:
        """Take a place, and begin the next generation where it was the last one free."""
        for other in [one for one in self.waiting.values() if _has_left(one.door)]:
            self.leave(other)
        sizes = {other.size for other in self.waiting.values()} - {entry.size}
        if entry.rank in self.waiting:
            entry.answer = {"problem": f"rank {entry.rank} is taken by another process, which waits now."}
        elif sizes:
            found = f"rank {entry.rank} said {entry.size} ranks, those that wait ({listed(sorted(self.waiting))})"
            for one in (entry, *self.waiting.values()):
                one.answer = {"problem": f"{found} said {listed(sorted(sizes))}."}
            self.waiting = {}
        else:
            self.waiting[entry.rank] = entry
            self.gone.discard(entry.rank)
        if len(self.waiting) == entry.size and entry.answer is None:
            self.generation += 1
            self.members, self.waiting, self.lost, self.gone = self.waiting, {}, set(), set()
            ranks = sorted(self.members)
            told = [[self.members[rank].host, self.members[rank].said] for rank in ranks]
            for member in self.members.values():
                member.answer = {"generation": self.generation, "told": told}

    def leave(self, entry: _Entry) -> None:
        """Give a place back."""
        if self.waiting.get(entry.rank) is entry:
            del self.waiting[entry.rank]
            self.gone.add(entry.rank)
        if self.members.get(entry.rank) is entry:
            self.lost.add(entry.rank)


class TransferStore:
    """Serves rooms at a port until it is closed; every process that keeps a door open to it counts as alive.

    Args:
        port: Where to listen; 0: a free port.

    >>> with TransferStore() as store:
    ...     store.port > 0
    True
    """

    def __init__(self, port: int = 0) -> None:
        self.life = os.urandom(4).hex()
        self._rooms: dict[str, _Room] = {}
        self._changed = threading.Condition()
        self._doors: set[socket.socket] = set()
        if socket.has_dualstack_ipv6():
            self._server = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            self._server = socket.create_server(("", port))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._serve, name=f"dualmesh store {self.port}", daemon=True).start()

    def close(self) -> None:
        """Stop serving. *Local*; idempotent."""
        with self._changed:
            doors, self._doors = self._doors, set()
        for one in (self._server, *doors):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def __enter__(self) -> "TransferStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        while True:
            try:
                door, (host, *_) = self._server.accept()
            except OSError:
                return
            with self._changed:
                self._doors.add(door)
            threading.Thread(target=self._attend, args=(door, host.removeprefix("::ffff:")), daemon=True).start()

    def _attend(self, door: socket.socket, host: str) -> None:
        """Answer one process until it leaves."""
        kept: list[tuple[_Room, _Entry]] = []
        with contextlib.suppress(OSError, ValueError, KeyError), door, door.makefile("r") as said:
            for line in said:
                asked = json.loads(line)
                answer = self._answer(asked, door, host, kept)
                door.sendall(json.dumps({**answer, "life": self.life}).encode() + b"\n")
        with self._changed:
            self._doors.discard(door)
            for room, entry in kept:
                room.leave(entry)
            self._changed.notify_all()

    def _answer(
        self, asked: dict[str, Any], door: socket.socket, host: str, kept: list[tuple[_Room, _Entry]]
    ) -> dict[str, Any]:
        with self._changed:
            room = self._rooms.setdefault(asked["name"], _Room())
            if asked["what"] == "look":
                waiting = sorted(room.waiting)
                return {"generation": room.generation, "lost": sorted(room.lost), "waiting": waiting}
            entry = _Entry(asked["rank"], asked["size"], asked["said"], host, door)
            room.enter(entry)
            kept.append((room, entry))
            self._changed.notify_all()
            deadline = time.monotonic() + asked["timeout_s"]
            while entry.answer is None and time.monotonic() < deadline and not _has_left(door):
                self._changed.wait(_POLL_S)
            if entry.answer is not None:
                return entry.answer
            room.leave(entry)
            self._changed.notify_all()
            return {"came": sorted({*room.waiting, entry.rank}), "gone": sorted(room.gone - {entry.rank})}


def _has_left(door: socket.socket) -> bool:
    readable, _, _ = select.select([door], [], [], 0)
    return bool(readable) and not door.recv(1, socket.MSG_PEEK)


class Door:
    """A process' connection to a store; while it is open the process counts as alive.

    Args:
        host: Where the store is.
        port: Its port.
        timeout_s: How long to try, in seconds.

    Raises:
        OSError: Nobody listens there.
    """

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        self._socket = socket.create_connection((host, port), timeout=max(timeout_s, _POLL_S))
        self._lines = self._socket.makefile("r")
        self._lock = threading.Lock()

    def ask(self, what: str, name: str, timeout_s: float = 0.0, **said: Any) -> dict[str, Any]:
        """Return the store's answer. *Local*; joining waits for the others.

        Raises:
            OSError: The store does not answer.
        """
        with self._lock:
            self._socket.settimeout(timeout_s + _PATIENCE_S)
            asked = {"what": what, "name": name, "timeout_s": timeout_s, **said}
            self._socket.sendall(json.dumps(asked).encode() + b"\n")
            try:
                line = self._lines.readline()
            except ValueError:  # closed in another thread
                line = ""
        if not line:
            raise ConnectionResetError("the store closed the connection")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Leave. *Local*; idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._lines.close()
        self._socket.close()


# -- stores that this process holds ------------------------------------------------------------------------------------

_held: dict[int, tuple[TransferStore, int]] = {}
_lock = threading.Lock()


def hold(port: int) -> bool:
    """Serve at a port, unless somebody else does; tell whether this process does. *Local.* Paired with `let_go`."""
    with _lock:
        if port in _held:
            store, users = _held[port]
            _held[port] = (store, users + 1)
            return True
        try:
            _held[port] = (TransferStore(port), 1)
        except OSError:
            return False
        return True


def let_go(port: int) -> None:
    """Stop serving at a port once nobody in this process needs it. *Local.*"""
    with _lock:
        store, users = _held.pop(port)
        if users > 1:
            _held[port] = (store, users - 1)
            return
    store.close()


def address_of(where: str, store: Any) -> tuple[str, int]:
    """Return host and port of "tcp://host:port". *Pure.*

    Raises:
        ArgumentError: It is no such address.
    """
    text = store.removeprefix("tcp://") if isinstance(store, str) else ""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ArgumentError(
            f"{where}: store={store!r}. Give 'tcp://host:port': the host of transfer rank 0, which serves there, or "
            f"of a process that holds a dm.TransferStore(port).",
            store=store,
        )
    return host.strip("[]"), int(port)


def reachable(host: str, store_host: str) -> str:
    """Return where others reach a process that the store sees at `host`: its own host is the store's. *Pure.*"""
    return store_host if host in _LOOPBACK else host


def door_to(where: str, host: str, port: int, deadline: float) -> Door:
    """Return a connection to a store, which may come later than this process. *Local*, with a timeout.

    Raises:
        SessionError: Nobody served there in time.
    """
    while True:
        try:
            return Door(host, port, deadline - time.monotonic())
        except OSError as error:
            if time.monotonic() > deadline:
                raise SessionError(
                    f"{where}: nobody serves at {host}:{port}: {error}. Transfer rank 0 does, from its call on: start "
                    f"it, at that address, or hold a dm.TransferStore({port}) there.",
                    address=f"{host}:{port}",
                    missing=(0,),
                ) from error
            time.sleep(_POLL_S)
