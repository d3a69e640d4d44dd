"""Topologies to test over: every split of a world, by name, for pytest's and absl's parametrisation.

What a split means is in `dualmesh.usual`.
"""

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

from dualmesh.errors import ArgumentError
from dualmesh.spec import TopologySpec
from dualmesh.topology import Topology
from dualmesh.usual import parallel_spec

AnyTopology = TopologySpec | Topology

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


def resolved(topology: AnyTopology, world_size: int | None) -> Topology:
    """Return a topology for a spec, over as many ranks as its sizes multiply to unless said otherwise. *Pure.*"""
    if isinstance(topology, Topology):
        return topology
    sizes = [size for _, size in topology.base]
    if world_size is None and -1 in sizes:
        raise ArgumentError(f"dualmesh.testing: {topology!r} leaves a size open. Give world_size=.", spec=topology)
    return topology.resolve(prod(sizes) if world_size is None else world_size)
