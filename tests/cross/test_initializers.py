"""Process-group initializers in running worlds: their groups sum what their ranks hold; they are named states too."""

import functools

import numpy as np
import pytest

import dualmesh as dm
from dualmesh import initializers
from dualmesh.testing import assert_same
from dualmesh.topology.parallel_modes import ParallelMode
from tests.cross.test_fabric import total, values_of
from tests.worlds import worlds

CASES = [
    ("DPGroupInitializer", 2),
    ("TPGroupInitializer", 2),
    ("SPGroupInitializer", 2),
    ("InterNodeGroupInitializer", 2),
    ("IntraNodeGroupInitializer", [3, 0, 1]),
    ("TrainDPGroupInitializer", [2, 3]),
    ("WeightTransferGroupInitializer", [1, 3]),
]


def made(world_size, use_cpu):
    found, known = {}, {}
    for rank in dm.init_distributed().local_ranks:
        for name, extent in CASES:
            made = getattr(initializers, name)(rank, world_size, extent)
            local_rank, size, group, ranks, mode = made.init_dist_group(use_cpu=use_cpu)
            assert mode is made.mode
            summed = None if group is None else total(group, rank, world_size, known)
            found[rank, name] = (local_rank, size, ranks, summed, made.groups.groups)
    return found, dm.get_parallel_state_by_name(made.state_name if not use_cpu else f"{made.state_name}@cpu").axis_names


def through_the_state():
    for rank in dm.init_distributed().local_ranks:
        initializers.DPGroupInitializer(rank, 4, 2).init_dist_group()
    with dm.use_parallel_state("data_parallel:2x2"):
        x = dm.distribute(np.array([1.0, 2.0, 4.0, 8.0], "float32"), dm.P("world"))
        summed = dm.shard_map(lambda x: dm.ops.all_reduce(x, "data_parallel"), dm.P("world"), dm.P("world"))(x)
        return dm.to_numpy(summed)


def everything(world_size):
    """Return what one world finds: the groups by whether they are for the CPU, and sums through the named state."""
    found, backend = {}, dm.init_distributed().backend
    if backend != "sim":
        found["made"] = {use_cpu: made(world_size, use_cpu) for use_cpu in (False, True)[: 1 + (backend == "torch")]}
    if world_size == 4:
        found["summed"] = through_the_state()
    return found


@functools.cache
def found(backend, world_size):
    """Return what every process found, in a world that all tests share."""
    return worlds()[backend](everything, world_size, world_size=world_size)


@pytest.mark.parametrize("world_size", [4, 6, 8])
@pytest.mark.parametrize(("backend", "use_cpu"), [("torch", False), ("torch", True), ("jax", False)])
def test_every_group_sums_the_values_of_its_ranks(backend, use_cpu, world_size):
    value, every = values_of(world_size), {}
    for answers, axes in (one["made"][use_cpu] for one in found(backend, world_size)):
        every.update(answers)
        assert axes == ("weight_transfer", "world")
    assert len(every) == world_size * len(CASES)
    for (rank, _), (local_rank, size, ranks, summed, groups) in every.items():
        mine = next((list(group) for group in groups if rank in group), None)
        if mine is None:
            assert (local_rank, size, ranks, summed) == (None,) * 4
        else:
            assert (local_rank, size, ranks) == (mine.index(rank), len(mine), mine)
            assert summed == sum(value[r] for r in mine)


@pytest.mark.parametrize("backend", ["sim", "torch", "jax"])
def test_groups_are_a_named_state_that_scopes_reach(backend):
    for one in found(backend, 4):
        assert_same(f"sums on {backend}", np.array([5.0, 10.0, 5.0, 10.0], "float32"), one["summed"], rtol=0)


def test_the_modes_are_named_once():
    kinds = [getattr(initializers, name) for name, _ in CASES]
    assert {kind.mode for kind in kinds} == set(ParallelMode) - {ParallelMode.GLOBAL}


def summed_over_halves():
    """Make the groups of a subclass that is written for the source, and add up ranks over them."""
    import torch
    import torch.distributed as dist

    class Halves(initializers.ProcessGroupInitializer):
        def init_dist_group(self, backend="nccl", use_cpu=False):
            for ranks in ([2, 0], [3, 1]):
                self._new_and_update_group_info(ranks, use_cpu, backend)
            return self.local_rank, self.group_world_size, self.process_group, self.ranks_in_group, self.mode

    local_rank, size, group, ranks, mode = Halves(dist.get_rank(), 4).init_dist_group(use_cpu=True)
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total, group=group)
    return local_rank, size, group.rank(), ranks, mode, total.item()


def test_a_subclass_written_for_the_source_communicates_over_its_groups():
    """Its group is a process group in the listed order."""
    for rank, found in enumerate(worlds()["torch"](summed_over_halves, world_size=4)):
        ranks = [[2, 0], [3, 1]][rank % 2]
        place = ranks.index(rank)
        assert found == (place, 2, place, ranks, None, float(sum(ranks)))
