"""Topologies at scale against numpy in the same run. `python -m tests.bench.topology_scale`.

Answers about one rank are timed alone (numpy would need a table of the world); partitions against numpy's reshape and
transpose of the same array.
"""

import time
import tracemalloc

import numpy as np

import dualmesh as dm
from tests.bench.timing import interleaved, repeated, table

WORLDS = (16_384, 131_072, 1_048_576)


def spec_of() -> dm.TopologySpec:
    """Return pipeline, replicas, shards, sequence and tensor parallelism with experts; shards are inferred."""
    return dm.parallel_spec(pp_size=4, dp_replicate_size=4, dp_shard_size=-1, ulysses_size=4, tp_size=8, ep_size=32)


def by_numpy(topology: dm.Topology, axis: tuple[str, ...]) -> "np.ndarray[tuple[int, ...], np.dtype[np.int64]]":
    """Return the partition of base axes by reshaping and transposing a table of the world."""
    names = list(topology.sizes)
    places = [names.index(name) for name in axis]
    rest = [place for place in range(len(names)) if place not in places]
    world = np.arange(topology.world_size).reshape(list(topology.sizes.values()))
    return world.transpose(rest + places).reshape(-1, topology.size(axis))


def measure(world_size: int) -> None:
    """Print the tables of one world size."""
    spec = spec_of()
    topology = spec.resolve(world_size)
    names = {"spec": spec, "topology": topology, "by_numpy": by_numpy, "rank": world_size - 7, "world": world_size}
    alone = {
        "resolve": "spec.resolve(world)",
        "index('dp_shard_sp', rank)": "topology.index('dp_shard_sp', rank)",
        "index('ep', rank)": "topology.index('ep', rank)",
        "ranks('ep', rank), 32 ranks": "topology.ranks('ep', rank)",
        "coords(rank)": "topology.coords(rank)",
    }
    seconds = interleaved({row: repeated(code, names) for row, code in alone.items()}, number=200)
    table(f"{world_size} ranks: one rank", seconds, {})
    rows, floors = {}, {}
    for axis in (("tp",), ("dp_shard",), ("dp_replicate", "dp_shard"), ("ulysses", "pp")):
        ours, floor = f"partition({axis})", f"numpy {axis}"
        np.testing.assert_array_equal(np.sort(topology.partition(axis), 0), np.sort(by_numpy(topology, axis), 0))
        rows |= {floor: f"by_numpy(topology, {axis})", ours: f"topology.partition({axis})"}
        floors[ours] = floor
    seconds = interleaved({row: repeated(code, names) for row, code in rows.items()}, number=3, repeats=9)
    table(f"{world_size} ranks: all groups", seconds, floors)
    tracemalloc.start()
    spec.resolve(world_size).coords(world_size - 1)
    print(f"  resolve and coords allocate at most {tracemalloc.get_traced_memory()[1]} bytes")
    tracemalloc.stop()


def planning() -> None:
    """Print what one rank's part of a transfer of 1,000 arrays between topologies of 1,024 ranks takes."""
    source = dm.TopologySpec({"fsdp": 128, "tp": 8}).resolve(1024)
    target = dm.TopologySpec({"dp": 64, "tp": 16}).resolve(1024)
    arrays = {f"layers.{i}.w": ((4096 + 1024 * (i % 8), 4096), 2) for i in range(1000)}
    began = time.process_time()
    plan = dm.plan_transfer(arrays, src=(source, dm.P(("tp", "fsdp"))), dst=(target, dm.P("tp")))
    sizes = len(plan.receives(777)), len(plan.sends(777))
    seconds = time.process_time() - began
    print(f"  one rank's part of 1,000 arrays between 1,024 ranks: {seconds:.2f} s, {sizes} messages")


if __name__ == "__main__":
    for size in WORLDS:
        measure(size)
    planning()
