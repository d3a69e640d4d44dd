"""The processes of two worlds, connected, and messages between them.

Who connects to whom is in `link`; the processes find each other in `group`, and what a connection
is, is in `channel`.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from dualmesh._support.channel import GREETING_S, Channel, Listener, visit
from dualmesh.errors import GroupTimeoutError, StaleStateError
from dualmesh.weights.executor import Wire
from dualmesh.weights.plan import Message

_LONGEST_GREETING = 4096


class Peer:
    """One process of the other side, at the end of a connection.

    Args:
        name: How messages call it.
        channel: The connection; the peer owns it.
        timeout_s: How long to wait for each message of its, in seconds.
    """

    def __init__(self, name: str, channel: Channel, timeout_s: float) -> None:
        self.name, self.timeout_s = name, timeout_s
        self._channel = channel

    def say(self, **said: Any) -> None:
        """Send plain data. *Local*, with a timeout."""
        with self._named_faults(self.timeout_s):
            self._channel.say(said, self.timeout_s)

    def hear(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the plain data that the peer says next. *Local*, with a timeout."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        with self._named_faults(limit):
            said: dict[str, Any] = self._channel.hear(limit)
        return said

    def send(self, buffer: Any) -> None:
        """Send bytes. *Local*, with a timeout."""
        with self._named_faults(self.timeout_s):
            self._channel.send(buffer, self.timeout_s)

    def receive(self, buffer: Any) -> None:
        """Fill a buffer of bytes. *Local*, with a timeout."""
        with self._named_faults(self.timeout_s):
            self._channel.receive(buffer, self.timeout_s)

    def close(self) -> None:
        """End the connection. *Local*; idempotent."""
        self._channel.close()

    @contextlib.contextmanager
    def _named_faults(self, timeout_s: float) -> Any:
        try:
            yield
        except TimeoutError as error:
            raise GroupTimeoutError(
                f"TransferLink: {self.name} did not answer within {timeout_s:g} s. Call send() on the source and "
                f"receive() on the target, in all their processes; or raise timeout_s.",
                missing=(self.name,),
                timeout_s=timeout_s,
            ) from error
        except OSError as error:
            raise StaleStateError(
                f"TransferLink: {self.name} left or restarted: {error}. Call dm.transfer_link(...) again on "
                f"both sides.",
                peer=self.name,
            ) from error


class PeerWire(Wire):
    """Messages over connections; `peer_of` gives the process that holds a rank of the other side."""

    def __init__(self, peer_of: Mapping[int, Peer]) -> None:
        self._peer_of = peer_of

    def send(self, message: Message, buffer: Any) -> Callable[[], None]:
        self._peer_of[message.receiver].send(buffer)
        return _done

    def receive(self, message: Message, buffer: Any) -> Callable[[], None]:
        return lambda: self._peer_of[message.sender].receive(buffer)


def _done() -> None:
    """Nothing is left to wait for."""


def connect_to(address: tuple[str, int], name: str, key: bytes, greeting: Mapping[str, Any], timeout_s: float) -> Peer:
    """Return the process that listens at an address, after greeting it. *Local*, with a timeout."""
    try:
        channel = visit(*address, key, timeout_s)
    except OSError as error:
        raise GroupTimeoutError(
            f"TransferLink: {name} cannot be reached at {address[0]}:{address[1]}: {error}. It may have ended; else "
            f"let this host reach it there, and give both the same key.",
            missing=(name,),
        ) from error
    peer = Peer(name, channel, timeout_s)
    peer.say(**greeting)
    return peer


class Visits:
    """Where the processes of the other side connect to this one, and those that did.

    Args:
        host: The address to listen at.
        key: The secret that visitors must know.
    """

    def __init__(self, host: str, key: bytes) -> None:
        self._came: dict[tuple[str, int], Channel] = {}
        self._moved = threading.Condition()
        self._listener = Listener(host, 0, key, self._attend)
        self.port = self._listener.port

    def __enter__(self) -> "Visits":
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        with self._moved:
            came, self._came = self._came, {}
        for channel in came.values():  # of other generations, whose processes have given up
            channel.close()

    def await_peers(self, names: Mapping[int, str], generation: str, timeout_s: float) -> dict[int, Peer]:
        """Return the processes that visit, by the number that they greet with. *Local*, with a timeout.

        Raises:
            GroupTimeoutError: Some did not come in time; the message names them.
        """
        deadline = time.monotonic() + timeout_s
        keys = {(generation, place): place for place in names}
        with self._moved:
            self._moved.wait_for(lambda: keys.keys() <= self._came.keys(), max(deadline - time.monotonic(), 0.0))
            missing = [names[place] for key, place in keys.items() if key not in self._came]
            if not missing:
                return {place: Peer(names[place], self._came.pop(key), timeout_s) for key, place in keys.items()}
        raise GroupTimeoutError(
            f"TransferLink: {', '.join(missing)} did not connect within {timeout_s:g} s. Let their hosts reach "
            f"this one.",
            missing=tuple(missing),
            timeout_s=timeout_s,
        )

    def _attend(self, channel: Channel, host: str) -> bool:
        said = channel.hear(GREETING_S, _LONGEST_GREETING)
        if not isinstance(said, dict) or type(said.get("generation")) is not str or type(said.get("place")) is not int:
            return False
        with self._moved:
            self._moved.notify_all()
            return self._came.setdefault((said["generation"], said["place"]), channel) is channel
