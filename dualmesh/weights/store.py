"""Where the processes of several worlds meet: a small server of named rooms, and the door that a process keeps to it.

Standard library only, so a world of any framework can come. What a room's members then share is in `group`;
who may come, and how messages travel, is in `channel`.
"""

import os
import threading
import time
from typing import Any

from dualmesh._support.channel import Channel, ForeignError, Listener, visit
from dualmesh.errors import ArgumentError, SessionError
from dualmesh.topology.resolve import whole
from dualmesh.weights.key import VARIABLE, find_key
from dualmesh.weights.rendezvous import Entry, Rendezvous, name_place, name_places

MOST_PLACES = 1 << 20
"""The largest group."""
_POLL_S = 0.5
_PAUSE_S = 0.1
_PATIENCE_S = 5.0
_LONGEST_NAME = 1024
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class TransferStore:
    """Serves rooms at a port until it is closed; every process that keeps a door open to it counts as alive.

    Args:
        port: Where to listen; 0: a free port.
        host: The address to listen at, and no other: a name or number of this machine that the others reach.
        key: The secret that processes must know; None: DUALMESH_TRANSFER_KEY, or that of this user on this machine.

    Raises:
        ArgumentError: The port is none, or the host not a text.
        OSError: Somebody listens there, or the host is not this machine.

    >>> with TransferStore() as store:
    ...     store.port > 0
    True
    """

    def __init__(self, port: int = 0, *, host: str = "localhost", key: str | bytes | None = None) -> None:
        number = whole(port)
        if number is None or not 0 <= number < 1 << 16:
            raise ArgumentError(f"TransferStore: port={port!r}. Give 0 to 65535; 0: a free port.", port=port)
        if not isinstance(host, str) or not host:
            raise ArgumentError(f"TransferStore: host={host!r}. Give a name or number of this machine.", host=host)
        self.life = os.urandom(4).hex()
        self._rooms: dict[str, Rendezvous] = {}
        self._lock = threading.Lock()
        self._listener = Listener(host, number, find_key("TransferStore", key), self._attend)
        self.port: int = self._listener.port

    def close(self) -> None:
        """Stop serving. *Local*; idempotent."""
        self._listener.close()

    def __enter__(self) -> "TransferStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _attend(self, channel: Channel, host: str) -> bool:
        """Answer one process until it leaves."""
        kept: list[tuple[Rendezvous, Entry]] = []
        try:
            while True:
                answer = self._answer(channel.hear(None), channel, host, kept)
                channel.say({**answer, "life": self.life}, _PATIENCE_S)
        finally:
            with self._lock:
                for room, entry in kept:
                    room.leave(entry)

    def _answer(self, asked: Any, channel: Channel, host: str, kept: list[tuple[Rendezvous, Entry]]) -> dict[str, Any]:
        problem = _problem_of(asked)
        if problem:
            return {"problem": f"The store refused it: {problem}"}
        if asked["what"] == "look":
            with self._lock:
                room = self._rooms.get(asked["name"], Rendezvous())
                lost, waiting = name_places(room.lost), name_places(room.waiting)
                return {"generation": room.generation, "lost": lost, "waiting": waiting}
        place = asked["side"], asked["place"], asked["total"], tuple(asked["sides"])
        entry = Entry(*place, asked["said"], host, channel)
        with self._lock:
            room = self._rooms.setdefault(asked["name"], Rendezvous())
            room.enter(entry)
            kept.append((room, entry))
        deadline = time.monotonic() + asked["timeout_s"]
        while not entry.answered.wait(max(0.0, min(_POLL_S, deadline - time.monotonic()))):
            if time.monotonic() >= deadline or channel.has_left:
                break
        with self._lock:
            if entry.answer is not None:
                return entry.answer
            came, gone = name_places(room.waiting), name_places(room.gone)
            missing = [one for one in room.missing(entry) if one not in {name_place(place) for place in room.gone}]
            room.leave(entry)
            return {"missing": missing, "came": came, "gone": gone}


def _problem_of(asked: Any) -> str:
    """Return what is wrong with what a process asks, "" for nothing: looked at once, here, before anything is done."""
    if not isinstance(asked, dict) or asked.get("what") not in ("look", "join"):
        return "it asks neither to look nor to join."
    if not isinstance(asked.get("name"), str) or not 0 < len(asked["name"]) <= _LONGEST_NAME:
        return f"a name is a text of 1 to {_LONGEST_NAME} characters."
    if asked["what"] == "look":
        return ""
    sides, side = asked.get("sides"), asked.get("side")
    if not isinstance(sides, list) or not all(isinstance(one, str) for one in sides) or side not in sides:
        return "its side is none of its sides."
    total, place, timeout_s = asked.get("total"), asked.get("place"), asked.get("timeout_s")
    if type(total) is not int or type(place) is not int or not 0 <= place < total <= MOST_PLACES:
        return f"its place is not below its total, or that above {MOST_PLACES}."
    if not isinstance(timeout_s, int | float) or not 0 <= timeout_s < float("inf"):
        return "its timeout is no time."
    return "" if "said" in asked else "it says nothing to the others."


class StoreClient:
    """A process' connection to a store; while it is open the process counts as alive.

    Args:
        host: Where the store is.
        port: Its port.
        key: The secret that the store knows too.
        timeout_s: How long to try, in seconds.

    Raises:
        ForeignError: Who listens there does not know the secret, or is no store.
        OSError: Nobody listens there.
    """

    def __init__(self, host: str, port: int, key: bytes, timeout_s: float) -> None:
        self._channel = visit(host, port, key, timeout_s)
        self._lock = threading.Lock()

    def ask(self, what: str, name: str, timeout_s: float = 0.0, **said: Any) -> dict[str, Any]:
        """Return the store's answer. *Local*; joining waits for the others.

        Raises:
            OSError: The store does not answer.
        """
        with self._lock:
            self._channel.say({"what": what, "name": name, "timeout_s": timeout_s, **said}, _PATIENCE_S)
            answer = self._channel.hear(timeout_s + _PATIENCE_S)
        if not isinstance(answer, dict):
            raise ForeignError("it speaks another language")
        return answer

    def close(self) -> None:
        """Leave. *Local*; idempotent."""
        self._channel.close()


# -- stores that this process holds ------------------------------------------------------------------------------------

_held: dict[tuple[str, int], tuple[TransferStore, int]] = {}
_lock = threading.Lock()


def hold(address: tuple[str, int], key: str | bytes | None) -> bool:
    """Serve at an address, unless somebody else does; tell whether this process does. *Local.* Paired with `let_go`."""
    with _lock:
        if address in _held:
            store, users = _held[address]
            _held[address] = (store, users + 1)
            return True
        try:
            _held[address] = (TransferStore(address[1], host=address[0], key=key), 1)
        except OSError:
            return False
        return True


def let_go(address: tuple[str, int]) -> None:
    """Stop serving at an address once nobody in this process needs it. *Local.*"""
    with _lock:
        store, users = _held.pop(address)
        if users > 1:
            _held[address] = (store, users - 1)
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


def connect_to_store(where: str, address: tuple[str, int], key: bytes, deadline: float) -> StoreClient:
    """Return a connection to a store, which may come later than this process. *Local*, with a timeout.

    Raises:
        SessionError: Nobody served there in time, or who does has another key.
    """
    host, port = address
    while True:
        try:
            return StoreClient(host, port, key, deadline - time.monotonic())
        except ForeignError as error:
            raise SessionError(
                f"{where}: what listens at {host}:{port} is not this group's store: {error}. Give all processes the "
                f"same key= or {VARIABLE} (without either, processes of one user on one machine share one), and the "
                f"address of a dm.TransferStore or of transfer rank 0.",
                address=f"{host}:{port}",
            ) from error
        except OSError as error:
            if time.monotonic() > deadline:
                raise SessionError(
                    f"{where}: nobody serves at {host}:{port}: {error}. Transfer rank 0 does, from its call on: start "
                    f"it, at that address, or hold a dm.TransferStore({port}, host={host!r}) there.",
                    address=f"{host}:{port}",
                    missing=(0,),
                ) from error
            time.sleep(_PAUSE_S)
