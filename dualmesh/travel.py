"""States that travel by pickle: what is sent, and what arrives.

A state stays what it is in its own process; elsewhere it arrives as a `RememberedState` (`remembered`), which knows
sizes and ranks but holds no groups. Copies within a process are the state itself.
"""

import os
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any
from uuid import uuid4
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from dualmesh.state import ParallelState
    from dualmesh.state_plan import StatePlan

Origin = tuple[str, int]
"""The process that a state was built in, and its number there."""

_PROCESS = uuid4().hex
_numbers = count()
_states: "WeakValueDictionary[int, ParallelState]" = WeakValueDictionary()


def numbered(state: "ParallelState") -> int:
    """Return a number by which this process finds a state again. *Local.*"""
    number = next(_numbers)
    _states[number] = state
    return number


def packed(state: "ParallelState", number: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return how to unpickle a state: its names, its plan (the spec, resolved), its session. *Pure.*"""
    return unpacked, (tuple(state.names), state.plan, state.session_words, (_process(), number))


def unpacked(names: tuple[str, ...], plan: "StatePlan", session: str, origin: Origin) -> "ParallelState":
    """Return the very state where it was built, else one that remembers its sizes and ranks. *Local.*"""
    from dualmesh.remembered import RememberedState  # a state, so it needs `state`, which needs this module

    process, number = origin
    found = _states.get(number) if process == _process() else None
    return RememberedState(names, plan, session, origin) if found is None else found


def _process() -> str:
    """Name this process; a fork is another one, though it has the same memory."""
    return f"{_PROCESS}-{os.getpid()}"
