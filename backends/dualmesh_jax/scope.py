"""The mirror of the scope in JAX: the ambient state's key, and its mesh.

Keys are in `cache_keys`, which mesh may be set where in `ambient_mesh`; the ambient state itself is kept by
`dualmesh.runtime.scope`.
"""

import sys
from typing import Any

from dualmesh.backend.state import ParallelState
from dualmesh.errors import ScopeError
from dualmesh.runtime.registry import registry
from dualmesh.runtime.scope import Scope
from dualmesh_jax.arrays.arrays import is_tracing
from dualmesh_jax.cache_keys import key_of, user_context
from dualmesh_jax.mesh.ambient_mesh import ambient_mesh, note_traced
from dualmesh_jax.private import is_transforming, may_have_started
from dualmesh_jax.regions import mark_default, region_to_mark
from dualmesh_jax.state import JaxState

APART = (
    "get_parallel_state: the ambient state here is {name}, but this thread, by which JAX caches what it traces, is in "
    "another scope: a `with` block was held open across an await, or its context was copied to where nothing entered "
    "it. Decorate the coroutine with dm.use_parallel_state(...) instead; carry a scope into threads and new tasks with "
    "dm.bind(fn)."
)


class JaxMirror:
    """Keeps JAX in step with the scope, for states of every backend."""

    def __init__(self) -> None:
        self._context = user_context()

    def enter(self, scope: Scope) -> tuple[Any, Any, Any]:
        state = scope.state
        mesh = None
        if type(state) is JaxState:
            mesh = ambient_mesh("use_parallel_state", state)
            mesh.__enter__()
            context = self._context(state.key)
        else:
            if is_tracing():
                note_traced(state)
            context = self._context(key_of(state))
        context.__enter__()
        region = region_to_mark(state)
        if region is not None:
            region.__enter__()
        return context, mesh, region

    def leave(self, held: tuple[Any, Any, Any]) -> None:
        context, mesh, region = held
        if region is not None:
            region.__exit__(None, None, None)
        context.__exit__(None, None, None)
        if mesh is not None:
            error = sys.exception()  # what leaves the scope, where something does
            mesh.__exit__(type(error), error, None)

    def set_default(self, state: ParallelState | None) -> None:
        self._context.set_global(key_of(state))
        mark_default(state if registry.has_several else None)

    def allow_apart(self, scope: Scope | None) -> None:
        """Refuse it where JAX runs: it would keep the answer for another state, and give it there ever after.

        Where JAX was imported only, nothing is traced that could keep it.

        Raises:
            ScopeError: JAX has started, or traces.
        """
        if not may_have_started() and not is_transforming():
            return
        name = None if scope is None else scope.name
        raise ScopeError(APART.format(name="the default" if scope is None else repr(name)), name=name)
