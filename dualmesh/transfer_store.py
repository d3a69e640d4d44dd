"""Where the processes of several worlds meet: a small server of named rooms, and the door that a process keeps to it.

Standard library only, so a world of any framework can come. What a room's members then share is in `transfer_groups`.
Messages are lines of JSON.
"""

import contextlib
import json
import os
import socket
import threading
import time
from typing import Any

from dualmesh.errors import ArgumentError, SessionError
from dualmesh.transfer_rooms import Entry, Room, all_named, has_left, named

_POLL_S = 0.1
_PATIENCE_S = 5.0
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


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
        self._rooms: dict[str, Room] = {}
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
        kept: list[tuple[Room, Entry]] = []
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
        self, asked: dict[str, Any], door: socket.socket, host: str, kept: list[tuple[Room, Entry]]
    ) -> dict[str, Any]:
        with self._changed:
            room = self._rooms.setdefault(asked["name"], Room())
            if asked["what"] == "look":
                lost, waiting = (
                    all_named(room.lost) if room.lost else "",
                    all_named(room.waiting) if room.waiting else "",
                )
                return {"generation": room.generation, "lost": lost, "waiting": waiting}
            place = asked["side"], asked["place"], asked["total"], tuple(asked["sides"])
            entry = Entry(*place, asked["said"], host, door)
            room.enter(entry)
            kept.append((room, entry))
            self._changed.notify_all()
            deadline = time.monotonic() + asked["timeout_s"]
            while entry.answer is None and time.monotonic() < deadline and not has_left(door):
                self._changed.wait(_POLL_S)
            if entry.answer is not None:
                return entry.answer
            came, gone = all_named(room.waiting), all_named(room.gone)
            missing = [one for one in room.missing(entry) if one not in {named(place) for place in room.gone}]
            room.leave(entry)
            self._changed.notify_all()
            return {"missing": missing, "came": came, "gone": gone}


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
