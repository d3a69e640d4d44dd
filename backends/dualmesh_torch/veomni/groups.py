"""Which state and axis the `group` of a VeOmni call means, a group of the trainer's own included.

Groups of registered states are looked up in `dualmesh.sequence.veomni_groups`.
"""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

import dualmesh as dm
from dualmesh import sequence
from dualmesh.backend.state import ParallelState
from dualmesh.errors import ArgumentError
from dualmesh.runtime import scope
from dualmesh.runtime.registry import registry
from dualmesh.sequence.veomni_groups import find_state_of_group

Params = ParamSpec("Params")
Result = TypeVar("Result")
Group = dist.ProcessGroup | str | tuple[str, ...] | None

_set_group: dist.ProcessGroup | None = None
"""What `set_ulysses_sequence_parallel_group` was given."""


def set_ulysses_sequence_parallel_group(group: dist.ProcessGroup | None) -> None:
    """Let a group stand for ulysses, whatever state is ambient; None takes it back. *Local.*

    VeOmni's tests use it where they register no state.
    """
    global _set_group
    _set_group = group


def get_ulysses_sequence_parallel_group() -> Any:
    """Return the group that was set, else the ambient state's of ulysses, or None where it is disabled. *Local.*"""
    return sequence.get_ulysses_sequence_parallel_group() if _set_group is None else _set_group


def is_ulysses_sequence_parallel_initialized() -> bool:
    """Tell whether there is a group of ulysses: one that was set, or one of the ambient state. *Local.*"""
    return get_ulysses_sequence_parallel_group() is not None


def of_any_group(fn: Callable[Params, Result], *, default: str = "ulysses") -> Callable[Params, Result]:
    """Return `fn` such that its `group` may be one that the trainer made itself. *Collective over it*, once.

    A state over its ranks is registered then, under the group's name; the default stays what it was.

    Args:
        fn: A function with an argument `group`.
        default: The axis that None means; a group set for "ulysses" stands for that one.
    """
    described = signature(fn)

    @wraps(fn)
    def wrapper(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        bound = described.bind(*args, **kwargs)
        group = bound.arguments.get("group")
        if group is None and default == "ulysses":
            group = _set_group
        if not isinstance(group, dist.ProcessGroup):
            return fn(*args, **kwargs)
        state, axis = _resolve_group(group)
        bound.arguments["group"] = axis
        with scope.use_parallel_state(state):
            return fn(*bound.args, **bound.kwargs)

    return wrapper


def axis_of(group: Group) -> Any:
    """Return the axis that a group stands for inside `of_any_group`: ulysses where none was given. *Pure.*"""
    return "ulysses" if group is None else group


def _resolve_group(group: dist.ProcessGroup) -> tuple[ParallelState, str]:
    """Return the state and the axis of a group; a foreign one is adopted."""
    name = f"group {group.group_name}"
    known = registry.named.get(name)
    if known is not None and known.is_live:
        return known, "group"
    try:
        return find_state_of_group(group)
    except ArgumentError:
        has_default = scope.default_state() is not None
        ranks = dist.get_process_group_ranks(group)
        spec = dm.TopologySpec({"group": len(ranks)})
        state = dm.init_parallel_state(spec=spec, ranks=ranks, backend="torch", name=name)
        if not has_default:
            scope.set_default(None)
        return state, "group"
