"""Modules whose forward always runs in one state, whoever calls it and whenever it is recomputed.

The module's class is replaced by a subclass of it, as `fully_shard` does: the object, its parameters and its keys stay,
and copies of it are scoped too. What is ambient inside is kept by `dualmesh.runtime.scope`.
"""

import functools
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from dualmesh.backend.state import ParallelState
from dualmesh.runtime.scope import use_parallel_state

_STATE = "dualmesh_scope"
_MARK = "dualmesh_is_scoped"


def scope_module(module: nn.Module, name_or_state: str | ParallelState) -> nn.Module:
    """Let a module's forward run in a state from now on; return the module. *Local.*"""
    setattr(module, _STATE, name_or_state)
    own = module.__dict__.get("forward")
    if own is not None:  # somebody replaced the forward of this one object, so its class is not asked
        inner = getattr(own, _STATE, own)
        outer: Any = use_parallel_state(name_or_state)(inner)
        setattr(outer, _STATE, inner)
        module.__dict__["forward"] = outer
    elif not hasattr(type(module), _MARK):
        module.__class__ = _scoped_class(type(module))
    return module


def scope_of(module: nn.Module) -> str | ParallelState | None:
    """Return the state, or its name, in which a module was told to run; None where nobody did. *Pure.*"""
    found: str | ParallelState | None = module.__dict__.get(_STATE)
    return found


def _scoped_class(base: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of a module's class that enters the scope; one for all modules of the class."""
    known = [kind for kind in base.__subclasses__() if _MARK in kind.__dict__]
    return known[0] if known else _subclass(base)


def _subclass(base: type[nn.Module]) -> type[nn.Module]:
    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        target = self.__dict__.get(_STATE)
        if target is None:  # made by calling the class, as slices of containers are
            return base.forward(self, *args, **kwargs)
        with use_parallel_state(target):
            return base.forward(self, *args, **kwargs)

    def reduced(self: nn.Module, protocol: Any) -> Any:
        # The class has no name to be found by in another process; copies and pickles make it anew.
        if type(self) is not _scoped_class(base) or base.__reduce__ is not object.__reduce__:
            return base.__reduce_ex__(self, protocol)
        return _empty, (base,), self.__getstate__()  # type: ignore[no-untyped-call]

    namespace: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": reduced,
        _MARK: True,
        "forward": forward,
    }
    if issubclass(base, FSDPModule):
        # FSDP makes slices of containers of the class before it, which it finds by its place among the bases.
        namespace["__new__"] = lambda cls, *args, **kwargs: base(*args, **kwargs)
    return type(base.__name__, (base,), namespace)


def _empty(base: type[nn.Module]) -> nn.Module:
    """Return a module of the subclass, for `copy` and `pickle` to fill."""
    module: nn.Module = nn.Module.__new__(_scoped_class(base))
    return module
