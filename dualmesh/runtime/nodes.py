"""`dm.nodes()`: which ranks of the running world share a machine, from launchers and from the hosts themselves.

What nodes answer is in `nodes`; what launchers say is read in `node_variables`.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dualmesh.backend.state_plan import StatePlan
from dualmesh.errors import LaunchError, listed
from dualmesh.runtime.node_variables import place_from
from dualmesh.runtime.session import Session, session_for
from dualmesh.topology.nodes import Nodes, Place
from dualmesh.topology.rank_groups import RankGroups
from dualmesh.topology.spec import TopologySpec

HOST_VARIABLE = "NCCL_HOSTID"
"""What NCCL takes for a host's identity, where it is set."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Said(NamedTuple):
    """What one process says."""

    process: int
    place: Place | None
    """What its launcher told it."""
    host: str
    """The identity of its host."""
    problem: str = ""
    """Why its launcher's variables cannot be; empty where they can."""


def nodes(*, backend: str | None = None) -> Nodes:
    """Return the nodes of the running world, as all of its processes see them. *Collective over all processes.*

    Every process says what its launcher told it (torchrun, SLURM) and which host it is on. Where all launchers spoke,
    they are believed if they agree with each other; else hosts tell. A process of several ranks (JAX) has them all on
    its node. Nodes may differ in size, and their ranks need not be neighbours.

    Args:
        backend: As in `init_distributed`.

    Raises:
        LaunchError: What launchers told the ranks cannot be; the message names the ranks.
        GroupTimeoutError: Processes did not come in time.

    >>> import dualmesh as dm
    >>> with dm.session(backend="sim", world_size=4):
    ...     dm.nodes().sizes
    (4,)
    """
    with session_for(backend) as current:
        if current.world.process_count == 1:
            return Nodes.of_sizes([current.world_size])
        return nodes_of(_gather(current))


def nodes_of(said: Sequence[Said]) -> Nodes:
    """Return the nodes of ranks from what the process of every rank said, by rank. *Pure.*

    Raises:
        LaunchError: A launcher contradicts itself or another.

    >>> nodes_of([Said(0, None, "a"), Said(0, None, "a"), Said(1, None, "b"), Said(2, None, "a")]).groups
    RankGroups([[0, 1, 3], [2]])
    """
    ranks: dict[int, list[int]] = {}
    for rank, one in enumerate(said):
        ranks.setdefault(one.process, []).append(rank)
    held = list(ranks.values())
    firsts = [said[own[0]] for own in held]
    wrong = {own[0]: one.problem for own, one in zip(held, firsts, strict=True) if one.problem}
    if wrong:
        rank, problem = next(iter(wrong.items()))
        raise LaunchError(f"dm.nodes, ranks {listed(wrong)}: for rank {rank}, {problem}", ranks=tuple(wrong))
    hosts = [one.host for one in firsts]
    places = [one.place for one in firsts if one.place is not None]
    processes = Nodes.of_places(places, hosts) if len(places) == len(firsts) else Nodes.of_hosts(hosts)
    return Nodes(RankGroups([rank for process in node for rank in held[process]] for node in processes.groups))


def host_identity(variables: Mapping[str, str]) -> str:
    """Return what no other running host has: NCCL_HOSTID, or the host's name and the id of its boot. *Local.*"""
    given = variables.get(HOST_VARIABLE)
    if given:
        return given
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    return f"{socket.gethostname()} {boot}".strip()


def _gather(current: Session) -> list[Said]:
    """Return what the process of every rank says, through a state over the world that nobody sees."""
    topology = TopologySpec({"rank": current.world_size}).resolve(current.world_size)
    plan = StatePlan(topology, None, current.backend, current.world.device_type)
    mine = _own(current)
    (state,) = current.driver.build([plan], current.world)
    try:
        return state.host.all_gather(mine, "rank")
    finally:
        state.release()
        current.driver.release([state])


def _own(current: Session) -> Said:
    """Return what this process says; a fault of its launcher too, so that nobody waits for it."""
    first, count = current.local_ranks[0], current.world.process_count
    host = host_identity(os.environ)
    known = {"rank": first, "world_size": count} if count == current.world_size else {}
    try:
        return Said(first, place_from(os.environ, **known), host)
    except LaunchError as error:
        return Said(first, None, host, str(error))
