"""One process as one rank of a large world: torch's fake backend, in a worker process."""

import warnings

from tests.workers import Pool

pool = Pool({"OMP_NUM_THREADS": "1"})


def fake_world(fn, *args, rank, world_size):
    """Run `fn(*args)` in a worker that is one rank of a fake world."""
    return pool.run(_in_fake, [(fn, args, rank, world_size)])[0]


def _in_fake(fn, args, rank, world_size):
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import dualmesh as dm

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        return fn(*args)
    finally:
        dm.clear_parallel_state()
        dist.destroy_process_group()
