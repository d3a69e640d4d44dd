"""Processes for faults: forked from one that has imported the framework and started nothing, several faults at once.

Every process ends in time or is killed: the outer watchdog of the faults.
"""

import contextlib
import json
import os
import select
import signal
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence

from tests.faults.fault import GRACE_S, Fault, Outcome
from tests.workers import free_port

START_S = 60.0
"""How long a world may take to start on a busy machine, and a process to end."""


class Running:
    """A fault that is being made: one process per rank."""

    def __init__(self, name: str, fault: Fault, port: int) -> None:
        self.name, self.fault = name, fault
        self.outcomes = {rank: Outcome() for rank in range(fault.world)}
        self._deadline = time.monotonic() + START_S + fault.timeout_s + GRACE_S
        self._files, self._pipes, self._pids = {}, {}, {}
        self._said: dict[int, bytes] = dict.fromkeys(self.outcomes, b"")
        self._hold, self._let_go = os.pipe()
        for rank in self.outcomes:
            self._files[rank] = tempfile.TemporaryFile()
            read, write = os.pipe()
            pid = os.fork()
            if not pid:
                _become(name, fault, rank, port, (write, self._hold), self._files[rank].fileno())
            os.close(write)
            self._pipes[rank], self._pids[rank] = read, pid

    def is_over(self) -> bool:
        """Look after the processes; tell whether all have ended. Those that are through stay until all are."""
        for rank, pipe in self._pipes.items():
            while select.select([pipe], [], [], 0)[0]:
                part = os.read(pipe, 1 << 16)
                if not part:
                    break
                self._said[rank] += part
        if self._let_go and all(self._said[rank].count(b"\n") == 2 for rank in self._pids):
            os.write(self._let_go, b"." * len(self.outcomes))
            os.close(self._let_go)
            self._let_go = 0
        for rank, pid in list(self._pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._note(rank, os.waitstatus_to_exitcode(status))
            elif time.monotonic() > self._deadline:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                self._note(rank, None)
        if self._pids:
            return False
        for end in filter(None, (self._hold, self._let_go)):
            os.close(end)
        return True

    def _note(self, rank: int, code: int | None) -> None:
        pid, outcome = self._pids.pop(rank), self.outcomes[rank]
        os.set_blocking(self._pipes[rank], False)
        try:
            self._said[rank] += os.read(self._pipes[rank], 1 << 20)
        except BlockingIOError:  # a process of its own still holds the pipe
            outcome.left = True
        os.close(self._pipes.pop(rank))
        self._files[rank].seek(0)
        errors = self._files.pop(rank).read().decode(errors="replace")
        if code is None:
            outcome.text = errors[-2000:]
            return
        start, _, answer = self._said[rank].partition(b"\n")
        if answer:
            vars(outcome).update(json.loads(answer), exit_code=code)
        else:
            outcome.kind, outcome.exit_code, outcome.text = "dies", code, errors[-4000:]
            outcome.seconds = time.monotonic() - float(start or "inf")
        try:
            os.killpg(pid, signal.SIGKILL)
            outcome.left = True
        except ProcessLookupError:
            pass


def made(faults: Mapping[str, Fault], names: Sequence[str], at_once: int) -> dict[str, dict[int, Outcome]]:
    """Make faults, some at once, and return how every rank of each ended."""
    warnings.simplefilter("ignore")  # forks of a process that imported much
    waiting, running, found = list(names), [], {}
    while waiting or running:
        while waiting and len(running) < at_once:
            name = waiting.pop(0)
            running.append(Running(name, faults[name], free_port()))
        for one in [one for one in running if one.is_over()]:
            running.remove(one)
            found[one.name] = one.outcomes
        time.sleep(0.02)
    return {name: found[name] for name in names}


def _become(name: str, fault: Fault, rank: int, port: int, pipes: tuple[int, int], errors: int) -> None:
    """Be a rank of a fault's world, in a process that was just forked; never returns."""
    try:
        os.setsid()
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        _live(fault, rank, port, *pipes)
    except BaseException as error:  # not a fault's own: the harness is broken
        os.write(2, f"{name}, rank {rank}: {error!r}".encode())
        os._exit(99)
    os._exit(0)


def _live(fault: Fault, rank: int, port: int, answers: int, hold: int) -> None:
    import dualmesh as dm

    method = f"tcp://127.0.0.1:{port}"
    if not fault.has_world:
        os.environ["DUALMESH_TIMEOUT_S"] = str(fault.timeout_s)
        os.environ["FAULT_ADDRESS"] = method
        with contextlib.suppress(BaseException), _told(fault, answers, hold):
            fault.body(rank)
        return
    more = {"local_devices": fault.devices} if fault.backend == "jax" else {}
    world = dm.session(fault.backend, rank=rank, world_size=fault.world, init_method=method, timeout_s=60.0, **more)
    with contextlib.suppress(BaseException), world:
        _met(fault)
        os.environ["DUALMESH_TIMEOUT_S"] = str(fault.timeout_s)
        if fault.debug:
            dm.debug()
        with _told(fault, answers, hold):
            fault.body(rank)


@contextlib.contextmanager
def _told(fault: Fault, answers: int, hold: int) -> Iterator[None]:
    """Tell how a block ended, then stay until all are through; what was raised goes on."""
    said: dict[str, object] = {"kind": "", "lineage": (), "text": ""}
    start = time.monotonic()  # one clock for all processes
    os.write(answers, f"{start}\n".encode())
    try:
        yield
    except BaseException as error:
        kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        notes = "".join(getattr(error, "__notes__", ()))
        said |= {"kind": kinds[0], "lineage": kinds, "text": f"{error}{notes}"}
        raise
    finally:
        os.write(answers, json.dumps(said | {"seconds": time.monotonic() - start}).encode() + b"\n")
        if not fault.leaves:
            os.read(hold, 1)


def _met(fault: Fault) -> None:
    """Let all ranks start the fault at about the same time."""
    if fault.backend == "torch":
        import torch.distributed as dist

        dist.barrier()
    else:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("fault")
