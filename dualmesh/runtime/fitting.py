"""Which ranks of a session a state is over, and its spec fitted to them.

How a spec becomes a topology is in `resolve`; registering the state is in `init`.
"""

from collections.abc import Iterable
from math import prod
from typing import Any

from dualmesh._support.checks import check_items
from dualmesh.errors import ArgumentError, SpecError, listed
from dualmesh.topology.federation import FederatedSpec
from dualmesh.topology.group_topology import GroupSpec
from dualmesh.topology.resolve import whole
from dualmesh.topology.spec import TopologySpec
from dualmesh.topology.topology import Topology

AnySpec = TopologySpec | GroupSpec | FederatedSpec


def places_of(ranks: Iterable[int] | None, world_size: int) -> tuple[int, ...] | None:
    """Return the session ranks of a state in grid order, or None for all of them in order. *Pure.*

    Raises:
        ArgumentError: They are not different ranks of the session.
    """
    if ranks is None:
        return None
    places = check_items("init_parallel_state", "ranks", ranks)
    numbers = [whole(rank) for rank in places]
    world = range(world_size)
    bad = [rank for rank, number in zip(places, numbers, strict=True) if number not in world]
    if bad or len(set(numbers)) < len(places) or not places:
        raise ArgumentError(
            f"init_parallel_state: ranks={places!r}. They must be different ranks of the session, "
            f"0..{world_size - 1}, at least one. Not allowed: {_fault(places, bad)}.",
            ranks=places,
        )
    kept = tuple(number for number in numbers if number is not None)
    return None if kept == tuple(range(world_size)) else kept


def _fault(places: tuple[Any, ...], bad: list[Any]) -> str:
    if not places:
        return "none at all"
    return str(listed(bad)) if bad else "naming a rank twice"


def fit_spec(name: str, spec: AnySpec, places: tuple[int, ...] | None, world_size: int) -> Topology:
    """Return the topology of a spec over the ranks that the state is over; `places`: see `places_of`. *Pure.*

    Raises:
        SpecError: The sizes do not fit their number.
        ArgumentError: From its `rank_offset` on the session has too few ranks.
    """
    size = world_size if places is None else len(places)
    try:
        if isinstance(spec, FederatedSpec):
            return spec.resolve(size).group_spec().resolve(size)
        if places is not None or isinstance(spec, GroupSpec) or not whole(spec.rank_offset):
            return spec.resolve(size)
    except SpecError as error:
        over = "" if places is None else f" over ranks={places!r}, which are its world"
        raise SpecError(f"init_parallel_state: {name!r}{over}: {error}", **vars(error)) from None
    sizes = [whole(size) or 0 for size in spec.axes.values()]
    rest = world_size - spec.rank_offset
    topology = spec.resolve(max(rest, 1) if -1 in sizes else max(prod(sizes), 1))
    if topology.world_size > rest:
        raise ArgumentError(
            f"init_parallel_state: {name!r} has {topology.world_size} ranks from rank {spec.rank_offset}, but the "
            f"session has {world_size} ranks. Lower rank_offset or the sizes.",
            name=name,
        )
    return topology
