"""The scope where torch cannot read a ContextVar: compiled code, autograd's worker threads, recomputed activations.

The fact itself is kept in `dualmesh.scope`; this module mirrors it and replaces its readers in compiled code.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils import checkpoint as checkpointing

from dualmesh import scope as core
from dualmesh.scope import Scope
from dualmesh.solo import solo_state
from dualmesh.state import ParallelState
from dualmesh_torch import private

_KEY = "dualmesh_scope"


class _Thread(threading.local):
    """The innermost scope of a thread, for compiled code."""

    def __init__(self) -> None:
        # Set here and not on the class: torch.compile does not guard a class-level default, and would keep its answer.
        self.scope: Scope | None = None


class TorchMirror:
    """Keeps the scope in a thread-local that compiled code guards on, and carries it to autograd's workers."""

    def __init__(self) -> None:
        self._carries = torch.accelerator.is_available() and private.stash(_KEY, None)
        if self._carries:
            core.set_elsewhere(_carried)

    def enter(self, scope: Scope) -> Scope | None:
        outer = _thread.scope
        _thread.scope = scope
        if self._carries:
            private.stash(_KEY, (threading.get_ident(), scope))
        return outer

    def leave(self, held: Scope | None) -> None:
        _thread.scope = held
        if self._carries:
            private.stash(_KEY, None if held is None else (threading.get_ident(), held))

    def set_default(self, state: ParallelState | None) -> None:
        """Nothing to do: compiled code reads the core's own default, a module global, and guards on it."""


def _carried() -> Scope | None:
    """Return the scope that was open where backward() was called, in a worker thread of autograd; else None."""
    found = private.stashed(_KEY)
    return None if found is None or found[0] == threading.get_ident() else found[1]


_thread = _Thread()
mirror = TorchMirror()


@torch.compiler.substitute_in_graph(core.get_parallel_state)
def _get_parallel_state() -> ParallelState:
    scope = _thread.scope
    if scope is not None:
        return scope.state
    default = core.default_state()
    return default if default is not None else solo_state()


@torch.compiler.substitute_in_graph(core.current_scope)
def _current_scope() -> Scope | None:
    return _thread.scope


@torch.compiler.substitute_in_graph(core.scope_name)
def _scope_name() -> str | None:
    scope = _thread.scope
    return scope.name if scope is not None else core.default_name()


@torch.compiler.substitute_in_graph(core.push)
def _push(state: ParallelState, name: str, owner: object = None) -> Scope:
    scope = Scope(state, name, _thread.scope, owner)
    _thread.scope = scope
    return scope


@torch.compiler.substitute_in_graph(core.pop)
def _pop(scope: Scope) -> None:
    scope.closed = True
    _thread.scope = scope.outer


class _Reentered:
    """The scope of a forward, entered again around its recompute."""

    def __init__(self, state: ParallelState, name: str) -> None:
        self._state = state
        self._name = name
        self._scopes: list[Scope] = []

    def __enter__(self) -> None:
        self._scopes.append(core.push(self._state, self._name))

    def __exit__(self, *exc: object) -> None:
        core.pop(self._scopes.pop())


def checkpoint_context_fn() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of forward and recompute, for `torch.utils.checkpoint(..., context_fn=)`. *Local.*

    The recompute runs under the scope that is ambient now, whatever is ambient in backward.

    >>> import dualmesh as dm, torch
    >>> from torch.utils.checkpoint import checkpoint
    >>> from dualmesh_torch import checkpoint_context_fn
    >>> with dm.session(backend="torch"):
    ...     base = dm.init_parallel_state(dp_size=1)
    ...     x = torch.ones(2, requires_grad=True)
    ...     y = checkpoint(torch.sin, x, use_reentrant=False, context_fn=checkpoint_context_fn)
    """
    return nullcontext(), _Reentered(core.get_parallel_state(), core.scope_name() or "solo")


def remat(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` with its activations recomputed in backward, under the scope that its forward had. *Local.*"""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # compiled code recomputes inside its graph, where no scope is read
            return checkpointing.checkpoint(fn, *args, use_reentrant=False, **kwargs)
        return checkpointing.checkpoint(fn, *args, use_reentrant=False, context_fn=checkpoint_context_fn, **kwargs)

    return wrapper
