"""Which state a function means: the one it was given, or the ambient one.

What is ambient is kept in `scope`.
"""

from dualmesh.errors import ArgumentError
from dualmesh.scope import get_parallel_state
from dualmesh.state import ParallelState


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
