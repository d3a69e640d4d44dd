"""A file written for the seed's API runs as it is."""

import pytest

from tests.workers import free_port
from tests.worlds import torch_pool


def _on_rank(rank, world, method):
    import torch.distributed as dist

    from tests.torch_backend import seed_style

    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world)
    try:
        return seed_style.main(rank, world)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("world", [4, 8])
def test_a_trainer_written_for_the_seed_runs_without_change_of_its_calls(world):
    method = f"tcp://127.0.0.1:{free_port()}"
    calls = [(rank, world, method) for rank in range(world)]
    assert torch_pool.run(_on_rank, calls, timeout_s=100) == [True] * world
