"""What was built, told through the standard library's `logging`: once per job, on one rank, quiet unless asked for.

Warnings are given in `warn`; what is in use at any time is answered by `groups_in_use`.
"""

import logging
from collections.abc import Mapping

from dualmesh.backend.state import ParallelState
from dualmesh.errors import counted, listed

LOGGER = logging.getLogger("dualmesh")


def log_registered(states: Mapping[str, ParallelState]) -> None:
    """Tell which names were registered, in the process that holds the first rank of each state. *Local.*

    Level INFO: one line per name. DEBUG: axes of size 1 as well.

    Args:
        states: What the new names mean.
    """
    if not LOGGER.isEnabledFor(logging.INFO):
        return
    for name, state in states.items():
        if _first_rank(state) not in state.local_ranks:
            continue
        if state.names[0] == name:
            LOGGER.info("State %r: %s", name, _describe(state))
        else:
            LOGGER.info("State %r is state %r.", name, state.names[0])


def _describe(state: ParallelState) -> str:
    topology = state.topology
    lists = [axis for axis in topology.axis_names if axis != "world" and topology.rank_groups(axis) is not None]
    sizes = {axis: "/".join(map(str, topology.group_sizes(axis))) for axis in lists or topology.base_axes}
    is_all = LOGGER.isEnabledFor(logging.DEBUG)
    shown = listed((f"{axis}={size}" for axis, size in sizes.items() if is_all or size != "1"), limit=40)
    where = f"{state.backend} on {state.device_type}"
    return f"{counted(len(topology.members), 'rank')} ({shown}), {where}."


def _first_rank(state: ParallelState) -> int:
    return state.topology.members[0] if state.plan.ranks is None else state.plan.ranks[0]
