"""Which state is ambient: one fact per execution context, mirrored where compiled and jitted code can read it.

Names and states are kept in `registry`; scopes around functions, coroutines and generators are in `stepping`.
"""

import threading
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Any, ParamSpec, Protocol, TypeVar

from dualmesh.errors import ArgumentError, ScopeError, listed
from dualmesh.registry import registry
from dualmesh.solo import solo_state
from dualmesh.state import ParallelState
from dualmesh.stepping import scoped_callable

Params = ParamSpec("Params")
Result = TypeVar("Result")


class Scope:
    """One entered scope: a state, the name it was entered by, and the scope around it."""

    __slots__ = ("closed", "held", "name", "outer", "owner", "state")

    def __init__(self, state: ParallelState, name: str, outer: "Scope | None", owner: object) -> None:
        self.state = state
        self.name = name
        self.outer = outer
        self.owner = owner
        self.held: list[tuple[Callable[[Any], None], Any]] | None = None
        self.closed = False


class ScopeMirror(Protocol):
    """A second place that must know the ambient state, because some code cannot read a ContextVar."""

    def enter(self, scope: Scope) -> Any:
        """Make `scope` what this place says, in this thread; return what `leave` needs."""

    def leave(self, held: Any) -> None:
        """Take the matching `enter` back."""

    def set_default(self, state: ParallelState | None) -> None:
        """Learn the state that holds where no scope is open, in every thread."""


_CURRENT: ContextVar[Scope | None] = ContextVar("dualmesh_scope", default=None)
_current = _CURRENT.get
_default: ParallelState | None = None
_default_name = "base"
_mirrors: tuple[ScopeMirror, ...] = ()
_elsewhere: Callable[[], Scope | None] | None = None
_lock = threading.RLock()


def get_parallel_state() -> ParallelState:
    """Return the ambient state: the innermost scope's, else the process-wide default. *Local.*

    Before any state is registered this is a single-process state, with one warning.
    """
    scope = current_scope() if _elsewhere is not None else _current()
    if scope is not None:
        return scope.state
    return _default if _default is not None else solo_state()


def scope_name() -> str | None:
    """Return the name by which the ambient state was entered, the default's name, or None before any init. *Local.*"""
    scope = current_scope()
    return scope.name if scope is not None else default_name()


def current_scope() -> Scope | None:
    """Return the innermost scope of this execution context, or None. *Local.*"""
    scope = _current()
    return scope if scope is not None or _elsewhere is None else _elsewhere()


def push(state: ParallelState, name: str, owner: object = None) -> Scope:
    """Enter a scope; every storage knows it, or none does when one refuses. *Local.*"""
    scope = Scope(state, name, _current(), owner)
    if _mirrors:
        held: list[tuple[Callable[[Any], None], Any]] = []
        scope.held = held
        try:
            for mirror in _mirrors:
                held.append((mirror.leave, mirror.enter(scope)))
        except BaseException:
            _release(scope)
            raise
    _CURRENT.set(scope)
    return scope


def pop(scope: Scope) -> None:
    """Leave a scope. *Local.*

    Raises:
        ScopeError: Scopes inside it are still open (they are closed first), or it belongs to another thread or task.
    """
    if _current() is not scope:
        _pop_out_of_order(scope)
        return
    scope.closed = True
    if scope.held is not None:
        _release(scope)
    _CURRENT.set(scope.outer)


def _release(scope: Scope) -> None:
    held = scope.held or []
    scope.held = None
    while held:
        leave, token = held.pop()
        leave(token)


def _pop_out_of_order(scope: Scope) -> None:
    if scope.closed:
        return
    inner = []
    found = _current()
    while found is not None and found is not scope:
        inner.append(found)
        found = found.outer
    if found is None:
        raise ScopeError(
            f"use_parallel_state: the scope {scope.name!r} is left in a thread or task that did not enter it. Enter "
            f"and leave it in one, or carry it across with dm.bind.",
            name=scope.name,
        )
    for open_scope in (*inner, scope):
        pop(open_scope)
    names = ", ".join(repr(open_scope.name) for open_scope in inner)
    raise ScopeError(
        f"use_parallel_state: the scope {scope.name!r} is left while scopes inside it are open ({names}). They are "
        f"closed now; leave scopes in reverse order, best with nested `with` blocks.",
        name=scope.name,
        inner=tuple(open_scope.name for open_scope in inner),
    )


class use_parallel_state:
    """Make a state ambient inside a `with` block or a decorated function. *Local.*

    Restores on exit, also when the body raises. As a decorator it wraps functions, coroutines, generators and
    asynchronous generators, re-entering around every step of the latter three; the name is looked up at call time.

    Args:
        name_or_state: A registered name or a state.

    Raises:
        UnknownStateError: The name is not registered.
        ScopeError: Scopes are left out of order; everything is put right first.
    """

    __slots__ = ("_last", "_target")

    def __init__(self, name_or_state: str | ParallelState) -> None:
        self._target = name_or_state
        self._last: Scope | None = None

    def __enter__(self) -> ParallelState:
        target = self._target
        if type(target) is str:
            scope = push(registry.get(target), target, self)
        elif isinstance(target, ParallelState):
            scope = push(target, target.names[0] if target.names else repr(target.topology), self)
        else:
            raise ArgumentError(
                f"use_parallel_state: {target!r} is no state. Give a state or a registered name: "
                f"{listed(registry.names())}.",
                target=target,
            )
        self._last = scope
        return scope.state

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        scope = self._own(current_scope())
        if scope is None:
            return
        if error is None:
            pop(scope)
            return
        try:
            pop(scope)
        except ScopeError as disorder:
            error.add_note(str(disorder))

    def _own(self, scope: Scope | None) -> Scope | None:
        """Find the innermost scope that this object entered in this thread or task; one object may serve many."""
        while scope is not None and scope.owner is not self:
            scope = scope.outer
        return scope if scope is not None else self._last

    def __call__(self, fn: Callable[Params, Result]) -> Callable[Params, Result]:
        target = self._target
        return scoped_callable(fn, lambda: use_parallel_state(target))


class _Bound:
    """A scope with a fixed state and name, entered anew each time."""

    __slots__ = ("_name", "_scope", "_state")

    def __init__(self, state: ParallelState, name: str) -> None:
        self._state = state
        self._name = name

    def __enter__(self) -> None:
        self._scope = push(self._state, self._name)

    def __exit__(self, *exc: object) -> None:
        pop(self._scope)


def bind(fn: Callable[Params, Result]) -> Callable[Params, Result]:
    """Return `fn` bound to the ambient state of now, for another thread, a callback or a recompute. *Local.*

    >>> import threading, dualmesh as dm
    >>> with dm.session(backend="sim", world_size=2):
    ...     base = dm.init_parallel_state(dp_size=2)
    ...     other = dm.init_parallel_state(tp_size=2, name="other")
    ...     with dm.use_parallel_state("other"):
    ...         answer = dm.bind(lambda: dm.scope_name())
    ...     answer()
    'other'
    """
    state, name = get_parallel_state(), scope_name() or "solo"
    return scoped_callable(fn, lambda: _Bound(state, name))


def set_default(state: ParallelState | None, name: str = "base") -> None:
    """Set the state that holds where no scope is open, in every thread. *Local.*"""
    global _default, _default_name
    with _lock:
        _default, _default_name = state, name
        for mirror in _mirrors:
            mirror.set_default(state)


def default_state() -> ParallelState | None:
    """Return the process-wide default, or None before any init. *Local.*"""
    return _default


def default_name() -> str | None:
    """Return the name of the process-wide default, or None before any init. *Local.*"""
    return _default_name if _default is not None else None


def set_elsewhere(find: Callable[[], Scope | None]) -> None:
    """Let `find` say which scope a thread is in that entered none: a framework's worker thread. *Local.*"""
    global _elsewhere
    _elsewhere = find


def add_mirror(mirror: ScopeMirror) -> None:
    """Keep one more storage in step from now on, the open scopes of this context included. *Local.*"""
    global _mirrors
    with _lock:
        if mirror in _mirrors:
            return
        mirror.set_default(_default)
        chain = []
        scope = _current()
        while scope is not None:
            chain.append(scope)
            scope = scope.outer
        for scope in reversed(chain):
            scope.held = [*(scope.held or []), (mirror.leave, mirror.enter(scope))]
        _mirrors = (*_mirrors, mirror)


def close_all() -> None:
    """Leave every scope of this execution context and forget the default. *Local.*"""
    scope = _current()
    while scope is not None:
        pop(scope)
        scope = _current()
    set_default(None)
