"""Which topologies a command line means: sizes, one line of text, a file, or variables, in a world.

What is then shown of them is decided by each command.
"""

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from dualmesh.config import Configuration
from dualmesh.config.flags import config_from_flags
from dualmesh.errors import ArgumentError, RankError
from dualmesh.pictures.axis_facts import GPUS_PER_NODE
from dualmesh.topology.resolve import positive
from dualmesh.topology.spec import TopologySpec
from dualmesh.topology.topology import Topology


class Selection(NamedTuple):
    """Topologies by name, in a world."""

    topologies: Mapping[str, Topology]
    world_size: int
    gpus_per_node: int


def select_states(values: Any, config: Configuration | None = None) -> Selection:
    """Return what parsed flags mean. *Local.*

    Args:
        values: The parsed flags of a command that takes topologies.
        config: Use this one instead of what the flags name.

    Raises:
        SpecError: Nothing is said, or sizes that do not fit the world.
        ArgumentError: Which world is meant is not said and does not follow.
    """
    named = values["parallel_state"].value if config is None else None
    if config is None:
        config = config_from_flags(values)
    world_size = values["world_size"].value
    if world_size is not None:
        positive("dualmesh", "world_size", world_size)
    size = world_size or config.world_size or _find_world_size(config)
    per_node = values["gpus_per_node"].value
    if per_node is None:
        per_node = config.gpus_per_node or GPUS_PER_NODE
    topologies = config.topologies(size)
    if named is not None:
        topologies = {named: topologies[named]}
    return Selection(topologies, size, positive("dualmesh", "gpus_per_node", per_node))


def chosen_rank(selection: Selection, rank: int | None, command: str) -> int | None:
    """Return a rank that some topology has, or None where none was named. *Pure.*

    Raises:
        RankError: No topology has it.
    """
    if rank is not None and not any(topology.has_rank(rank) for topology in selection.topologies.values()):
        last = selection.world_size - 1
        raise RankError(f"dualmesh {command}: rank {rank} is in no state. Ranks: 0..{last}.", rank=rank)
    return rank


def _find_world_size(config: Configuration) -> int:
    """Return the world that all states fill, where no size is left open."""
    sizes = {name: _infer_sizes(config, name) for name in config.states}
    if None in sizes.values() or len(set(sizes.values())) != 1:
        raise ArgumentError("dualmesh: how large the world is, is not known. Give --world-size.")
    return max(size for size in sizes.values() if size is not None)


def _infer_sizes(config: Configuration, name: str) -> int | None:
    spec = config.states[name].topology_spec()
    if not isinstance(spec, TopologySpec) or config.states[name].ranks is not None:
        return None
    sizes = list(spec.axes.values())
    return None if -1 in sizes else prod(sizes) + spec.rank_offset
