"""What the ambient state and the names of states are to JAX's caches: user contexts, part of every jit cache key.

The ambient state itself is kept by `dualmesh.runtime.scope`; `scope` here keeps the two in step.
"""

# mypy: allow-untyped-calls
# jax leaves some of its public functions unannotated.

from typing import Any
from weakref import WeakKeyDictionary

import jax

from dualmesh.backend.state import ParallelState
from dualmesh.backend.state_plan import StatePlan
from dualmesh.runtime.registry import Naming

# Made at import: adding a user context while other JAX code runs is not safe.
_context: Any = jax.make_user_context(default_value=None)
# What names that traced code looked up mean now; one value for all threads, so that scopes cost no more for it.
_naming: Any = jax.make_user_context(default_value=frozenset())


class ScopeKey:
    """A state as a small frozen value; JAX's caches compare it by value and keep it alive.

    `mesh` is the serial number of the mesh that the state is on, 0 for states of other backends.
    """

    __slots__ = ("_hash", "_mesh", "_plan")

    def __init__(self, plan: StatePlan, mesh: int) -> None:
        self._plan = plan
        self._mesh = mesh
        self._hash = hash((plan, mesh))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, ScopeKey):
            return NotImplemented
        return self._hash == other._hash and self._mesh == other._mesh and self._plan == other._plan

    def __repr__(self) -> str:
        return f"ScopeKey({self._plan.topology!r}, mesh={self._mesh})"


_keys: WeakKeyDictionary[ParallelState, ScopeKey] = WeakKeyDictionary()


def give_key(state: ParallelState, mesh: int) -> ScopeKey:
    """Fix and return the key of a state that is on a mesh. *Local.*"""
    key = _keys[state] = ScopeKey(state.plan, mesh)
    return key


def key_of(state: ParallelState | None) -> ScopeKey | None:
    """Return the key of a state of any backend; None stands for no state. *Local.*"""
    if state is None:
        return None
    key = _keys.get(state)
    if key is None:
        key = _keys[state] = ScopeKey(state.plan, 0)
    return key


def user_context() -> Any:
    """Return the user context that holds the ambient state's key. *Local.*"""
    return _context


def key_by_names(naming: Naming) -> None:
    """Let every jit cache depend on what names mean that traced code looked up. *Local.*"""
    _naming.set_global(naming)
