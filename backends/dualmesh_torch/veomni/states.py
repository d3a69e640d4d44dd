"""VeOmni's parallel state by its own signatures: register a state, make it ambient, forget it.

Sequence-parallel functions are in `functions`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, Literal, TypeVar

import torch.distributed as dist

import dualmesh as dm
from dualmesh.backend.state import ParallelState
from dualmesh.errors import ArgumentError, ScopeError
from dualmesh.runtime import scope
from dualmesh.runtime.registry import registry

Function = TypeVar("Function", bound=Callable[..., Any])

_ALONE = "a single process"
_FROM_ACCELERATOR = (
    *("dp_size", "dp_replicate_size", "dp_shard_size", "tp_size", "pp_size", "cp_size", "ulysses_size"),
    *("extra_parallel_sizes", "extra_parallel_placement_innermost", "extra_parallel_names"),
)


def init_parallel_state(
    dp_size: int = 1,
    dp_replicate_size: int = 1,
    dp_shard_size: int = 1,
    tp_size: int = 1,
    pp_size: int = 1,
    cp_size: int = 1,
    ulysses_size: int = 1,
    dp_mode: Literal["fsdp2", "fsdp1", "ddp"] = "fsdp2",
    device_type: str | None = None,
    include_sp_in_fsdp: bool = True,
    extra_parallel_sizes: Sequence[int] = (1,),
    extra_parallel_placement_innermost: Sequence[bool] = (False,),
    extra_parallel_names: Sequence[str] = ("ep",),
    async_enabled: bool = False,
    name: str | None = "base",
) -> ParallelState:
    """Register a state, as `dm.init_parallel_state` does. *Collective over the world.*

    VeOmni's signature and defaults: `dp_size` is 1 unless given, and must be dp_replicate_size * dp_shard_size, or
    alone say both. With `name=None` the state takes no name that one would look up.
    """
    settings = (
        *(dp_size, dp_replicate_size, dp_shard_size, tp_size, pp_size, cp_size, ulysses_size, dp_mode, device_type),
        *(include_sp_in_fsdp, extra_parallel_sizes, extra_parallel_placement_innermost, extra_parallel_names),
        async_enabled,
    )
    if name is not None:
        return dm.init_parallel_state(*settings, name)
    taken = registry.names()
    name = next(f"unnamed {n}" for n in range(len(taken) + 1) if f"unnamed {n}" not in taken)
    state = dm.init_parallel_state(*settings, name)
    if state.names[0] != name:  # it was there already
        registry.unname(name)
    return state


def init_parallel_state_from_accelerator(accelerator: Any, name: str | None) -> ParallelState:
    """Register the state that a trainer's settings describe: any object with VeOmni's fields. *Collective.*"""
    sizes = {field: getattr(accelerator, field) for field in _FROM_ACCELERATOR}
    mode = accelerator.fsdp_config.fsdp_mode
    return init_parallel_state(**sizes, dp_mode=mode, async_enabled=accelerator.enable_async, name=name)


def use_parallel_state(parallel_state: ParallelState | str) -> AbstractContextManager[ParallelState]:
    """Make a state, or the one of a name, ambient in a `with` block. *Local*; see `dm.use_parallel_state`."""
    return scope.use_parallel_state(parallel_state)


def clear_parallel_state() -> None:
    """Forget the ambient state, all names and all states. *Local*; see `dm.clear_parallel_state`."""
    dm.clear_parallel_state()


def requires_mesh(fn: Function) -> Function:
    """Return a method of a state that refuses to run where the state has no mesh. *Local.*

    Raises:
        ArgumentError: (a ValueError, as VeOmni's) when called: the state's `device_mesh` is None.
    """

    @wraps(fn)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.device_mesh is None:
            raise ArgumentError(
                f"{fn.__qualname__}: device_mesh of {self!r} is None: no state is registered. Call init_parallel_state "
                f"first.",
                state=self,
            )
        return fn(self, *args, **kwargs)

    return wrapper  # type: ignore[return-value]


def set_parallel_state(parallel_state: ParallelState | None) -> ParallelState | None:
    """Make a state the default and return the one before; `use_parallel_state` is the scoped way. *Local.*

    None means a single process, as in VeOmni: a state over this rank alone, whose collectives are the identity.

    Raises:
        ScopeError: A scope is open, whose state would stay the ambient one.
    """
    if scope.current_scope() is not None:
        raise ScopeError(
            f"set_parallel_state: the scope {dm.scope_name()!r} is open, and its state would stay ambient. Use "
            f"use_parallel_state, or leave the scope first.",
            name=dm.scope_name(),
        )
    before = scope.default_state()
    if parallel_state is None and dist.is_initialized():
        alone = registry.named.get(_ALONE)
        is_there = alone is not None and alone.is_live
        if not is_there:
            alone = dm.init_parallel_state(dp_size=1, ranks=(dist.get_rank(),), backend="torch", name=_ALONE)
        parallel_state = alone
    scope.set_default(parallel_state, parallel_state.names[0] if parallel_state is not None else "base")
    return before
