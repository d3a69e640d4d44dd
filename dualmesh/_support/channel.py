"""Connections between processes that share a secret: messages of bounded size, each within a deadline.

Framing and the proof of the secret are those of `multiprocessing.connection`, with bytes only: nothing is unpickled.
Long arrays go over the same connection as they are, since both ends know their lengths.
"""

import contextlib
import hashlib
import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

HELLO = b"dualmesh 1"
"""What a visitor says first: the language, and its version."""
GREETING_S = 5.0
"""How long a visitor may take to prove that it knows the secret."""
MOST_BYTES = 1 << 26
"""The longest message: what thousands of processes say when they join."""
_MOST_STRANGERS = 512
"""How many visitors may be proving at once; others wait in the listener's queue."""

_PAUSE_S = 0.05
_LONGEST_S = 1e6
"""Longer than that nobody waits, and no system's timer can."""


class ForeignError(OSError):
    """The other end speaks another language, or does not know the secret."""


class Channel:
    """One end of a connection.

    Args:
        connected: The socket; the channel owns it.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._connection = Connection(os.dup(connected.fileno()))

    @property
    def has_left(self) -> bool:
        """Whether the other end closed the connection."""
        watched = select.poll()  # not select(): descriptors may be above 1,023
        try:
            watched.register(self._socket, select.POLLIN)
            return bool(watched.poll(0)) and not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except (OSError, ValueError):
            return True

    def prove(self, key: bytes, timeout_s: float) -> None:
        """Prove the secret to the listener that was visited, which proves it too. *Local*, with a timeout.

        Raises:
            ForeignError: It is no listener of dualmesh's, or has another secret.
            OSError: It does not answer.
        """
        with self._deadline(timeout_s), _as_foreign():
            self._connection.send_bytes(HELLO)
            answer_challenge(self._connection, _half(key, "visitor"))
            deliver_challenge(self._connection, _half(key, "listener"))

    def examine(self, key: bytes, timeout_s: float) -> None:
        """Let a visitor prove the secret, then prove it too. *Local*, with a timeout. Raises as `prove`."""
        with self._deadline(timeout_s), _as_foreign():
            if self._connection.recv_bytes(64) != HELLO:
                raise ForeignError("it speaks another language")
            # Each end proves with a half of its own, so that what one end proves cannot be sent back to it.
            deliver_challenge(self._connection, _half(key, "visitor"))
            answer_challenge(self._connection, _half(key, "listener"))

    def first_bytes(self, count: int, timeout_s: float) -> bytes:
        """Return what the other end says first, which stays to be read. *Local*, with a timeout."""
        with self._deadline(timeout_s):
            return self._socket.recv(count, socket.MSG_PEEK | socket.MSG_WAITALL)

    def say(self, said: Any, timeout_s: float) -> None:
        """Send plain data. *Local*, with a timeout."""
        with self._deadline(timeout_s):
            self._connection.send_bytes(json.dumps(said).encode())

    def hear(self, timeout_s: float | None, most_bytes: int = MOST_BYTES) -> Any:
        """Return the plain data that the other end says next. *Local*, with a timeout (None: without).

        Raises:
            ForeignError: What it says is no plain data, or longer than allowed.
            OSError: It left.
        """
        if timeout_s is not None:  # most of the time is waited for the first byte, and that needs no thread to watch it
            deadline = time.monotonic() + timeout_s
            with contextlib.suppress(EOFError, ValueError):
                if not self._connection.poll(min(max(timeout_s, 0.0), _LONGEST_S)):
                    raise TimeoutError(f"no answer within {timeout_s:g} s")
            timeout_s = max(deadline - time.monotonic(), _PAUSE_S)
        with self._deadline(timeout_s), _as_foreign():
            return json.loads(self._connection.recv_bytes(most_bytes))

    def send(self, buffer: Any, timeout_s: float) -> None:
        """Send bytes whose number the other end knows. *Local*, with a timeout."""
        with self._deadline(timeout_s):
            self._socket.sendall(memoryview(buffer))

    def receive(self, buffer: Any, timeout_s: float) -> None:
        """Fill a buffer of bytes. *Local*, with a timeout."""
        view = memoryview(buffer)
        with self._deadline(timeout_s):
            while len(view):
                count = self._socket.recv_into(view)
                if not count:
                    raise ConnectionResetError("it closed the connection")
                view = view[count:]

    def close(self) -> None:
        """End the connection. *Local*; idempotent."""
        self._shut()
        self._socket.close()
        with contextlib.suppress(OSError):
            self._connection.close()

    def _shut(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def _deadline(self, timeout_s: float | None) -> Iterator[None]:
        """End the connection when the time is over, however little the other end sends or takes meanwhile."""
        if timeout_s is None:
            yield
            return
        late = threading.Event()

        def end() -> None:
            late.set()
            self._shut()

        watch = threading.Timer(min(max(timeout_s, 0.001), _LONGEST_S), end)
        watch.daemon = True
        watch.start()
        try:
            yield
        except OSError as error:
            if late.is_set():
                raise TimeoutError(f"no answer within {timeout_s:g} s") from error
            raise
        finally:
            watch.cancel()
        if late.is_set():
            raise TimeoutError(f"no answer within {timeout_s:g} s")


class Listener:
    """Takes visitors at an address, each in a thread of its own, once they have proved the secret.

    Args:
        host: The address to listen at, and no other; "localhost" is the loopback.
        port: 0: a free one.
        key: The secret.
        attend: What to do with a visitor, of which it gets the channel and the host. True: the channel is kept, by whom
            it was given to; else it is closed afterwards.
        foreign: What to do with a visitor that says something else first (its first four bytes); True: drop it.

    Raises:
        OSError: The address is not this machine's, or taken.
    """

    def __init__(
        self,
        host: str,
        port: int,
        key: bytes,
        attend: Callable[[Channel, str], bool],
        foreign: Callable[[bytes], bool] = lambda first: False,
    ) -> None:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._server = socket.create_server(address[:2], family=family, backlog=4096)
        self.port: int = self._server.getsockname()[1]
        self._key, self._attend, self._foreign = key, attend, foreign
        self._channels: set[Channel] = set()
        self._is_closed = False
        self._lock = threading.Lock()
        self._strangers = threading.BoundedSemaphore(_MOST_STRANGERS)
        threading.Thread(target=self._serve, name=f"dualmesh listener {self.port}", daemon=True).start()

    def close(self) -> None:
        """Stop listening, and end all connections. *Local*; idempotent."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        with self._lock:
            channels, self._channels = self._channels, set()
        for channel in channels:
            channel.close()

    def _serve(self) -> None:
        while True:
            self._strangers.acquire()
            try:
                visitor, (host, *_) = self._server.accept()
                channel = Channel(visitor)
            except OSError:
                self._strangers.release()
                if self._is_closed:
                    return
                time.sleep(_PAUSE_S)  # the visitor has gone, or this process has no descriptor left
                continue
            with self._lock:
                self._channels.add(channel)
            arguments = channel, host.removeprefix("::ffff:")
            threading.Thread(target=self._receive, args=arguments, name="dualmesh visitor", daemon=True).start()

    def _receive(self, channel: Channel, host: str) -> None:
        is_kept = False
        try:
            try:
                is_foreign = self._foreign(channel.first_bytes(4, GREETING_S))
                if not is_foreign:
                    channel.examine(self._key, GREETING_S)
            finally:
                self._strangers.release()
            is_kept = not is_foreign and self._attend(channel, host)
        except OSError:
            pass  # it left, or was nobody's
        finally:
            with self._lock:
                self._channels.discard(channel)
            if not is_kept:
                channel.close()


def visit(host: str, port: int, key: bytes, timeout_s: float) -> Channel:
    """Return a channel to a listener that knows the secret. *Local*, with a timeout.

    Raises:
        ForeignError: Who listens there speaks another language, or does not know the secret.
        OSError: Nobody listens there, or does not answer.
    """
    deadline = time.monotonic() + min(max(timeout_s, 0.1), _LONGEST_S)
    channel = Channel(socket.create_connection((host, port), timeout=deadline - time.monotonic()))
    try:
        channel.prove(key, deadline - time.monotonic())
    except BaseException:
        channel.close()
        raise
    return channel


def route_to(host: str, port: int) -> str:
    """Return the address of this machine from which a host is reached. *Local*: nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as route:
        route.connect(address)
        found: str = route.getsockname()[0]
        return found


@contextlib.contextmanager
def _as_foreign() -> Iterator[None]:
    """Give what a stranger's words raise one class; who only closes the connection is no stranger yet."""
    try:
        yield
    except AuthenticationError as error:
        raise ForeignError("it does not know the key, or has another") from error
    except EOFError as error:
        raise ConnectionResetError("it closed the connection") from error
    except (AssertionError, ValueError, RecursionError) as error:
        raise ForeignError("it speaks another language") from error
    except OSError as error:
        if error.errno is None and not isinstance(error, ForeignError | TimeoutError):  # a length beyond the bound
            raise ForeignError(f"it speaks another language ({error})") from error
        raise


def _half(key: bytes, end: str) -> bytes:
    return hashlib.sha256(key + end.encode()).digest()
