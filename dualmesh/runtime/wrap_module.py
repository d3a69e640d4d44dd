"""`wrap_module`: a function or a framework's module that always runs in one state, whoever calls it.

Scopes around a block of code are in `scope`; what a framework's modules need is in the backends (`Backend.scoped`).
"""

import sys
from typing import Any, TypeVar, cast

from dualmesh.backend import discovery
from dualmesh.backend.state import ParallelState
from dualmesh.errors import ArgumentError
from dualmesh.runtime.scope import use_parallel_state

Target = TypeVar("Target")


def scoped(target: Target, name_or_state: str | ParallelState) -> Target:
    """Return `target` such that every call of it runs in a state, its recompute in backward included. *Local.*

    A torch module stays the same object with the same keys in its `state_dict`, before or after `fully_shard`; scoped
    again, it takes the new state. Functions, coroutines and generators are wrapped as the decorator
    `use_parallel_state(name_or_state)` wraps them.

    Args:
        target: A module of a framework, or a function.
        name_or_state: A state, or a name, which is looked up at each call and need not be registered yet.

    Raises:
        ArgumentError: `target` is a class or cannot be called, or `name_or_state` is no name and no state.

    >>> import dualmesh as dm
    >>> with dm.session(backend="sim", world_size=2):
    ...     base = dm.init_parallel_state(dp_size=2)
    ...     talker = dm.init_parallel_state(tp_size=2, name="talker")
    ...     where = dm.scoped(dm.scope_name, "talker")
    ...     [dm.scope_name(), where()]
    ['base', 'talker']
    """
    if not isinstance(name_or_state, str | ParallelState) or name_or_state == "":
        raise ArgumentError(
            f"scoped: {name_or_state!r} is no state. Give a state or the name of one.", name_or_state=name_or_state
        )
    if isinstance(target, type) or not callable(target):
        found = f"the class {target.__qualname__}" if isinstance(target, type) else repr(target)
        raise ArgumentError(f"scoped: found {found}. Give a function, or an instance of a module.", target=target)
    module = _module(target, name_or_state)
    return cast("Target", use_parallel_state(name_or_state)(target) if module is None else module)


def _module(target: Any, name_or_state: str | ParallelState) -> Any | None:
    """Return what the framework of a module makes of it, or None for what is no module."""
    for name in discovery.available():
        if name in discovery.loaded() or name in sys.modules:  # nothing is of a framework that nobody imported
            found = discovery.load(name).scoped(target, name_or_state)
            if found is not None:
                return found
    return None
