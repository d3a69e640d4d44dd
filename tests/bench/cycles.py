"""States made and cleared without a collective between, while ranks are held up at random: what a rank then holds.

`python -m tests.bench.cycles [CYCLES] [RANKS]`: no error may come, and no column may grow. The short form is a test.
"""

import sys

import dualmesh as dm
from tests.worlds import torch_world

ROWS = 10


def cycles(count, longest_s):
    """Return, after each tenth of the cycles: groups, threads, descriptors, MiB of this rank, keys in the store."""
    import gc
    import os
    import random
    import time

    import torch.distributed as dist

    from dualmesh.backend import discovery
    from dualmesh_torch import private

    rank, size = dist.get_rank(), dist.get_world_size()
    luck, rows = random.Random(rank), []
    store = private.default_store()
    for cycle in range(count):
        state = dm.init_parallel_state(spec=dm.TopologySpec({"a": 2, "b": -1}), name="x")
        assert state.mesh.size() == size
        time.sleep(luck.random() * longest_s)
        dm.clear_parallel_state()
        time.sleep(luck.random() * longest_s)
        if (cycle + 1) % max(1, count // ROWS) == 0:
            discovery.load("torch").pool.finish(30)
            dist.barrier()
            gc.collect()
            time.sleep(0.1)  # threads that have just ended are still counted
            with open("/proc/self/statm") as pages:
                resident = int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
            threads, descriptors = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd"))
            rows.append((len(private.group_names()), threads, descriptors, resident, store.num_keys()))
            dist.barrier()
    return rows


def run(count, ranks, longest_s=0.002):
    """Return the rows of each rank."""
    return torch_world(cycles, count, longest_s, world_size=ranks, timeout_s=60 + count)


if __name__ == "__main__":
    asked = [int(argument) for argument in sys.argv[1:]]
    count, ranks = [*asked, *(10_000, 4)[len(asked) :]]
    for rank, rows in enumerate(run(count, ranks)):
        print(f"rank {rank} of {ranks}, {count} cycles: groups, threads, descriptors, MiB, keys in the store")
        print("\n".join(f"  {row}" for row in rows))
