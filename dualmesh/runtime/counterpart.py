"""The same named topology in two frameworks' worlds that share their processes.

Starting such worlds is in `launch`; handing arrays from one to the other is in `interop`.
"""

from dataclasses import replace

from dualmesh.backend import discovery
from dualmesh.backend.state import ParallelState
from dualmesh.backend.state_plan import StatePlan
from dualmesh.errors import SessionError, listed
from dualmesh.runtime.registry import registry


def counterpart_of(state: ParallelState, backend: str) -> ParallelState:
    """Return the state of another framework with the topology of this one: see `ParallelState.on`.

    Raises:
        SessionError: The other framework has no world here, or its ranks lie in other processes.
    """
    if backend == state.backend:
        return state
    driver = discovery.load(backend)
    state.require_live("on")
    world = driver.world()
    if world is None:
        raise SessionError(
            f"{state.label}: {backend} has no world here. Start both together: "
            f"dm.init_distributed(backend=({state.backend!r}, {backend!r})).",
            state=state,
            backend=backend,
        )
    if (world.size, world.local_ranks) != (state.world.size, state.world.local_ranks):
        raise SessionError(
            f"{state.label}: this process holds the ranks {listed(world.local_ranks)} of {world.size} in {backend}, "
            f"and {listed(state.world.local_ranks)} of {state.world.size} in {state.backend}. Both must be the same: "
            f"start both together, dm.init_distributed(backend=({state.backend!r}, {backend!r})).",
            state=state,
            backend=backend,
        )
    plan: StatePlan = replace(state.plan, backend=backend, device_type=world.device_type)
    with registry.lock:
        found = registry.find(plan)
        if found is None:
            (found,) = driver.build([plan], world)
            registry.keep(found)
        for name in state.names:
            if name not in found.names:
                found.names.append(name)
        return found
