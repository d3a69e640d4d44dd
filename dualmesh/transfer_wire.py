"""Connections between the processes of two worlds, and messages over them.

Who connects to whom is in `transfer_link`; the processes find each other in `transfer_groups`.
"""

import contextlib
import json
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from dualmesh.errors import GroupTimeoutError, StaleStateError
from dualmesh.transfer_plan import Message
from dualmesh.transfer_run import Wire


class Peer:
    """One process of the other side, at the end of a connection.

    Args:
        name: How messages call it.
        connection: The socket; the peer owns it.
        timeout_s: How long to wait for it, in seconds.
    """

    def __init__(self, name: str, connection: socket.socket, timeout_s: float) -> None:
        self.name, self.timeout_s = name, timeout_s
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._rest = b""

    def say(self, **said: Any) -> None:
        """Send plain data. *Local*, with a timeout."""
        self.send(json.dumps(said).encode() + b"\n")

    def hear(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the plain data that the peer says next. *Local*, with a timeout."""
        with self._named_faults(self.timeout_s if timeout_s is None else timeout_s):
            while b"\n" not in self._rest:
                part = self._socket.recv(1 << 16)
                if not part:
                    raise ConnectionResetError("it closed the connection")
                self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        said: dict[str, Any] = json.loads(line)
        return said

    def send(self, buffer: Any) -> None:
        """Send bytes. *Local*, with a timeout."""
        with self._named_faults(self.timeout_s):
            self._socket.sendall(memoryview(buffer))

    def receive(self, buffer: Any) -> None:
        """Fill a buffer of bytes. *Local*, with a timeout."""
        view = memoryview(buffer)
        early = self._rest[: len(view)]
        view[: len(early)] = early
        self._rest, view = self._rest[len(early) :], view[len(early) :]
        with self._named_faults(self.timeout_s):
            while len(view):
                count = self._socket.recv_into(view)
                if not count:
                    raise ConnectionResetError("it closed the connection")
                view = view[count:]

    def close(self) -> None:
        """End the connection. *Local*; idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    @contextlib.contextmanager
    def _named_faults(self, timeout_s: float) -> Any:
        try:
            self._socket.settimeout(timeout_s)
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


def listening() -> socket.socket:
    """Return a socket at which others can reach this process, at a free port. *Local.*"""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def visited(host: str, port: int, name: str, greeting: Mapping[str, Any], timeout_s: float) -> Peer:
    """Return the process that listens at an address, after greeting it. *Local*, with a timeout."""
    try:
        peer = Peer(name, socket.create_connection((host, port), timeout=timeout_s), timeout_s)
    except OSError as error:
        raise GroupTimeoutError(
            f"TransferLink: {name} cannot be reached at {host}:{port}: {error}. It may have ended; else let this host "
            f"reach it there.",
            missing=(name,),
        ) from error
    peer.say(**greeting)
    return peer


def received_visits(
    server: socket.socket, names: Mapping[int, str], generation: str, timeout_s: float
) -> dict[int, Peer]:
    """Return the processes that visit, by the number that they greet with. *Local*, with a timeout.

    Raises:
        GroupTimeoutError: Some did not come in time; the message names them.
    """
    found: dict[int, Peer] = {}
    deadline = time.monotonic() + timeout_s
    try:
        while len(found) < len(names):
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            connection, _ = server.accept()
            peer = Peer("a visitor", connection, timeout_s)
            with contextlib.suppress(GroupTimeoutError, StaleStateError, ValueError):
                said = peer.hear(min(timeout_s, 5.0))
                if said.get("generation") == generation and said.get("place") in names:
                    peer.name = names[said["place"]]
                    found[said["place"]] = peer
                    continue
            peer.close()
    except TimeoutError as error:
        for peer in found.values():
            peer.close()
        missing = [name for place, name in names.items() if place not in found]
        raise GroupTimeoutError(
            f"TransferLink: {', '.join(missing)} did not connect within {timeout_s:g} s. Let their hosts reach this "
            f"one.",
            missing=tuple(missing),
            timeout_s=timeout_s,
        ) from error
    return found
