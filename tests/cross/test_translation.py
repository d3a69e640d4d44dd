"""One spec, rank by rank: DTensor's block, JAX's shard and `dm.local_slices` are the same, and the way back too."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.partition_spec import canonical, slices_of
from tests.core.all_specs import TOPOLOGIES, separate_specs, whole_specs
from tests.cross.redistributions import layouts, some_ways, wrong_ways
from tests.worlds import jax_world, torch_world, worlds

SLOW_S = 400.0  # eight processes on a busy machine
SHAPE = (24, 48)


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
    topology, specs = TOPOLOGIES[name], whole_specs(TOPOLOGIES[name])
    ranks = torch_world(cut_by_torch, name, specs, world_size=topology.world_size, timeout_s=SLOW_S)
    (in_jax,) = jax_world(cut_by_jax, name, specs, world_size=topology.world_size, timeout_s=SLOW_S)
    assert len(specs) > 10
    for place, spec in enumerate(specs):
        wanted = expected(name, spec)
        lies, said, back = zip(*(rank[place] for rank in ranks), strict=True)
        assert list(lies) == list(said) == wanted, spec
        assert in_jax[place][0] == in_jax[place][1] == wanted, spec
        assert {*back, in_jax[place][2]} == {canonical(topology, spec)}, spec


def there_and_back(name, specs):
    """Return the specs, sums included, that do not come back from DTensor's placements as they went.

    An axis of a view that is also one of the grid comes back under the grid's name, and lies on the grid's mesh then.
    """
    state, wrong = dm.init_parallel_state(spec=TOPOLOGIES[name].spec), []
    for spec in specs:
        x = dm.shard_local(np.zeros((1, 1)), spec)
        mesh, placements = state.sharding(spec)
        back = state.spec_of(x)
        again = dm.shard_local(np.zeros((1, 1)), back)
        is_same = again.device_mesh != mesh or tuple(again.placements) == tuple(placements) == tuple(x.placements)
        if not is_same or {back, state.spec_of(again)} != {canonical(state.topology, spec)}:
            wrong.append((spec, placements, back, again.placements))
    return wrong


@pytest.mark.parametrize("name", ["2x2x2", "2x3", "view", "inner view"])
def test_placements_read_back_are_the_spec_with_its_sums(name):
    """Its twin on JAX, where sums are `unreduced`, is in `tests.jax_backend.test_unreduced`."""
    topology = TOPOLOGIES[name]
    specs = separate_specs(topology)
    assert sum(bool(spec.partial) for spec in specs) > 5
    for wrong in torch_world(there_and_back, name, specs, world_size=topology.world_size, timeout_s=SLOW_S):
        assert wrong == []


def test_axes_of_size_one_split_nothing_on_either_framework():
    specs = separate_specs(TOPOLOGIES["1x4x1"])
    specs = [spec for spec in specs if "b" in spec.partial or not spec.partial]
    for wrong in torch_world(there_and_back, "1x4x1", specs, world_size=4, timeout_s=SLOW_S):
        assert wrong == []
    wholes = whole_specs(TOPOLOGIES["1x4x1"])[::3]
    ranks = torch_world(cut_by_torch, "1x4x1", wholes, world_size=4, timeout_s=SLOW_S)
    (in_jax,) = jax_world(cut_by_jax, "1x4x1", wholes, world_size=4, timeout_s=SLOW_S)
    for place, spec in enumerate(wholes):
        wanted = expected("1x4x1", spec)
        assert [rank[place][0] for rank in ranks] == in_jax[place][0] == wanted, spec
        assert {*(rank[place][2] for rank in ranks), in_jax[place][2]} == {canonical(TOPOLOGIES["1x4x1"], spec)}


WAYS = {"2x3": 200, "2x2x2": 100, "view": 60, "inner view": 50}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("backend", ["sim", "torch", "jax"])
def test_from_any_spec_to_any_other_the_blocks_are_those_of_the_other(backend, name):
    ways, size = some_ways(name, WAYS[name]), TOPOLOGIES[name].world_size
    assert {one for one, _ in ways} == {other for _, other in ways} == {*layouts(name)}
    for by_exchange in (False, True):
        for wrong in worlds()[backend](wrong_ways, name, ways, by_exchange, world_size=size, timeout_s=SLOW_S):
            assert wrong == []
