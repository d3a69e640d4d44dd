"""One spec, rank by rank: DTensor's block, JAX's shard and `dm.local_slices` are the same, and the way back too."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.partition_spec import canonical, slices_of
from tests.core.all_specs import TOPOLOGIES, all_specs
from tests.worlds import jax_world, torch_world

SLOW_S = 400.0  # eight processes on a busy machine
SHAPE = (24, 48)


def specs_of(name):
    """Return every whole spec: each axis left out, or in one of two dims, in any order.

    Torch refuses by name to mix axes of a view with those that it spans, so such specs are left out.
    """
    views = TOPOLOGIES[name].spec.views.values()
    mixed = [(set(view.axes), set(view.over)) for view in views]
    specs = [spec for spec in all_specs(TOPOLOGIES[name]) if not spec.partial]
    return [spec for spec in specs if not any(own & {*spec.axes} and over & {*spec.axes} for own, over in mixed)]


def expected(name, spec):
    """Return the ((start, stop), ...) of every rank."""
    topology = TOPOLOGIES[name]
    return [bounds(slices_of(topology, spec, SHAPE, rank)) for rank in range(topology.world_size)]


def bounds(slices):
    return tuple((one.start, one.stop) for one in slices)


def cut_by_torch(name, specs):
    """Return, per spec: where DTensor's block lies, what `dm.local_slices` says, the spec read back from placements."""
    import torch
    from torch.distributed.tensor import distribute_tensor

    state = dm.init_parallel_state(spec=TOPOLOGIES[name].spec)
    whole = torch.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE)
    found = []
    for spec in specs:
        mesh, placements = state.sharding(spec)
        placed = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        block = placed.to_local()
        first, last = int(block[0, 0]), int(block[-1, -1])
        is_slice = torch.equal(block, whole[first // 48 : last // 48 + 1, first % 48 : last % 48 + 1])
        lies = ((first // 48, last // 48 + 1), (first % 48, last % 48 + 1)) if is_slice else None
        found.append((lies, bounds(dm.local_slices(spec, SHAPE)), state.spec_of(placed)))
    return found


def cut_by_jax(name, specs):
    """Return, per spec: where every rank's shard lies, what `dm.local_slices` says, the spec read back."""
    state = dm.init_parallel_state(spec=TOPOLOGIES[name].spec)
    found = []
    for spec in specs:
        sharding = state.sharding(spec)
        held = sharding.devices_indices_map(SHAPE)
        lies = [
            tuple(part.indices(size)[:2] for part, size in zip(held[device], SHAPE, strict=True))
            for device in state.shared.devices
        ]
        said = [bounds(dm.local_slices(spec, SHAPE, rank)) for rank in range(state.world_size)]
        found.append((lies, said, state.spec_of(sharding)))
    return found


@pytest.mark.parametrize("name", ["2x2x2", "2x3", "view", "inner view"])
def test_every_rank_holds_the_same_block_in_torch_in_jax_and_in_integers(name):
    topology, specs = TOPOLOGIES[name], specs_of(name)
    ranks = torch_world(cut_by_torch, name, specs, world_size=topology.world_size, timeout_s=SLOW_S)
    (in_jax,) = jax_world(cut_by_jax, name, specs, world_size=topology.world_size, timeout_s=SLOW_S)
    assert len(specs) > 10
    for place, spec in enumerate(specs):
        wanted = expected(name, spec)
        lies, said, back = zip(*(rank[place] for rank in ranks), strict=True)
        assert list(lies) == list(said) == wanted, spec
        assert in_jax[place][0] == in_jax[place][1] == wanted, spec
        assert {*back, in_jax[place][2]} == {canonical(topology, spec)}, spec


PAIRS = 24


def laid_out_anew(name, pairs):
    """Return, per pair, what this process' ranks hold after going from the first spec to the second."""
    state = dm.init_parallel_state(spec=TOPOLOGIES[name].spec)
    whole = np.arange(SHAPE[0] * SHAPE[1] * 1.0).reshape(SHAPE)
    found = []
    for one, other in pairs:
        y = dm.reshard(dm.distribute(whole, one), other)
        if state.backend == "torch":
            found.append({state.own_rank(): y.to_local().numpy()})
        else:
            ranks = dict(zip(state.shared.devices, state.members, strict=True))
            found.append({ranks[shard.device]: np.asarray(shard.data) for shard in y.addressable_shards})
    return found


@pytest.mark.parametrize("name", ["2x3", "view"])
def test_from_any_spec_to_any_other_the_blocks_are_those_of_the_other(name):
    specs, draw = specs_of(name), np.random.default_rng(3)
    pairs = [tuple(specs[place] for place in draw.integers(len(specs), size=2)) for _ in range(PAIRS)]
    whole = np.arange(SHAPE[0] * SHAPE[1] * 1.0).reshape(SHAPE)
    size = TOPOLOGIES[name].world_size
    for world in (torch_world, jax_world):
        answers = world(laid_out_anew, name, pairs, world_size=size, timeout_s=SLOW_S)
        for place, (one, other) in enumerate(pairs):
            held = {rank: block for answer in answers for rank, block in answer[place].items()}
            assert len(held) == size
            for rank, block in held.items():
                wanted = whole[slices_of(TOPOLOGIES[name], other, SHAPE, rank)]
                np.testing.assert_array_equal(block, wanted, err_msg=f"{one} -> {other}, rank {rank}")
