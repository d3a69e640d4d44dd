"""Which state is ambient: one fact per execution context, mirrored where compiled and jitted code can read it.

Names and states are kept in `registry`; scopes around functions, coroutines and generators are in `wrap_steps`. Longer
than other modules, since entering a scope is fast only where the storages are this module's own variables.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from types import TracebackType
from typing import Any, ParamSpec, Protocol, TypeVar

from dualmesh._support.checks import function_of
from dualmesh.backend.state import ParallelState
from dualmesh.errors import ArgumentError, ScopeError, listed
from dualmesh.runtime.registry import registry
from dualmesh.runtime.single_process import single_process_state
from dualmesh.runtime.thread_check import WarningGiven, check_thread
from dualmesh.runtime.wrap_steps import wrap_callable

Params = ParamSpec("Params")
Result = TypeVar("Result")


class Scope:
    """One entered scope: a state, the name it was entered by, and the scope around it."""

    __slots__ = ("before", "held", "made", "name", "outer", "owner", "state")

    state: ParallelState
    name: str
    owner: object
    """The object that was entered, when it is another than the scope."""
    outer: "Scope | None"
    before: "Scope | None"
    """The scope that the thread was in before: another than `outer` where asyncio tasks take turns."""
    held: "_Held | None"
    """What mirrors need to leave; `_CLOSED` once a scope around it was left first."""
    made: int
    """How many steps of a backward the thread had recorded on entry; -1 where nobody counts (see `Replay`)."""

    def __init__(self, state: ParallelState, name: str, owner: object = None) -> None:
        self.state = state
        self.name = name
        self.owner = owner

    def __enter__(self) -> ParallelState:
        push(self)
        return self.state

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pop(self)


_Held = list[tuple[Callable[[Any], None], Any]]
_CLOSED: _Held = []


class ScopeMirror(Protocol):
    """A second place that must know the ambient state, because some code cannot read a ContextVar."""

    def enter(self, scope: Scope) -> Any:
        """Make `scope` what this place says, in this thread; return what `leave` needs."""

    def leave(self, held: Any) -> None:
        """Take the matching `enter` back."""

    def set_default(self, state: ParallelState | None) -> None:
        """Learn the state that holds where no scope is open, in every thread."""

    def allow_apart(self, scope: Scope | None) -> None:
        """Accept or refuse that a context is in `scope` while its thread, and so this place, is in another."""


class Replay(Protocol):
    """What a framework that runs code of a scope later, in a backward, knows of it.

    It numbers the steps that a thread records for the backward, so a scope is known by the numbers at its two ends.
    """

    made: Callable[[], int]
    """How many steps this thread has recorded."""

    def note(self, scope: Scope) -> None:
        """Remember a scope that is left, in which steps were recorded."""

    def find(self, scope: Scope | None) -> Scope | None:
        """Return the scope of the step that is running; `scope` is the one that is open where the backward runs."""

    def note_default(self, scope: Scope) -> None:
        """Remember what was recorded so far outside any scope as recorded in `scope`."""

    def forget(self) -> None:
        """Forget all scopes: their states ended."""


class ThreadMirror(threading.local):
    """The scope that a thread entered last, for compiled code, which cannot read a ContextVar."""

    def __init__(self) -> None:
        # Set here and not on the class: torch.compile does not guard a class-level default, and would keep its answer.
        self.scope: Scope | None = None


_CURRENT: ContextVar[Scope | None] = ContextVar("dualmesh_scope", default=None)
# Compiled code cannot run these and `hold`: there the torch backend puts the thread's mirror in their place. Its
# `write` returns None, since the mirror is then written.
read = _CURRENT.get
write: Callable[[Scope | None], object] = _CURRENT.set
this_thread = ThreadMirror()
_mirrors: tuple[ScopeMirror, ...] = ()
_elsewhere: Callable[[], Scope | None] | None = None
_find_region: Callable[[], Scope | None] | None = None
_replay: Replay | None = None
# `_replay.made`, once several states are registered: entering a scope is in the inner loop of programs.
_made: Callable[[], int] | None = None
_BACKWARD = object()
"""Owner of what says in a thread that a backward runs."""
_explain: Callable[[BaseException], None] | None = None
_default: ParallelState | None = None
_default_name = "base"
_named = registry.named
_lock = threading.RLock()


def get_parallel_state() -> ParallelState:
    """Return the ambient state: the innermost scope's, else the process-wide default. *Local.*

    Before any state is registered this is a single-process state, with one warning.

    Raises:
        ScopeError: In strict mode: this is a thread that entered no scope, and two or more topologies are registered
            (else one warning). Once JAX runs: the context is in another scope than its thread, since a `with` block was
            held open across an await, or the context was copied to where it was not entered. In a backward, which
            sees the scope of the forward: that scope is not known any more.
    """
    scope = read()
    if scope is not this_thread.scope:
        scope = _apart(scope)
    elif scope is None and _elsewhere is not None:
        scope = _elsewhere()
    if _find_region is not None:
        scope = region() or scope
    if scope is not None:
        return scope.state
    if registry.has_several and _default is not None:
        check_thread(_default_name)
    return _default if _default is not None else before_init()


def before_init() -> ParallelState:
    """Return the state that holds before any init: of a single process, with one warning. *Local.*"""
    return single_process_state()


def scope_name() -> str | None:
    """Return the name by which the ambient state was entered, the default's name, or None before any init. *Local.*

    Code that was compiled for a state keeps the name that it was compiled under, where two names share one state.
    """
    scope = current_scope()
    if scope is not None:
        return scope.name
    return _default_name if _default is not None else None


def current_scope() -> Scope | None:
    """Return the innermost scope of this execution context, or None. *Local.*"""
    scope = read()
    if scope is not this_thread.scope:
        scope = _apart(scope)
    elif scope is None and _elsewhere is not None:
        scope = _elsewhere()
    if _find_region is not None:
        scope = region() or scope
    return scope


def region() -> Scope | None:
    """Return the scope of the traced code on whose behalf this runs: a gradient rule is traced after it. *Local.*

    None where this is not so, and in code that torch compiles.
    """
    return None if _find_region is None else _find_region()


def _apart(scope: Scope | None) -> Scope | None:
    """Return the scope of a context whose thread says another: since a backward runs, or since it was copied."""
    thread = this_thread.scope
    if thread is not None and getattr(thread, "owner", None) is _BACKWARD and thread.outer is scope:
        return scope if _replay is None else _replay.find(scope)
    for mirror in _mirrors:
        mirror.allow_apart(scope)
    return scope


def run_backward(run: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs) -> Result:
    """Call what runs a backward in this thread, such that code it calls sees the scope of its forward. *Local.*

    Asking for the scope costs nothing where none runs: context and thread disagree in here, and that is looked at.
    """
    outer, scope = this_thread.scope, read()
    state = _default if scope is None else scope.state
    if _made is None or state is None or (outer is not scope and getattr(outer, "owner", None) is not _BACKWARD):
        return run(*args, **kwargs)
    mark = Scope(state, _default_name if scope is None else scope.name, _BACKWARD)
    mark.outer, mark.before, mark.held, mark.made = scope, outer, None, _made()
    this_thread.scope = mark
    try:
        return run(*args, **kwargs)
    finally:
        this_thread.scope = outer


def push(scope: Scope) -> None:
    """Enter a scope; every storage knows it, or none does when one refuses. *Local.*"""
    scope.outer = read()
    scope.before = this_thread.scope
    scope.held = None
    if _mirrors:
        hold(scope)
    if write(scope) is not None:
        this_thread.scope = scope
        scope.made = -1 if _made is None else _made()


def _note(scope: Scope) -> None:
    """Remember a scope that was left, if something was recorded in it."""
    if _replay is not None and _made is not None and _made() != scope.made:
        _replay.note(scope)


def pop(scope: Scope) -> None:
    """Leave a scope. *Local.*

    Raises:
        ScopeError: Scopes inside it are still open (they are closed first), or it belongs to another thread or task.
    """
    if read() is not scope:
        _pop_out_of_order(scope)
        return
    if this_thread.scope is not scope:
        _pop_from_below(scope)
        return
    if scope.held is not None:
        release(scope)
    if write(scope.outer) is not None:
        this_thread.scope = scope.before
        _note(scope)


def hold(scope: Scope) -> None:
    """Tell the mirrors that a scope is entered, all or none. *Local.*"""
    scope.held = []
    try:
        for mirror in _mirrors:
            scope.held.append((mirror.leave, mirror.enter(scope)))
    except BaseException:
        release(scope)
        raise


def release(scope: Scope) -> None:
    """Tell the mirrors that a scope is left. *Local.*"""
    held, scope.held = scope.held, None
    while held:
        leave, token = held.pop()
        leave(token)


def _pop_out_of_order(scope: Scope) -> None:
    if scope.held is _CLOSED:
        return
    inner = []
    found = read()
    while found is not None and found is not scope:
        inner.append(found)
        found = found.outer
    if found is None:
        raise _entered_elsewhere(scope)
    for open_scope in (*inner, scope):
        pop(open_scope)
        open_scope.held = _CLOSED
    names = ", ".join(repr(open_scope.name) for open_scope in inner)
    raise ScopeError(
        f"use_parallel_state: the scope {scope.name!r} is left while scopes inside it are open ({names}). They are "
        f"closed now; leave scopes in reverse order, best with nested `with` blocks.",
        name=scope.name,
        inner=tuple(open_scope.name for open_scope in inner),
    )


def _pop_from_below(scope: Scope) -> None:
    """Leave a scope while the thread is in scopes that other tasks entered after it; those stay."""
    above = []
    found = this_thread.scope
    while found is not None and found is not scope:
        above.append(found)
        found = found.before
    if found is None:
        raise _entered_elsewhere(scope)
    for open_scope in (*above, scope):
        release(open_scope)
    this_thread.scope = scope.before
    for open_scope in reversed(above):
        open_scope.before = this_thread.scope
        hold(open_scope)
        this_thread.scope = open_scope
    write(scope.outer)
    _note(scope)


def _entered_elsewhere(scope: Scope) -> ScopeError:
    return ScopeError(
        f"use_parallel_state: the scope {scope.name!r} is left in a thread or task that did not enter it. Enter "
        f"and leave it in one, or carry it across with dm.bind.",
        name=scope.name,
    )


class use_parallel_state(Scope):
    """Make a state ambient inside a `with` block or a decorated function. *Local.*

    Restores on exit, also when the body raises. As a decorator it wraps functions, coroutines, generators and
    asynchronous generators, re-entering around every step of the latter three; the name is looked up at call time.

    Args:
        name_or_state: A registered name or a state.

    Raises:
        UnknownStateError: The name is not registered.
        ScopeError: Scopes are left out of order; everything is put right first.
    """

    __slots__ = ("_fresh", "_last", "_target")

    def __init__(self, name_or_state: str | ParallelState) -> None:
        self._target = name_or_state
        self._fresh = [True]

    def __enter__(self) -> ParallelState:
        # The object is itself the first scope that it enters; popping claims it in one thread only.
        try:
            self._fresh.pop()
        except IndexError:
            return self._enter_again()
        name: Any = self._target
        state = _named.get(name) if name.__class__ is str else None
        if state is None:
            state, name = _state_and_label(name)
        self.state = state
        self.name = name
        self.outer = read()
        self.before = this_thread.scope
        self.held = None
        if _mirrors:
            hold(self)
        if write(self) is not None:
            this_thread.scope = self
            self.made = -1 if _made is None else _made()
        return state

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and _explain is not None:
            _explain(error)
        if read() is not self or this_thread.scope is not self:
            self._leave(error)
            return
        if self.held is not None:
            release(self)
        if write(self.outer) is not None:
            this_thread.scope = self.before
            if _made is not None and _made() != self.made:
                _note(self)

    def _enter_again(self) -> ParallelState:
        """Enter a scope of its own: the object was entered before, here or in another thread or task."""
        state, name = _state_and_label(self._target)
        self._last = Scope(state, name, self)
        push(self._last)
        return state

    def _leave(self, error: BaseException | None) -> None:
        """Leave the innermost scope that this object entered in this thread or task."""
        scope = read()
        while scope is not None and scope is not self and getattr(scope, "owner", None) is not self:
            scope = scope.outer
        try:
            pop(scope if scope is not None else getattr(self, "_last", self))
        except ScopeError as disorder:
            if error is None:
                raise
            error.add_note(str(disorder))

    def __call__(self, fn: Callable[Params, Result]) -> Callable[Params, Result]:
        target = self._target
        return wrap_callable(fn, lambda: use_parallel_state(target))


def _state_and_label(target: Any) -> tuple[ParallelState, str]:
    """Return the state that a name or a state means, and how messages call it."""
    if isinstance(target, ParallelState):
        return target, target.names[0] if target.names else repr(target.topology)
    if type(target) is str:
        return registry.get(target), target
    raise ArgumentError(
        f"use_parallel_state: {target!r} is no state. Give a state or a registered name: {listed(registry.names())}.",
        target=target,
    )


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
    function_of("bind", fn)
    state, name = get_parallel_state(), scope_name() or "solo"
    return wrap_callable(fn, lambda: Scope(state, name))


def set_default(state: ParallelState | None, name: str = "base") -> None:
    """Set the state that holds where no scope is open, in every thread. *Local.*"""
    global _default, _default_name
    with _lock:
        if _replay is not None and _made is not None and _default not in (None, state):
            _replay.note_default(Scope(_default, _default_name))
        _default, _default_name, WarningGiven.once = state, name, False
        for mirror in _mirrors:
            mirror.set_default(state)


def default_state() -> ParallelState | None:
    """Return the process-wide default, or None before any init. *Local.*"""
    return _default


def default_name() -> str:
    """Return the name of the process-wide default. *Local.*"""
    return _default_name


def is_watched() -> bool:
    """Tell whether scopes are remembered for a backward: several states are registered. *Local.*"""
    return _made is not None


def set_elsewhere(find: Callable[[], Scope | None]) -> None:
    """Let `find` say which scope a thread is in that entered none: a framework's worker thread. *Local.*"""
    global _elsewhere
    _elsewhere = find


def set_region(find: Callable[[], Scope | None]) -> None:
    """Let `find` say in which scope the code was traced on whose behalf this runs, where it was in one. *Local.*"""
    global _find_region
    _find_region = find


def set_replay(replay: Replay) -> None:
    """Let `replay` say in which scope code runs that a backward calls, once several states are registered. *Local.*"""
    global _replay
    _replay = replay
    watch_backward()


def watch_backward() -> None:
    """Remember from now on which scopes a backward comes back to, where several states are registered. *Local.*

    With one there is nothing to mix up, and nothing to pay. Once started it goes on: what was recorded may run later.
    """
    global _made
    for mirror in _mirrors:
        mirror.set_default(_default)
    if _replay is not None and (len(_named) > 1 or len(registry.states()) > 1):
        _made = _replay.made


def set_explainer(explain: Callable[[BaseException], None]) -> None:
    """Let `explain` add notes to a framework's errors that leave a scope. *Local.*"""
    global _explain
    _explain = explain


def add_mirror(mirror: ScopeMirror) -> None:
    """Keep one more storage in step from now on, the open scopes of this thread included. *Local.*"""
    global _mirrors
    with _lock:
        if mirror in _mirrors:
            return
        mirror.set_default(_default)
        chain = []
        scope = this_thread.scope
        while scope is not None:
            chain.append(scope)
            scope = scope.before
        for scope in reversed(chain):
            scope.held = [*(scope.held or []), (mirror.leave, mirror.enter(scope))]
        _mirrors = (*_mirrors, mirror)


def close_all() -> None:
    """Leave every scope of this execution context and forget the default. *Local.*"""
    scope = read()
    while scope is not None:
        pop(scope)
        scope.held = _CLOSED
        scope = read()
    set_default(None)
    if _replay is not None:
        _replay.forget()


_AS_IT_IS: AbstractContextManager[None] = nullcontext()


def resolve_state(where: str, state: ParallelState | None) -> ParallelState:
    """Return the state given, or the ambient one for None. *Local.*

    Raises:
        ArgumentError: What was given is no state.
    """
    if state is None:
        return get_parallel_state()
    if isinstance(state, ParallelState):
        return state
    by_name = f"dm.get_parallel_state_by_name({state!r})"
    cure = by_name if isinstance(state, str) else "what dm.init_parallel_state returned"
    raise ArgumentError(f"{where}: state={state!r} is no state. Give {cure}, or None for the ambient one.", state=state)


def scope_of(state: ParallelState | None) -> AbstractContextManager[object]:
    """Return the scope of a state given, for what a user's function asks; None leaves the ambient one. *Local.*"""
    return _AS_IT_IS if state is None else use_parallel_state(state)
