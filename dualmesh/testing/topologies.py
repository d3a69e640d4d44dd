"""Topologies to test over: every split of a world, by name, for pytest's and absl's parametrisation.

What a split means is in `dualmesh.topology.parallel_spec`.
"""

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

from dualmesh.errors import ArgumentError
from dualmesh.runtime.fitting import AnySpec
from dualmesh.topology.parallel_spec import parallel_spec
from dualmesh.topology.rank_groups import RankGroups
from dualmesh.topology.spec import TopologySpec
from dualmesh.topology.topology import Topology

AnyTopology = AnySpec | RankGroups | Topology

USUAL = ("dp_replicate", "dp_shard", "ulysses", "cp", "tp")


def splits(world_size: int, axes: Sequence[str] = USUAL) -> dict[str, TopologySpec]:
    """Return every way to split a world over the usual axes, by name: "dp_shard2_tp4". *Pure.*

    >>> list(splits(4, ("dp_shard", "tp")))
    ['tp4', 'dp_shard2_tp2', 'dp_shard4']
    """
    unknown = [axis for axis in axes if axis not in (*USUAL, "pp")]
    if unknown:
        raise ArgumentError(f"splits: axis {unknown[0]!r} is not one of {', '.join((*USUAL, 'pp'))}.", axis=unknown[0])
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    grids = [grid for grid in product(sizes, repeat=len(axes)) if prod(grid) == world_size]
    found = {}
    for grid in grids:
        settings: dict[str, Any] = {f"{axis}_size": size for axis, size in zip(axes, grid, strict=True)}
        name = "_".join(f"{axis}{size}" for axis, size in zip(axes, grid, strict=True) if size > 1)
        found[name or "one"] = parallel_spec(**settings)
    return found


def absl_cases(topologies: dict[str, TopologySpec]) -> list[tuple[str, TopologySpec]]:
    """Return topologies for `@parameterized.named_parameters(*absl_cases(...))` of absl.testing. *Pure.*

    The test method takes one topology. For pytest: `@pytest.mark.parametrize("topology", t.values(), ids=t)`.
    """
    return [(f"_{name}", spec) for name, spec in topologies.items()]


def in_world(
    where: str, topology: AnyTopology, world_size: int | None, ranks: Sequence[int] | None = None
) -> tuple[Any, int]:
    """Return a topology's spec, and how many ranks the world has in which it is used. *Pure.*

    Args:
        where: Who asks, for errors.
        topology: What the user gave.
        world_size: What the user gave; None: as many ranks as the topology needs.
        ranks: The ranks that the topology is over; None: the first ones, from its offset on.

    Raises:
        ArgumentError: The topology leaves the number of ranks open.
    """
    spec = topology.spec if isinstance(topology, Topology) else topology
    if world_size is not None:
        return spec, world_size
    if ranks is not None:
        return spec, max(ranks, default=0) + 1
    if not isinstance(spec, TopologySpec) or -1 in dict(spec.base).values():
        raise ArgumentError(f"{where}: {spec!r} leaves the number of ranks open. Give world_size=.", spec=spec)
    return spec, spec.rank_offset + prod(size for _, size in spec.base)
