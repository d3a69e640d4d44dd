"""Native groups where VeOmni's callers pass them: which axis of which state a group belongs to.

VeOmni's functions that take groups are in `veomni` and `veomni_getters`; new code names axes.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from dualmesh.backend.state import ParallelState
from dualmesh.errors import ArgumentError, DualmeshError, listed
from dualmesh.runtime.registry import registry
from dualmesh.runtime.scope import get_parallel_state, use_parallel_state

Params = ParamSpec("Params")
Result = TypeVar("Result")


def is_native(group: Any) -> bool:
    """Tell whether a group is neither left out nor an axis or a tuple of axes. *Pure.*"""
    names = group if isinstance(group, tuple) else (group,)
    return group is not None and not all(isinstance(name, str) for name in names)


def find_state_of_group(group: Any) -> tuple[ParallelState, str]:
    """Return the state and the axis that a native group belongs to: the ambient state's if it has it. *Local.*

    Raises:
        ArgumentError: No registered state has the group.
    """
    ambient = get_parallel_state()
    for state in (ambient, *registry.states()):
        for axis in state.axis_names:
            if _group(state, axis) == group:
                return state, axis
    raise ArgumentError(
        f"sequence: group={group!r} is no group of {ambient.label}. Give an axis ({listed(ambient.axis_names)}), a "
        f"tuple of axes, or what state.group(axis) of a registered state returns.",
        group=group,
    )


def _group(state: ParallelState, axis: str) -> Any:
    """Return the group of an axis, or None where this rank has none: not a member, or the state has ended."""
    try:
        return state.group(axis)
    except DualmeshError:
        return None


def in_state_of_group(fn: Callable[Params, Result]) -> Callable[Params, Result]:
    """Return `fn` such that a native `group` of another state than the ambient one is understood. *Local.*"""
    place = list(inspect.signature(fn).parameters).index("group")

    @wraps(fn)
    def wrapper(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        group = args[place] if len(args) > place else kwargs.get("group")
        if not is_native(group):
            return fn(*args, **kwargs)
        state, _ = find_state_of_group(group)
        if state is get_parallel_state():
            return fn(*args, **kwargs)
        with use_parallel_state(state):
            return fn(*args, **kwargs)

    return wrapper
