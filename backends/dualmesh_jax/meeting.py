"""Processes wait for each other before JAX joins them, so that who is missing is said.

JAX itself would end a process whose peers do not come, without an exception (`client.h: Terminating process`). The
meeting is at the coordinator's address, which process 0 leaves to JAX afterwards.
"""

import contextlib
import socket
import time

from dualmesh.errors import SessionError, listed

_HELLO, _GO, _MISSING = b"dualmesh process ", b"dualmesh go\n", b"dualmesh misses "
_PAUSE_S = 0.05
_PATIENCE_S = 5.0
_LINE = 4096


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
        _receive(int(port), count, deadline, timeout_s)
    else:
        _visit(host.strip("[]"), int(port), rank, deadline, timeout_s)


def _receive(port: int, count: int, deadline: float, timeout_s: float) -> None:
    """Wait for the others as process 0, then tell them to go on, or who is missing."""
    here: dict[int, socket.socket] = {}
    with _listening(port) as server, contextlib.ExitStack() as open_sockets:
        while len(here) < count - 1 and time.monotonic() < deadline:
            server.settimeout(max(deadline - time.monotonic(), _PAUSE_S))
            try:
                visitor = open_sockets.enter_context(server.accept()[0])
            except TimeoutError:
                break
            said = _line(visitor, _PATIENCE_S)
            number = said.removeprefix(_HELLO).strip()
            if said.startswith(_HELLO) and number.isdigit():
                here[int(number)] = visitor
            elif said.startswith(b"PRI "):  # JAX's client, of a process that joins without dualmesh
                return
        missing = sorted(set(range(1, count)) - set(here))
        answer = _MISSING + ",".join(map(str, missing)).encode() + b"\n" if missing else _GO
        for visitor in here.values():
            with contextlib.suppress(OSError):
                visitor.sendall(answer)
    if missing:
        raise _absent(missing, count, timeout_s)


def _visit(host: str, port: int, rank: int, deadline: float, timeout_s: float) -> None:
    """Tell process 0 that this one is here, and wait for its answer."""
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=_PATIENCE_S) as door:
            door.sendall(_HELLO + str(rank).encode() + b"\n")
            answer = _line(door, max(deadline - time.monotonic(), 0) + _PATIENCE_S)
            if answer.startswith(_MISSING):
                missing = [int(part) for part in answer[len(_MISSING) :].split(b",")]
                raise _absent(missing, None, timeout_s)
            if answer:
                return
        time.sleep(_PAUSE_S)
    raise SessionError(
        f"Backend 'jax': process {rank} did not reach process 0 at {host}:{port} within {timeout_s:g} s. Start process "
        f"0, with this address, and let this host reach it.",
        missing=(0,),
    )


def _listening(port: int) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise SessionError(
            f"Backend 'jax': process 0 cannot listen on port {port}: {error}. torchrun and torch hold MASTER_PORT, and "
            f"JAX takes the next one. Give a free one: init_method='tcp://host:port', or "
            f"JAX_COORDINATOR_ADDRESS=host:port.",
            port=port,
        ) from error


def _line(peer: socket.socket, patience_s: float) -> bytes:
    """Return what a peer says up to a line's end, or nothing where it says nothing in time."""
    peer.settimeout(patience_s)
    said = b""
    with contextlib.suppress(OSError):
        while b"\n" not in said and len(said) < _LINE:
            part = peer.recv(_LINE)
            if not part:
                break
            said += part
            if not b"dualmesh".startswith(said[:8]):
                break
    return said


def _absent(missing: list[int], count: int | None, timeout_s: float) -> SessionError:
    noun = "process" if len(missing) == 1 else "processes"
    of = "" if count is None else f" of {count}"
    return SessionError(
        f"Backend 'jax': {noun} {listed(missing)}{of} did not come within {timeout_s:g} s. Start all of them, with the "
        f"same address and number of processes; timeout_s of dm.init_distributed or DUALMESH_TIMEOUT_S say how long "
        f"to wait.",
        missing=tuple(missing),
    )
