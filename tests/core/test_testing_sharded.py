"""Where arrays lie, and what every rank's block holds, on every backend."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import DifferenceError, DualmeshError
from dualmesh.testing import assert_sharded_as, run_on

X = np.random.default_rng(5).normal(size=(8, 4))


def shards(lost):
    """Return what is said of a tree in which one array lies as `lost` says."""
    state = dm.init_parallel_state(dp_shard_size=2, tp_size=2)
    plan = dm.ShardingPlan({"layers.*.w": dm.P("tp", "dp_shard"), "bias": dm.P("dp_shard")})
    tree = {
        "layers": [{"w": dm.distribute(X, dm.P("tp", "dp_shard"))}, {"w": dm.distribute(X, lost)}],
        "bias": dm.distribute(X[:, 0], dm.P("dp_shard")),
    }
    try:
        assert_sharded_as(tree, plan, state.topology)
    except DifferenceError as error:
        return str(error)
    return None


@pytest.mark.parametrize("place", ["sim", "torch", "jax_x64"])
def test_right_values_with_lost_shards_are_a_failure(place):
    assert set(run_on(place, shards, dm.P("tp", "dp_shard"), world_size=4)) == {None}
    for rank, said in enumerate(run_on(place, shards, dm.P(), world_size=4)):
        begin = 4 * (rank % 2)
        assert "first difference: layers.1.w: P('tp', 'dp_shard') puts" in said
        assert f"{begin}..{begin + 3} of dim 0 of shape (8, 4) on rank {rank}, which holds 0..7" in said
    for said in run_on(place, shards, dm.P("dp_shard", "tp"), world_size=4)[1:3]:
        assert "layers.1.w" in said


def blocks():
    """Return what is said of arrays over three ranks of four, of other values, and of nothing."""
    state = dm.init_parallel_state(spec=dm.TopologySpec({"a": 3}), ranks=(2, 3, 0), name="three")
    rows = np.arange(12.0).reshape(6, 2)
    x = dm.distribute(rows, dm.P("a"), state=state) if state.is_member else None
    other = rows.copy()
    other[4, 1] += 2.0**-20  # on the last rank of the grid
    said = {}
    for name, (tree, wholes, rtol) in {
        "same": (x, rows, 0),
        "nearly": (x, other, 1e-6),
        "other": ({"w": x}, {"w": other}, None),
        "bits": (x, other, 0),
        "shape": (x, rows[:3], None),
        "dtype": (x, rows.astype(int), None),
        "names": ({"w": x}, {"v": rows}, None),
        "nothing": ({"w": None}, {"w": None}, None),
    }.items():
        try:
            said[name] = assert_sharded_as(tree, dm.P("a"), state=state, values=wholes, rtol=rtol)
        except DualmeshError as error:
            said[name] = f"{type(error).__name__}: {error}"
    return state.local_ranks, said


@pytest.mark.parametrize("place", ["sim", "torch", "jax_x64"])
def test_every_block_is_held_to_its_part_of_the_global_array(place):
    backend = place.removesuffix("_x64")
    begin = f"DifferenceError: assert_sharded_as on {backend}: first difference: "
    for ranks, said in run_on(place, blocks, world_size=4):
        if not ranks:
            assert set(said.values()) == {None}
            continue
        assert said["same"] is said["nearly"] is None
        if 0 in ranks:
            values = f"element (4, 1), rank 0, {9 + 2.0**-20} (expected) and 9.0 ({backend})"
            assert said["other"].startswith(f"{begin}w, {values}")
            assert said["bits"].startswith(f"{begin}the array, {values}")
        else:
            assert said["other"] is said["bits"] is None
        assert f"the array: shape (3, 2) (expected) and (6, 2) ({backend}) differ" in said["shape"]
        assert "dtype int64 (expected) and float64" in said["dtype"]
        assert "values: ['v'] (expected) and ['w']" in said["names"]
        assert "ArgumentError: assert_sharded_as: {'w': None} holds no array" in said["nothing"]
