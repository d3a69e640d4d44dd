"""What launchers say about nodes: torchrun's LOCAL_*, GROUP_* and SLURM's variables, read once and checked.

What nodes answer is in `nodes`; torchrun's variables for the world are in `environment`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dualmesh.errors import LaunchError, counted, listed
from dualmesh.topology.nodes import Nodes, Place

LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
GROUP = ("GROUP_RANK", "GROUP_WORLD_SIZE")
SLURM_PLACE = ("SLURM_NODEID", "SLURM_LOCALID")
SLURM_TASKS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
"""Tasks on each node: of the step, which is what runs; else of the job."""

_COUNT = re.compile(r"(?P<tasks>[0-9]+)(?:\(x(?P<times>[0-9]+)\))?", re.ASCII)


def place_from(variables: Mapping[str, str], *, rank: int | None = None, world_size: int | None = None) -> Place | None:
    """Return what the launcher told this process about its node, or None where it said nothing. *Pure.*

    torchrun's variables win: inside a SLURM task, torchrun's workers are not SLURM's tasks.

    Args:
        rank: This process' rank, where it is known; else RANK or SLURM_PROCID.
        world_size: Processes in the world, where it is known; else WORLD_SIZE or the sum of SLURM's tasks.

    Raises:
        LaunchError: Variables are half set, are no numbers, or contradict each other.
    """
    if _complete(variables, LOCAL):
        _read_number(variables, "RANK", rank)
        return _local_place(variables, _read_number(variables, "WORLD_SIZE", world_size))
    if _complete(variables, GROUP):
        raise LaunchError(
            f"Nodes: {listed(GROUP)} set, but {listed(LOCAL)} missing. Set all four (torchrun does), or none."
        )
    step = _slurm_step(variables, rank, world_size)
    return None if step is None else step.place


def nodes_from(variables: Mapping[str, str], *, rank: int | None = None, world_size: int | None = None) -> Nodes | None:
    """Return all nodes where the variables alone settle them, or None: then ranks must ask each other. *Pure.*

    They do in a world of one node and under SLURM with a known distribution. torchrun tells a process about its own
    node only, and others may hold more or fewer ranks.

    Raises:
        LaunchError: As `place_from`.

    >>> found = {"SLURM_TASKS_PER_NODE": "2(x2),1", "SLURM_NODEID": "2", "SLURM_LOCALID": "0", "SLURM_PROCID": "4"}
    >>> nodes_from(found).intra_node().groups
    ((0, 1), (2, 3), (4,))
    """
    place = place_from(variables, rank=rank, world_size=world_size)
    if place is None:
        return Nodes.of_sizes([1]) if world_size == 1 else None
    if place.node_count == 1:
        rank = _read_number(variables, "RANK" if variables.get(LOCAL[0]) else "SLURM_PROCID", rank)
        return Nodes.of_sizes([place.local_size]) if rank == place.local_rank else None
    step = None if variables.get(LOCAL[0]) else _slurm_step(variables, rank, world_size)
    return None if step is None or step.dealt is None else Nodes.of_hosts(step.dealt)


def tasks_per_node(text: str) -> tuple[int, ...]:
    """Return the counts that SLURM writes short: "4(x2),3" is 4, 4, 3. *Pure.*

    Raises:
        LaunchError: The text is no such list.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item.strip())
        if match is None or not int(match["tasks"]) or not int(match["times"] or 1):
            raise LaunchError(
                f"Nodes: SLURM's tasks per node are {text!r}, where {item!r} is no count. The form is '4(x2),3'.",
                text=text,
            )
        counts += [int(match["tasks"])] * int(match["times"] or 1)
    return tuple(counts)


def dealt_tasks(sizes: Sequence[int], run: int | None) -> tuple[int, ...]:
    """Return the node of every task when they are dealt to the nodes in turn, `run` at a time. *Pure.*

    Args:
        sizes: Tasks on each node.
        run: Tasks in a row on one node, as long as it has room: 1 is SLURM's cyclic, n its plane=n, None its block.

    >>> dealt_tasks([3, 1], 1)
    (0, 1, 0, 0)
    """
    left = list(sizes)
    found: list[int] = []
    while any(left):
        for node, room in enumerate(left):
            taken = room if run is None else min(run, room)
            found += [node] * taken
            left[node] -= taken
    return tuple(found)


# -- torchrun ----------------------------------------------------------------------------------------------------------


def _local_place(variables: Mapping[str, str], world_size: int | None) -> Place:
    local_rank, local_size = (_number(variables, name) for name in LOCAL)
    node_rank, node_count = (None, None)
    if _complete(variables, GROUP):
        node_rank, node_count = (_number(variables, name) for name in GROUP)
        if not 0 <= node_rank < node_count:
            raise _contradiction(f"GROUP_RANK={node_rank} is not below GROUP_WORLD_SIZE={node_count}")
    if not 0 <= local_rank < local_size:
        raise _contradiction(f"LOCAL_RANK={local_rank} is not below LOCAL_WORLD_SIZE={local_size}")
    if world_size is not None:
        others = 0 if node_count is None else node_count - 1
        if local_size + others > world_size or (node_count == 1 and local_size != world_size):
            nodes = "" if node_count is None else f" and GROUP_WORLD_SIZE={node_count}"
            raise _contradiction(
                f"LOCAL_WORLD_SIZE={local_size}{nodes} do not fit a world of {counted(world_size, 'rank')}"
            )
    if node_count is None and local_size == world_size:
        node_rank, node_count = 0, 1
    return Place(local_rank, local_size, node_rank, node_count)


# -- SLURM -------------------------------------------------------------------------------------------------------------


class _Step(NamedTuple):
    place: Place
    dealt: tuple[int, ...] | None
    """The node of every task, where the distribution is known."""


def _slurm_step(variables: Mapping[str, str], rank: int | None, world_size: int | None) -> _Step | None:
    """Read SLURM's variables of a task; an allocation without a task says nothing about this process."""
    if world_size == 1 or not any(variables.get(name) for name in SLURM_PLACE):
        return None
    tasks = next((name for name in SLURM_TASKS if variables.get(name)), SLURM_TASKS[-1])
    _complete(variables, (*SLURM_PLACE, tasks))
    sizes = tasks_per_node(variables[tasks])
    rank = _read_number(variables, "SLURM_PROCID", rank)
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"):
        if variables.get(name):
            world_size = _read_number(variables, name, world_size)
            break
    if world_size is not None and sum(sizes) != world_size:
        raise _contradiction(
            f"{tasks}={variables[tasks]!r} are {counted(sum(sizes), 'task')}, but the world has "
            f"{counted(world_size, 'rank')}"
        )
    node, local = (_number(variables, name) for name in SLURM_PLACE)
    if not 0 <= node < len(sizes) or not 0 <= local < sizes[node]:
        raise _contradiction(
            f"SLURM_NODEID={node} and SLURM_LOCALID={local} are no place in {tasks}={variables[tasks]!r}"
        )
    place = Place(local, sizes[node], node, len(sizes))
    return _Step(place, _dealt(variables, sizes, place, rank))


def _dealt(
    variables: Mapping[str, str], sizes: Sequence[int], place: Place, rank: int | None
) -> tuple[int, ...] | None:
    """Return the node of every task, if the distribution is known and puts this one where it is."""
    text = variables.get("SLURM_DISTRIBUTION", "")
    method = text.split(":")[0].split(",")[0].lower()
    kind, _, plane = method.partition("=")
    if kind == "plane":
        plane = plane or variables.get("SLURM_DIST_PLANESIZE", "")
        run = int(plane) if plane.isdigit() and int(plane) else None
        if run is None:
            raise LaunchError(f"Nodes: SLURM_DISTRIBUTION={text!r} names no plane size. Set SLURM_DIST_PLANESIZE.")
    elif kind in ("", "*", "block", "pack", "nopack", "unknown"):
        run = None
    elif kind == "cyclic":
        run = 1
    else:
        return None
    dealt = dealt_tasks(sizes, run)
    if rank is None or not 0 <= rank < len(dealt):
        raise _contradiction(
            f"rank {rank} is no task of {counted(len(dealt), 'task')}"
            if rank is not None
            else "SLURM_NODEID is set, but SLURM_PROCID is missing"
        )
    there = (dealt[rank], dealt[:rank].count(dealt[rank]))
    if there == (place.node_rank, place.local_rank):
        return dealt
    if kind in ("", "*", "unknown"):
        return None
    raise _contradiction(
        f"SLURM_DISTRIBUTION={text!r} puts rank {rank} on node {there[0]} at {there[1]}, but SLURM_NODEID="
        f"{place.node_rank} and SLURM_LOCALID={place.local_rank}"
    )


# -- values ------------------------------------------------------------------------------------------------------------


def _complete(variables: Mapping[str, str], names: Sequence[str]) -> bool:
    """Tell whether all of several variables are set; refuse some of them."""
    found = [name for name in names if variables.get(name)]
    if found and len(found) < len(names):
        missing = [name for name in names if name not in found]
        raise LaunchError(
            f"Nodes: {listed(found)} set, but {listed(missing)} missing. Set all of {listed(names)}, or none.",
            found=tuple(found),
            missing=tuple(missing),
        )
    return bool(found)


def _read_number(variables: Mapping[str, str], name: str, given: int | None) -> int | None:
    """Return a number given, or the variable's; refuse two that differ."""
    if not variables.get(name):
        return given
    number = _number(variables, name)
    if given is not None and given != number:
        raise _contradiction(f"{name}={number}, but it is {given} in the running world")
    return number


def _number(variables: Mapping[str, str], name: str) -> int:
    value = variables[name]
    if not re.fullmatch(r"[0-9]+", value.strip(), re.ASCII):
        raise LaunchError(f"Nodes: {name}={value!r} is no number of at least 0.", name=name, value=value)
    return int(value)


def _contradiction(what: str) -> LaunchError:
    return LaunchError(
        f"Nodes: {what}. Correct or unset the launcher's variables; without them the ranks ask each other.", found=what
    )
