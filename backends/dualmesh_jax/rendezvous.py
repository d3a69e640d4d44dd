"""Processes wait for each other before JAX joins them, so that who is missing is said.

JAX itself would end a process whose peers do not come, without an exception (`client.h: Terminating process`). The
meeting is at the coordinator's address, which process 0 leaves to JAX afterwards.
"""

import contextlib
import threading
import time
from collections.abc import Callable

from dualmesh._support.channel import GREETING_S, Channel, ForeignError, Listener, visit
from dualmesh.errors import SessionError, listed

_KEY = b"dualmesh"
"""No secret: JAX's own port, at the same address, has none either."""
_PAUSE_S = 0.05
_PATIENCE_S = 5.0
_LONGEST_GREETING = 4096


def meet(address: str, rank: int, count: int, timeout_s: float) -> None:
    """Return once all processes are here. *Collective over all processes, with a timeout.*

    Where a peer speaks another language at that address, it is JAX's, which joins by itself: nothing to wait for.

    Args:
        address: host:port, at which process 0 listens.
        rank: This process.
        count: How many processes there are.
        timeout_s: How long to wait for the others, in seconds.

    Raises:
        SessionError: Some did not come in time (the message names them), or the port is taken.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise SessionError(f"Backend 'jax': {address!r} is no address. Give 'tcp://host:port'.", address=address)
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        _receive(host.strip("[]"), int(port), count, deadline, timeout_s)
    else:
        _visit(host.strip("[]"), int(port), rank, deadline, timeout_s)


def _receive(host: str, port: int, count: int, deadline: float, timeout_s: float) -> None:
    """Wait for the others as process 0, then tell them to go on, or who is missing."""
    here: dict[int, Channel] = {}
    moved, joined_without = threading.Condition(), threading.Event()

    def is_jax(first: bytes) -> bool:
        """Note JAX's client, of a process that joins without dualmesh."""
        with moved:
            if first == b"PRI ":
                joined_without.set()
            moved.notify_all()
        return first == b"PRI "

    def attend(channel: Channel, _: str) -> bool:
        number = channel.hear(GREETING_S, _LONGEST_GREETING)
        if type(number) is not int or not 0 < number < count:
            return False
        with moved:
            replaced, here[number] = here.get(number), channel
            moved.notify_all()
        if replaced is not None:  # the process started anew
            replaced.close()
        return True

    with contextlib.closing(_listener(host, port, attend, is_jax)), moved:
        is_over = moved.wait_for(
            lambda: joined_without.is_set() or len(here) == count - 1, max(deadline - time.monotonic(), 0.0)
        )
        missing = [] if is_over else sorted(set(range(1, count)) - set(here))
        came = list(here.values())
    for channel in came:
        with contextlib.suppress(OSError):
            channel.say(missing, _PATIENCE_S)
        channel.close()
    if missing:
        raise _absent(missing, count, timeout_s)


def _visit(host: str, port: int, rank: int, deadline: float, timeout_s: float) -> None:
    """Tell process 0 that this one is here, and wait for its answer."""
    while time.monotonic() < deadline:
        try:
            channel = visit(host, port, _KEY, min(_PATIENCE_S, deadline - time.monotonic()))
        except ForeignError:
            return  # JAX itself listens there: it joins without dualmesh
        except OSError:
            time.sleep(_PAUSE_S)
            continue
        with contextlib.closing(channel), contextlib.suppress(OSError):
            channel.say(rank, _PATIENCE_S)
            missing = channel.hear(max(deadline - time.monotonic(), 0) + _PATIENCE_S)
            if missing:
                raise _absent(missing, None, timeout_s)
            return
        time.sleep(_PAUSE_S)
    raise SessionError(
        f"Backend 'jax': process {rank} did not reach process 0 at {host}:{port} within {timeout_s:g} s. Start process "
        f"0, with this address, and let this host reach it.",
        missing=(0,),
    )


def _listener(
    host: str, port: int, attend: Callable[[Channel, str], bool], is_jax: Callable[[bytes], bool]
) -> Listener:
    try:
        return Listener(host, port, _KEY, attend, is_jax)
    except OSError as error:
        raise SessionError(
            f"Backend 'jax': process 0 cannot listen at {host}:{port}: {error}. torchrun and torch hold MASTER_PORT, "
            f"and JAX takes the next one. Give a free one: init_method='tcp://host:port', or "
            f"JAX_COORDINATOR_ADDRESS=host:port.",
            port=port,
        ) from error


def _absent(missing: list[int], count: int | None, timeout_s: float) -> SessionError:
    noun = "process" if len(missing) == 1 else "processes"
    of = "" if count is None else f" of {count}"
    return SessionError(
        f"Backend 'jax': {noun} {listed(missing)}{of} did not come within {timeout_s:g} s. Start all of them, with the "
        f"same address and number of processes; timeout_s of dm.init_distributed or DUALMESH_TIMEOUT_S say how long "
        f"to wait.",
        missing=tuple(missing),
    )
