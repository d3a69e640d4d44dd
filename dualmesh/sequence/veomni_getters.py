"""VeOmni's questions about the ambient state's parallel groups, under VeOmni's names.

They say what the attributes of the state say (`veomni_attributes`): a disabled group is None, has one rank, and that is
rank 0. New code asks the state by axis name.
"""

from typing import Any

from dualmesh.errors import ArgumentError
from dualmesh.runtime.scope import get_parallel_state
from dualmesh.sequence.veomni_groups import find_state_of_group


def get_data_parallel_group() -> Any:
    """Return the group of dp. *Local.*"""
    return get_parallel_state().dp_group


def get_data_parallel_rank() -> Any:
    """Return this rank's index along dp. *Pure.*"""
    return get_parallel_state().dp_rank


def get_data_parallel_world_size() -> int:
    """Return the size of dp. *Pure.*"""
    return get_parallel_state().dp_size


def get_ulysses_sequence_parallel_group() -> Any:
    """Return the group of ulysses, or None where it is disabled. *Local.*"""
    return get_parallel_state().ulysses_group


def get_ulysses_sequence_parallel_rank(group: Any = None) -> Any:
    """Return this rank's index along ulysses, or in a group of a registered state. *Pure.*"""
    if group is None:
        return _rank("ulysses")
    state, axis = find_state_of_group(group)
    return state.index(axis)


def get_ulysses_sequence_parallel_world_size(group: Any = None) -> int:
    """Return the size of ulysses, or of a group of a registered state. *Pure.*"""
    if group is None:
        return get_parallel_state().ulysses_size
    state, axis = find_state_of_group(group)
    return state.size(axis)


def get_context_parallel_group(check_initialized: bool = True) -> Any:
    """Return the group of cp; None where it is disabled and `check_initialized` is False. *Local.*

    Raises:
        ArgumentError: It is disabled, and that was not expected.
    """
    state = get_parallel_state()
    if state.cp_group is None and check_initialized:
        raise ArgumentError(
            f"get_context_parallel_group: cp has size 1 in {state.label}. Register a state with cp_size > 1, or ask "
            f"with check_initialized=False.",
            state=state,
        )
    return state.cp_group


def get_context_parallel_rank() -> Any:
    """Return this rank's index along cp. *Pure.*"""
    return _rank("cp")


def get_context_parallel_world_size() -> int:
    """Return the size of cp. *Pure.*"""
    return get_parallel_state().cp_size


def get_unified_sequence_parallel_group() -> Any:
    """Return the group of sp (ulysses x cp), or None where it is disabled. *Local.*"""
    return get_parallel_state().sp_group


def get_unified_sequence_parallel_rank() -> Any:
    """Return this rank's index along sp. *Pure.*"""
    return _rank("sp")


def get_unified_sequence_parallel_world_size() -> int:
    """Return the size of sp. *Pure.*"""
    return get_parallel_state().sp_size


def is_ulysses_sequence_parallel_initialized() -> bool:
    """Tell whether ulysses has more than one rank. *Pure.*"""
    return get_parallel_state().ulysses_enabled


def is_context_parallel_initialized() -> bool:
    """Tell whether cp has more than one rank. *Pure.*"""
    return get_parallel_state().cp_enabled


def _rank(name: str) -> Any:
    """Return what the attribute says, 0 where it says that the axis is disabled."""
    state = get_parallel_state()
    return getattr(state, f"{name}_rank") if getattr(state, f"{name}_enabled") else 0
