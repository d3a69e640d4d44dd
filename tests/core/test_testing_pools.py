"""Workers of `dualmesh.testing` pools: reused while they serve well, replaced where they do not."""

import os
import sys
from pathlib import Path

import pytest

from dualmesh.testing.pools import Pool, retire
from tests.worlds import torch_world


def pid_of(is_worn):
    if is_worn:
        retire()
    return os.getpid()


def test_a_worn_worker_is_replaced_before_its_next_call_and_the_others_serve_on():
    pool = Pool({})
    try:
        first = pool.run(pid_of, [(True,), (False,)])
        second = pool.run(pid_of, [(False,), (False,)])
        third = pool.run(pid_of, [(False,), (False,)])
    finally:
        pool.close()
    assert second[0] != first[0]
    assert second[1] == first[1]
    assert third == second


def keeping(count):
    """Return this process, after something kept so many groups of its world for good."""
    import torch.distributed as dist

    sys.kept_groups = [*getattr(sys, "kept_groups", ()), *(dist.new_group() for _ in range(count))]
    return os.getpid()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system does not say which threads a process runs")
def test_a_torch_process_that_keeps_the_groups_of_ended_worlds_is_replaced():
    few, many, fresh = (torch_world(keeping, count, world_size=2) for count in (2, 30, 0))
    assert many == few
    assert not set(fresh) & set(many)
