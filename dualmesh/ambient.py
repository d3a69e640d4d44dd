"""Which state a function means: the one it was given, or the ambient one.

What is ambient is kept in `scope`.
"""

from contextlib import AbstractContextManager, nullcontext

from dualmesh.errors import ArgumentError
from dualmesh.scope import get_parallel_state, use_parallel_state
from dualmesh.state import ParallelState

_AS_IT_IS: AbstractContextManager[None] = nullcontext()


def meant(where: str, state: ParallelState | None) -> ParallelState:
    """Return the state given, or the ambient one for None. *Local.*

    Raises:
        ArgumentError: What was given is no state.
    """
    if state is None:
        return get_parallel_state()
    if isinstance(state, ParallelState):
        return state
    by_name = f"dm.get_parallel_state_by_name({state!r})"
    cure = by_name if isinstance(state, str) else "what dm.init_parallel_state returned"
    raise ArgumentError(f"{where}: state={state!r} is no state. Give {cure}, or None for the ambient one.", state=state)


def inside(state: ParallelState | None) -> AbstractContextManager[object]:
    """Return the scope of a state given, for what a user's function asks; None leaves the ambient one. *Local.*"""
    return _AS_IT_IS if state is None else use_parallel_state(state)
