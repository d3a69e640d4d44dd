"""One spec, rank by rank: DTensor's block, JAX's shard and `dm.local_slices` are the same, and the way back too."""

import functools

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import DifferenceError
from dualmesh.sharding.partition_spec import canonical, slices_of
from dualmesh.testing import assert_sharded_as
from tests.core.all_specs import TOPOLOGIES, separate_specs, whole_specs
from tests.cross.redistributions import SIZES, layouts, some_ways, wrong_ways
from tests.worlds import worlds

SLOW_S = 400.0  # eight processes on a busy machine
NAMES = ("2x2x2", "2x3", "view", "inner view")
WAYS = {"2x3": 200, "2x2x2": 100, "view": 60, "inner view": 50}
WHOLE = np.arange(24 * 48, dtype=np.int32).reshape(24, 48)


def wholes(name):
    """Return the specs without sums that are looked at."""
    return whole_specs(TOPOLOGIES[name])[:: 3 if name == "1x4x1" else 1]


def sums(name):
    """Return the specs that are read back from placements, with sums."""
    specs = separate_specs(TOPOLOGIES[name])
    return [spec for spec in specs if "b" in spec.partial or not spec.partial] if name == "1x4x1" else specs


def expected(name, spec):
    """Return the ((start, stop), ...) of every rank."""
    topology = TOPOLOGIES[name]
    return [bounds(slices_of(topology, spec, WHOLE.shape, rank)) for rank in range(topology.world_size)]


def bounds(slices):
    return tuple((one.start, one.stop) for one in slices)


def distributed(state, spec):
    """Return an array laid out by the framework's own function from what the state says of a spec."""
    if state.backend == "jax":
        import jax

        return jax.device_put(WHOLE, state.sharding(spec))
    import torch
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(torch.from_numpy(WHOLE), *state.sharding(spec), src_data_rank=None)


def cut(state, specs):
    """Return what lies elsewhere than specs say; and by spec what `dm.local_slices` says, and the spec read back."""
    arrays = {repr(spec): distributed(state, spec) for spec in specs}
    said = None
    try:
        plan = dict(zip(arrays, specs, strict=True))
        assert_sharded_as(arrays, plan, state=state, values=dict.fromkeys(arrays, WHOLE), rtol=0)
    except DifferenceError as error:
        said = str(error)
    slices = [{rank: bounds(dm.local_slices(spec, WHOLE.shape, rank)) for rank in state.local_ranks} for spec in specs]
    return said, slices, [state.spec_of(x) for x in arrays.values()]


def there_and_back(state, specs):
    """Return the specs, sums included, that do not come back from DTensor's placements as they went.

    An axis of a view that is also one of the grid comes back under the grid's name, and lies on the grid's mesh then.
    """
    wrong = []
    for spec in specs:
        x = dm.shard_local(np.zeros((1, 1)), spec)
        mesh, placements = state.sharding(spec)
        back = state.spec_of(x)
        again = dm.shard_local(np.zeros((1, 1)), back)
        is_same = again.device_mesh != mesh or tuple(again.placements) == tuple(placements) == tuple(x.placements)
        if not is_same or {back, state.spec_of(again)} != {canonical(state.topology, spec)}:
            wrong.append((spec, placements, back, again.placements))
    return wrong


def everything(name):
    """Return what one world over a topology finds: cut, read back, and on which ways an array went wrong."""
    state, found = dm.init_parallel_state(spec=TOPOLOGIES[name].spec), {}
    if state.backend != "sim":
        found["cut"] = cut(state, wholes(name))
    if state.backend == "torch":
        found["read back"] = there_and_back(state, sums(name))
    if name in WAYS:
        ways = some_ways(name, WAYS[name])
        found["wrong ways"] = [wrong_ways(state, ways, SIZES[name], by_exchange) for by_exchange in (False, True)]
    return found


@functools.cache
def found(backend, name):
    """Return what every process found, in a world that all tests share."""
    return worlds()[backend](everything, name, world_size=TOPOLOGIES[name].world_size, timeout_s=SLOW_S)


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_holds_the_same_block_in_torch_in_jax_and_in_integers(name):
    assert len(wholes(name)) > 10
    check_cuts(name)


def check_cuts(name):
    topology, specs = TOPOLOGIES[name], wholes(name)
    for backend in ("torch", "jax"):
        said, slices, back = zip(*(one["cut"] for one in found(backend, name)), strict=True)
        assert set(said) == {None}
        for place, spec in enumerate(specs):
            lies = {rank: own for process in slices for rank, own in process[place].items()}
            assert lies == dict(enumerate(expected(name, spec))), spec
            assert {process[place] for process in back} == {canonical(topology, spec)}, spec


@pytest.mark.parametrize("name", NAMES)
def test_placements_read_back_are_the_spec_with_its_sums(name):
    """Its twin on JAX, where sums are `unreduced`, is in `tests.jax_backend.test_unreduced`."""
    assert sum(bool(spec.partial) for spec in sums(name)) > 5
    assert [one["read back"] for one in found("torch", name)] == [[]] * TOPOLOGIES[name].world_size


def test_axes_of_size_one_split_nothing_on_either_framework():
    assert [one["read back"] for one in found("torch", "1x4x1")] == [[]] * 4
    check_cuts("1x4x1")


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("backend", ["sim", "torch", "jax"])
def test_from_any_spec_to_any_other_the_blocks_are_those_of_the_other(backend, name):
    ways = some_ways(name, WAYS[name])
    assert {one for one, _ in ways} == {other for _, other in ways} == {*layouts(name)}
    for one in found(backend, name):
        assert one["wrong ways"] == [[], []]
