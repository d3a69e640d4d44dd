"""Modules of flax NNX and equinox whose calls always run in one state, whoever calls them and inside any transform.

The module's class is replaced by a subclass of it that enters the scope. An NNX module stays the same object; equinox
modules do not change, so a new one with the same leaves is returned. Neither library is imported here.
"""

import functools
import sys
from typing import Any

from dualmesh.backend.state import ParallelState
from dualmesh.errors import ArgumentError
from dualmesh.runtime.scope import use_parallel_state

_BASE = "dualmesh_base"
_STATE = "dualmesh_state"
LINEN = (
    "scoped: found a flax.linen module ({kind}), which is called through its apply. Scope that: "
    "dm.scoped(module.apply, {state!r}), and module.init alike."
)


def scope_module(target: Any, name_or_state: str | ParallelState) -> Any | None:
    """Return a module whose calls run in a state, or None for what is no module. *Local.*

    Raises:
        ArgumentError: A flax.linen module.
    """
    if _is(target, "flax.linen"):
        raise ArgumentError(LINEN.format(kind=type(target).__qualname__, state=name_or_state), target=target)
    if not _is(target, "flax.nnx") and not _is(target, "equinox"):
        return None
    base = getattr(type(target), _BASE, type(target))
    kind = _scoped_class(base, name_or_state)
    if _is(target, "flax.nnx"):
        target.__class__ = kind
        return target
    copy = object.__new__(kind)
    for name, value in vars(target).items():
        object.__setattr__(copy, name, value)
    return copy


def _is(target: Any, library: str) -> bool:
    module = getattr(sys.modules.get(library), "Module", None)
    return module is not None and isinstance(target, module)


def _scoped_class(base: Any, name_or_state: str | ParallelState) -> Any:
    """Return the subclass that enters the state; one per class and state, so that trees of modules stay equal."""
    for kind in base.__subclasses__():
        if kind.__dict__.get(_BASE) is base and kind.__dict__[_STATE] == name_or_state:
            return kind
    call = base.__call__

    @functools.wraps(call)
    def scoped_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with use_parallel_state(name_or_state):
            return call(self, *args, **kwargs)

    namespace = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__call__": scoped_call,
        _BASE: base,
        _STATE: name_or_state,
    }
    return type(base)(base.__name__, (base,), namespace)
