"""States that travel by pickle: what is sent, and what arrives.

A state stays what it is in its own process; elsewhere it arrives as a `DetachedState` (`detached_state`), which knows
sizes and ranks but holds no groups. A process that `multiprocessing` started for the sender, however (fork, spawn,
forkserver: a worker of a data loader), speaks for the sender's ranks. Copies within a process are the state itself.
"""

import multiprocessing
import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from dualmesh.backend.state import ParallelState
    from dualmesh.backend.state_plan import StatePlan

Origin = tuple[str, int]
"""The process that a state was built in, and its number there."""


class Held(NamedTuple):
    """The session ranks that a process spoke for when it sent a state."""

    ranks: tuple[int, ...]
    world_size: int
    holders: tuple[str, ...]
    """The processes that speak for them; so do those that they start as workers."""


_PROCESS = uuid4().hex
_numbers = count()
_states: "WeakValueDictionary[int, ParallelState]" = WeakValueDictionary()


def number_state(state: "ParallelState") -> int:
    """Return a number by which this process finds a state again. *Local.*"""
    number = next(_numbers)
    _states[number] = state
    return number


def pack_state(state: "ParallelState", number: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return how to unpickle a state: its names, its plan (the spec, resolved), its session and ranks. *Pure.*"""
    held = Held(state.world.local_ranks, state.world.size, (identify_process(),))
    return unpack_state, (tuple(state.names), state.plan, state.session_label, (_process(), number), held)


def unpack_state(
    names: tuple[str, ...], plan: "StatePlan", session: str, origin: Origin, held: Held | None = None
) -> "ParallelState":
    """Return the very state where it was built, else one that remembers its sizes and ranks. *Local.*"""
    from dualmesh.backend.detached_state import DetachedState  # a state, so it needs `state`, which needs this module

    process, number = origin
    found = _states.get(number) if process == _process() else None
    return DetachedState(names, plan, session, origin, held) if found is None else found


def speaks_for(held: Held) -> bool:
    """Tell whether this process, or the one that it is a worker of, is among those that speak for ranks. *Local.*"""
    parent = multiprocessing.parent_process()
    mine = [identify_process()] + ([] if parent is None or parent.pid is None else [identify_process(parent.pid)])
    return any(name in held.holders for name in mine)


def identify_process(pid: int | None = None) -> str:
    """Name a process of this machine (None: this one) so that another can see whether it is the one. *Local.*

    Numbers of processes are used again, also in the next run of a job; when it started tells two of them apart.
    """
    pid = os.getpid() if pid is None else pid
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # no Linux, or the process ended
        return f"{gethostname()}/{pid}"
    return f"{gethostname()}/{pid}/{after_name[19]}"


def _process() -> str:
    """Name this process; a fork is another one, though it has the same memory."""
    return f"{_PROCESS}-{os.getpid()}"
