"""Agreement on states before they are built, through the store in which the processes met.

How processes agree is in `dualmesh.runtime.agreement`, the store in `store`. One process of several devices speaks
once.
"""

from collections.abc import Mapping, Sequence

from dualmesh._support import waits
from dualmesh.backend.state_plan import StatePlan, describe_plans, ranks_of
from dualmesh.runtime.agreement import Matter, agree
from dualmesh_jax.store import JaxStore

NOUNS = ("process", "processes")


def agree_on(plans: Sequence[StatePlan], process_of: Mapping[int, int], world: str, store: JaxStore) -> None:
    """Return once all processes that hold ranks of the states mean the same states. *Collective over those processes.*

    Collective order: sets of processes are agreed on in one common order, so that no two wait for each other.

    Args:
        plans: The states to be built.
        process_of: The process that holds each session rank.
        world: What of the world the states depend on beside that, in words.
        store: Shared by the processes.
    """
    by_processes: dict[tuple[int, ...], list[StatePlan]] = {}
    for plan in plans:
        holders = tuple(sorted({process_of[rank] for rank in members(plan)}))
        by_processes.setdefault(holders, []).append(plan)
    for holders in sorted(by_processes):
        if store.process in holders:
            said = describe_plans(by_processes[holders], world)
            matter = Matter("init_parallel_state", holders, store.process, said, nouns=NOUNS)
            agree(store, matter, waits.timeout_s())


def members(plan: StatePlan) -> tuple[int, ...]:
    """Return the session ranks of a state in grid order. *Pure.*"""
    places, first = ranks_of(plan), plan.topology.rank_offset
    return tuple(places[rank - first] for rank in plan.topology.members)
