"""The planned placements against DTensor itself: one process is every rank in turn (torch's fake backend)."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.sharding.partition_spec import slices_of
from dualmesh.sharding.placements import placements_of, spec_for
from dualmesh.testing.places import place_of
from dualmesh.topology.layout import Digit
from tests.core.all_specs import TOPOLOGIES, all_specs, grid, whole_specs
from tests.worlds import torch_pool

SHAPE = (24, 48)


def local_blocks(cases, world_size):
    """Return, per case (mesh sizes, placements as data), what DTensor gives every rank of arange(SHAPE)."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def native(placement):
        kind, *numbers = placement
        return (
            {"Replicate": Replicate, "Shard": Shard}[kind](*numbers)
            if kind != "StridedShard"
            else _StridedShard(numbers[0], split_factor=numbers[1])
        )

    array = torch.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE)
    blocks = [[] for _ in cases]
    for rank in range(world_size):
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        try:
            for case, (sizes, placements) in enumerate(cases):
                mesh = init_device_mesh("cpu", sizes)
                placed = distribute_tensor(array, mesh, [native(p) for p in placements], src_data_rank=None)
                blocks[case].append(placed.to_local().numpy().copy())
        finally:
            dist.destroy_process_group()
    return blocks


def as_data(placement):
    """Return a placement as its class name and numbers."""
    return (type(placement).__name__, *vars(placement).values())


def test_dtensor_gives_every_rank_the_slice_that_the_core_says_on_a_mesh_with_merged_dims():
    """On the meshes that states make, real ranks are asked in `tests.cross.test_translation`."""
    array = np.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE)
    topology, mesh = TOPOLOGIES["2x2x2"], (Digit(2, 4), Digit(4, 1))
    whole = [spec for spec in all_specs(topology) if not spec.partial and len(spec.axes) > 1]
    specs = [spec for spec in whole if spec.entries[0] in (("b", "a", "c"), ("b", "c", "a"))]
    planned = [placements_of(topology, spec, mesh) for spec in specs]
    cases = [(tuple(d.size for d in mesh), [as_data(p) for p in placements]) for placements in planned]
    (found,) = torch_pool.run(local_blocks, [(cases, topology.world_size)])
    assert len(specs) > 1
    for spec, placements, blocks in zip(specs, planned, found, strict=True):
        for rank, block in enumerate(blocks):
            wanted = array[slices_of(topology, spec, SHAPE, rank)]
            np.testing.assert_array_equal(block, wanted, err_msg=f"{spec} {rank}")
        assert placements_of(topology, spec_for(topology, placements, mesh), mesh) == placements


def places(cases):
    """Return, per case (mesh sizes, placements as data, index on the mesh), where DTensor says the block lies.

    Checkpoints of DCP ask this, and it is where a layout against mesh order could get lost.
    """
    from torch.distributed.tensor import Replicate, Shard, _utils
    from torch.distributed.tensor.placement_types import _StridedShard

    asked = getattr(_utils, "_compute_local_shape_and_global_offset", None)
    if asked is None:
        return None

    def native(kind, *numbers):
        if kind == "StridedShard":
            return _StridedShard(numbers[0], split_factor=numbers[1])
        return {"Replicate": Replicate, "Shard": Shard}[kind](*numbers)

    return [asked(SHAPE, sizes, index, [native(*one) for one in placements])[:2] for sizes, placements, index in cases]


def test_a_checkpoint_is_told_where_every_block_lies_in_every_layout():
    for name in ("2x2x2", "2x3", "view"):
        topology, mesh = TOPOLOGIES[name], grid(TOPOLOGIES[name])
        asked = [(spec, rank) for spec in whole_specs(topology) for rank in range(topology.world_size)]
        cases = []
        for spec, rank in asked:
            planned = [as_data(one) for one in placements_of(topology, spec, mesh)]
            cases.append(([d.size for d in mesh], planned, [rank // d.stride % d.size for d in mesh]))
        (found,) = torch_pool.run(places, [(cases,)])
        if found is None:
            pytest.skip("this torch does not say where a block lies in a function that is known here")
        for (spec, rank), (shape, start) in zip(asked, found, strict=True):
            wanted = slices_of(topology, spec, SHAPE, rank)
            assert tuple(start) == tuple(one.start for one in wanted), (name, spec, rank)
            assert tuple(shape) == tuple(one.stop - one.start for one in wanted), (name, spec, rank)


def redistributing():
    """Return what torch logs while dualmesh lays arrays out anew, and while the caller does."""
    import logging

    import torch
    from torch.distributed.tensor import Replicate

    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    logger.addHandler(handler)
    try:
        dm.init_parallel_state(spec=dm.TopologySpec({"a": 2, "b": 2}))
        x = dm.distribute(torch.arange(16.0).reshape(4, 4), dm.P(("b", "a")))
        dm.constrain(x, dm.P())
        values = dm.to_numpy(x).ravel().tolist()
        own = len(said)
        y = dm.distribute(torch.arange(16.0).reshape(4, 4), dm.P(("a", "b")))
        y.redistribute(placements=[Replicate(), Replicate()])
    finally:
        logger.removeHandler(handler)
    return values, own, ["sequential all_gather" in one for one in said]


def test_torch_advises_how_to_redistribute_for_calls_of_the_user_only():
    # Torch advises once in a process: in processes of this test's own.
    place = place_of("torch", env={"OMP_NUM_THREADS": "1"}, processes="per rank")
    for values, own, said in place.run(redistributing, world_size=4):
        assert values == [float(n) for n in range(16)]
        assert own == 0
        assert said == [True]
