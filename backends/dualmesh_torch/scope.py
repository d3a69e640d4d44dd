"""The scope in compiled code, which cannot read a ContextVar, and blocks that are recomputed in it.

The fact itself is kept in `dualmesh.runtime.scope`; this module replaces its readers. Whose scope code is in that
autograd calls is in `regions`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils import checkpoint as checkpointing

from dualmesh.backend.state import ParallelState
from dualmesh.runtime import scope as core
from dualmesh.runtime.scope import Scope
from dualmesh.runtime.thread_check import check_thread
from dualmesh_torch import private

RECOMPILE_LIMIT = (
    "dualmesh: code is compiled once for each state that it runs in, a state that was cleared and initialized again "
    "being another, and torch stops at {limit} compiles of one function. Set torch._dynamo.config.recompile_limit "
    "above the number of states; torch.compile of the same function once more shares its compiles. After "
    "dm.clear_parallel_state(), torch._dynamo.reset() forgets those of ended states."
)


@torch.compiler.substitute_in_graph(core.read, skip_signature_check=True)
def _read() -> Scope | None:
    return core.this_thread.scope


@torch.compiler.substitute_in_graph(core.write, skip_signature_check=True)
def _write(scope: Scope | None) -> None:
    private.freely(_set_thread, scope)


def _set_thread(scope: Scope | None) -> None:
    core.this_thread.scope = scope


_before_init: list[ParallelState] = []


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _ask_before_init() -> None:
    _before_init[:] = [core.before_init()]


@torch.compiler.substitute_in_graph(core.before_init)
def _read_before_init() -> ParallelState:
    _ask_before_init()  # outside the graph: it warns, and makes the state
    return _before_init[0]


@torch.compiler.substitute_in_graph(core.hold)
def _hold(scope: Scope) -> None:
    """Nothing to do: a scope opened in compiled code ends there, and no other mirror is asked in between."""


@torch.compiler.substitute_in_graph(core.region)
def _region() -> None:
    """Nothing to find: what torch compiles is traced by no other framework."""


@torch.compiler.substitute_in_graph(check_thread)
def _check_unscoped(name: str) -> None:
    """Nothing to do: compiled code says nothing."""


def explain(error: BaseException) -> None:
    """Add to torch's error about too many compiles what is to be done. *Local.*"""
    if not torch.compiler.is_compiling() and private.is_recompile_limit(error):
        error.add_note(RECOMPILE_LIMIT.format(limit=private.recompile_limit()))


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
    return nullcontext(), Scope(core.get_parallel_state(), core.scope_name() or "solo")


def remat(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` with its activations recomputed in backward, under the scope that its forward had. *Local.*"""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # compiled code recomputes inside its graph, where no scope is read
            return checkpointing.checkpoint(fn, *args, use_reentrant=False, **kwargs)
        return checkpointing.checkpoint(fn, *args, use_reentrant=False, context_fn=checkpoint_context_fn, **kwargs)

    return wrapper
