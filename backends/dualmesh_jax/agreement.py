"""Agreement on states before they are built, through the store in which the processes met.

How processes agree is in `dualmesh.agreement`, the store in `store`. One process of several devices speaks once.
"""

from collections.abc import Mapping, Sequence

from dualmesh import __version__, environment
from dualmesh.agreement import Matter, agree
from dualmesh.state_plan import StatePlan
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
    by_processes: dict[tuple[int, ...], list[str]] = {}
    for plan in plans:
        holders = tuple(sorted({process_of[rank] for rank in members(plan)}))
        by_processes.setdefault(holders, []).append(_said(plan))
    for holders, said in sorted(by_processes.items()):
        if store.process in holders:
            text = f"{len(said)} to build by dualmesh {__version__}{world}: " + "; ".join(said)
            matter = Matter("init_parallel_state", holders, store.process, text, nouns=NOUNS)
            agree(store, matter, environment.timeout_s())


def members(plan: StatePlan) -> tuple[int, ...]:
    """Return the session ranks of a state in grid order. *Pure.*"""
    places, first = plan.ranks, plan.topology.rank_offset
    return tuple(rank if places is None else places[rank - first] for rank in plan.topology.members)


def _said(plan: StatePlan) -> str:
    settings = [f"{plan.name!r}: {plan.topology.spec!r}", f"device_type={plan.device_type!r}"]
    settings += [f"dp_mode={plan.dp_mode!r}"]
    settings += [f"ranks={plan.ranks}"] if plan.ranks is not None else []
    settings += [f"async_enabled={plan.async_enabled}"] if plan.async_enabled else []
    settings += [f"own_groups={plan.own_groups}"] if plan.own_groups else []
    settings += [f"group_options={dict(plan.group_options)}"] if plan.group_options else []
    return ", ".join(settings)
