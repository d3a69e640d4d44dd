"""Which state traced code runs in, told to what JAX runs on its behalf later: gradient rules, transposes, recomputes.

JAX traces such a rule when the gradient is taken, in whatever scope is open then. What `set_xla_metadata` holds is kept
with every operation that is traced under it, is set anew around whatever is derived from that operation, and is part of
what JAX's caches key on. So it holds the state's mark; XLA itself sees an attribute that it does not know. What JAX
knows of the ambient state otherwise is in `cache_keys` and `scope`.
"""

# mypy: allow-untyped-calls
# jax leaves some of its public functions unannotated.

from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakValueDictionary

from jax.experimental.xla_metadata import set_xla_metadata

from dualmesh.backend.state import ParallelState
from dualmesh.errors import ScopeError
from dualmesh.runtime import scope as core
from dualmesh.runtime.registry import registry
from dualmesh.runtime.scope import Scope
from dualmesh_jax.cache_keys import ScopeKey, key_of
from dualmesh_jax.private import (
    is_transforming,
    may_be_in_callback,
    may_have_started,
    runs_callback,
    set_xla_metadata_everywhere,
    xla_metadata,
)

KEY = "dualmesh_state"
GONE = (
    "get_parallel_state: this runs on behalf of code that was traced in the state {name!r}, a gradient rule say, and "
    "that state was cleared since. Trace it anew: call jax.vjp or jax.linearize again."
)
CALLBACK = (
    "get_parallel_state: this is a JAX callback (pure_callback, io_callback, debug.callback), which runs where no "
    "scope is known: the default may be another state than that of the code which called it. Bind the function where "
    "that code is traced, jax.pure_callback(dm.bind(fn), ...), or give state=."
)
# Marks are names, numbered where what had the name before meant something else: every process of a program gives the
# same ones, and a state that is registered again as it was takes its mark again, so that nothing is compiled anew.
_marks: dict[ScopeKey | None, str] = {}
_states: WeakValueDictionary[str, ParallelState] = WeakValueDictionary()
_names: dict[str, str] = {}
_given: dict[str, int] = {}


_unscoped: str | None = None
"""The mark of what is traced outside any scope: the default's, while several topologies are registered."""


def mark_default(state: ParallelState | None) -> None:
    """Mark what is traced outside any scope, in every thread, as that state's; None: it needs no mark. *Local.*

    Else its rules, traced when the gradient is taken, would be taken for code of the scope that is open then.
    """
    global _unscoped
    mark = None if state is None else (_marks.get(key_of(state)) or _mark(state))
    if mark is not None and state is not None:
        _states[mark] = state
    if mark != _unscoped:
        _unscoped = mark
        set_xla_metadata_everywhere(KEY, mark)


def region_to_mark(state: ParallelState) -> AbstractContextManager[Any] | None:
    """Return what marks all that is traced in it as the state's, None where no mark already means the state. *Local.*

    The process-wide default needs none while there is one topology: nothing else can be ambient later.
    """
    is_unmarked = not _given or xla_metadata(KEY) is None
    if state is core.default_state() and is_unmarked and not registry.has_several:
        return None
    return region_of(state)


def region_of(state: ParallelState) -> AbstractContextManager[Any]:
    """Return a context manager that marks all that is traced in it as the state's. *Local.*"""
    mark = _marks.get(key_of(state)) or _mark(state)
    if _states.get(mark) is not state:
        _states[mark] = state
    context: AbstractContextManager[Any] = set_xla_metadata(**{KEY: mark})
    return context


def _mark(state: ParallelState) -> str:
    name = state.names[0] if state.names else repr(state.topology)
    number = _given[name] = _given.get(name, 0) + 1
    mark = _marks[key_of(state)] = name if number == 1 else f"{name} ({number})"
    _names[mark] = name
    core.set_region(_here)
    return mark


def _here() -> Scope | None:
    """Return the scope of the region that this code was traced in, or is traced on behalf of.

    Raises:
        ScopeError: Its state is gone; or this is a callback that nobody bound, in a thread of XLA's.
    """
    mark, is_unscoped = xla_metadata(KEY), core.read() is None
    if is_unscoped and registry.has_several and may_be_in_callback() and runs_callback():
        raise ScopeError(CALLBACK)
    if mark is None or (is_unscoped and mark == _unscoped):
        return None
    if core.read() is not core.this_thread.scope and not (may_have_started() or is_transforming()):
        return None  # a block held open across an await, which is allowed there, has left its mark in the thread
    state = _states.get(mark)
    if state is None:
        raise ScopeError(GONE.format(name=_names.get(mark, mark)), name=_names.get(mark, mark))
    scope = core.read()
    if scope is not None and scope.state is state:
        return scope
    return Scope(state, state.names[0] if state.names else _names[mark])
