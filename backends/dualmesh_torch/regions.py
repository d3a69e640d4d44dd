"""Which scope code belongs to that torch's backward calls: rules, recomputes and hooks run in that of their forward.

Autograd numbers the nodes that a thread makes, so a scope is known by the numbers at its two ends. What is ambient is
kept by `dualmesh.runtime.scope`; what compiled code reads of it is in `scope`.
"""

import functools
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from dualmesh.backend.state import ParallelState
from dualmesh.errors import ScopeError, listed
from dualmesh.runtime import scope as core
from dualmesh.runtime.scope import Scope
from dualmesh_torch import private

_KEY = "dualmesh_scope"
_JOURNAL_KEY = "dualmesh_journal"
_KEPT = 2**16
Known = tuple[ParallelState, str]
"""A state, and the name that it was entered by."""
UNKNOWN = (
    "get_parallel_state: asked in a backward, by the hook or rule of the autograd node {node}, which sees the scope of "
    "its forward; but {why}. Say which state is meant: `with dm.use_parallel_state(...)` inside the hook or rule, "
    "dm.bind(hook) where the forward runs, or state=... of what it calls."
)


class Journal:
    """The scopes that one thread was in while it made autograd nodes, by the numbers of the nodes."""

    __slots__ = ("defaults", "ends", "least", "scopes")

    def __init__(self) -> None:
        self.scopes: list[Scope] = []
        """Scopes that were left, by the number of the next node then, which rises."""
        self.ends: list[int] = []
        self.defaults: list[tuple[int, Scope]] = []
        """What held outside any scope up to a number."""
        self.least = 0
        """The nodes below it are not known any more."""

    def add(self, scope: Scope, end: int) -> None:
        """Keep a scope that is left."""
        if len(self.ends) >= _KEPT:
            self.least = self.ends[_KEPT // 2 - 1]
            del self.ends[: _KEPT // 2], self.scopes[: _KEPT // 2]
        self.ends.append(end)
        self.scopes.append(scope)

    def find(self, number: int, current: Scope | None) -> Scope | None:
        """Return the innermost scope in which a node was made; `current` is open now; None outside any."""
        # The first one that was left after the node was made is the node's, or a sibling of it or of a scope around it.
        place = bisect_right(self.ends, number)
        found = self.scopes[place] if place < len(self.ends) else current
        while found is not None and found.made > number:
            found = found.before
        if found is None:
            found = next((scope for end, scope in self.defaults if number < end), None)
        return found

    def has(self, number: int) -> bool:
        """Tell whether a node of this number was made in one of the scopes that were left."""
        return bool(self.ends) and number < self.ends[-1] and self.find(number, None) is not None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.journal: Journal | None = None
        # Torch starts its worker threads itself, and Python knows them as dummies.
        self.is_worker = threading.current_thread().name.startswith("Dummy-")


_thread = _Thread()
_journals: deque[Journal] = deque(maxlen=64)
"""Those of threads that ended too, whose nodes may still run."""


def own_journal() -> Journal:
    """Return the journal of this thread; the worker threads of its backward() find it too. *Local.*"""
    journal = _thread.journal
    if journal is None:
        journal = _thread.journal = Journal()
        _journals.append(journal)
        if not _thread.is_worker:
            private.stash(_JOURNAL_KEY, journal)
    return journal


class WorkerMirror:
    """Carries the scope to the worker threads in which autograd runs backward on accelerators."""

    def enter(self, scope: Scope) -> Scope | None:
        own_journal()
        private.stash(_KEY, (threading.get_ident(), scope))
        return scope.outer

    def leave(self, held: Scope | None) -> None:
        private.stash(_KEY, None if held is None else (threading.get_ident(), held))

    def set_default(self, state: ParallelState | None) -> None:
        """Nothing to do: every thread sees the core's default."""

    def allow_apart(self, scope: Scope | None) -> None:
        """Accept it: a context's own scope is right for code that is not compiled."""


def carry_to_workers() -> None:
    """Let autograd's worker threads see the scope of what they run. *Local.*

    Costs nothing where there is no accelerator: there backward runs in the thread that calls it.
    """
    if torch.accelerator.is_available() and private.stash(_KEY, None):
        core.set_elsewhere(lambda: scope_of_node(_carried_scope()))
        core.add_mirror(WorkerMirror())


def _carried_scope() -> Scope | None:
    """Return the scope that was open where backward() was called, in a worker thread of autograd; else None."""
    found = private.find_stashed(_KEY)
    return None if found is None or found[0] == threading.get_ident() else found[1]


class TorchReplay:
    """What `dualmesh.runtime.scope` asks of torch's autograd."""

    def __init__(self) -> None:
        self.made = private.nodes_made()

    def note(self, scope: Scope) -> None:
        """Remember a scope that is left, in which nodes were made."""
        own_journal().add(scope, self.made())

    def note_default(self, scope: Scope) -> None:
        """Remember what held so far in this thread outside any scope."""
        own_journal().defaults.append((self.made(), scope))

    def find(self, scope: Scope | None) -> Scope | None:
        """Return the scope of the node that is running; `scope` is open where backward() was called."""
        return scope_of_node(scope)

    def forget(self) -> None:
        """Forget all scopes: their states ended."""
        forget_scopes()


def scope_of_node(scope: Scope | None) -> Scope | None:
    """Return the scope in which the node that is running was made, None for the default. *Local.*

    A leaf belongs to no forward: what it calls is in `scope`, which is open where backward() was called.

    Raises:
        ScopeError: It is not known.
    """
    node = private.running_node() if core.is_watched() else None
    number = None if node is None else private.number_of(node)
    if number is None:
        return scope
    if _thread.is_worker and core.this_thread.scope is None:  # its nodes are those of the thread that called backward()
        journal, current = private.find_stashed(_JOURNAL_KEY), scope
        if journal is None:
            return scope
        return _find_scope(node, number, journal, current)
    journal = own_journal()
    # Threads count apart, and a node does not say whose it is: all that may have made it must have been in one state.
    candidates = [other.find(number, None) for other in list(_journals) if other is not journal and other.has(number)]
    if number < private.nodes_made()():
        candidates.insert(0, _find_scope(node, number, journal, core.this_thread.scope))
    states = {_state_of(one): one for one in candidates}
    if len(states) > 1:
        names = listed(repr(core.default_name() if one is None else one.name) for one in candidates)
        raise _unknown(node, f"several threads may have made it, in different scopes ({names})")
    return candidates[0] if candidates else None


def _find_scope(node: Any, number: int, journal: Journal, current: Scope | None) -> Scope | None:
    if number < journal.least:
        raise _unknown(node, "the states of then were cleared, or it is too long ago")
    return journal.find(number, current)


def _state_of(scope: Scope | None) -> ParallelState | None:
    return core.default_state() if scope is None else scope.state


def _scope_of_now() -> Known | None:
    """Return the state and name of where a forward begins, for its rule or recompute; None where there is no state."""
    if core.this_thread.scope is core.read() is None and core.default_state() is None:
        return None
    try:
        scope = core.current_scope()
    except ScopeError:  # said where something asks, which the forward may not
        return None
    state = _state_of(scope)
    return None if state is None else (state, core.default_name() if scope is None else scope.name)


def _in_scope(known: Known, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with Scope(*known):
        return fn(*args, **kwargs)


def _bind(recompute: Callable[..., Any]) -> Callable[..., Any]:
    """Return the recompute of a checkpointed block, in the scope that is open now."""
    known = _scope_of_now()
    return recompute if known is None else functools.partial(_in_scope, known, recompute)


def forget_scopes() -> None:
    """Forget the scopes of all threads, whose states keep the groups of an ended world. *Local.*"""
    for journal in list(_journals):
        # How far another thread has counted is not known here; its last scope is where it was for sure.
        last = private.nodes_made()() if journal is _thread.journal else journal.ends[-1] if journal.ends else 0
        journal.least = max(journal.least, last)
        journal.ends.clear()
        journal.scopes.clear()
        journal.defaults.clear()


def _unknown(node: Any, why: str) -> ScopeError:
    return ScopeError(UNKNOWN.format(node=type(node).__name__, why=why), node=type(node).__name__)


def follow_backward() -> None:
    """Let rules, recomputes and hooks run in the scope of their forward, from now on. *Local.*"""
    if private.has_replay:
        core.set_replay(TorchReplay())
        private.wrap_backward(core.run_backward)
        private.wrap_rules(_scope_of_now, _in_scope)
        private.wrap_recomputes(_bind)
