"""DTensor's left-to-right splitting, simulated in numpy, is the judge of every placement."""

import itertools

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import ShardingError, StateWarning, UnknownAxisError
from dualmesh.sharding.partition_spec import canonical, slices_of
from dualmesh.sharding.placements import (
    Partial,
    Replicate,
    Shard,
    StridedShard,
    array_mesh,
    placements_of,
    spec_for,
)
from dualmesh.topology.layout import Digit
from tests.core.all_specs import TOPOLOGIES, all_specs, grid


def held(array, placements, mesh, position):
    """Return what a rank holds when each mesh dim in turn cuts what those before it left."""
    for placement, (size, stride) in zip(placements, mesh, strict=True):
        if isinstance(placement, Shard | StridedShard):
            parts = placement.split_factor if isinstance(placement, StridedShard) else 1
            index = position // stride % size
            pieces = [np.split(part, size, placement.dim)[index] for part in np.split(array, parts, placement.dim)]
            array = np.concatenate(pieces, placement.dim)
    return array


def summed_over(placements, mesh, position):
    """Return which ranks' values are summed with a rank's."""
    ranks = [position]
    for placement, (size, stride) in zip(placements, mesh, strict=True):
        if isinstance(placement, Partial):
            starts = [rank - rank // stride % size * stride for rank in ranks]
            ranks = [start + step * stride for start in starts for step in range(size)]
    return sorted(ranks)


def check(topology, spec, mesh):
    """Check a spec on a mesh, rank by rank and back."""
    shape = (24, 24)
    array = np.arange(24 * 24).reshape(shape)
    placements = placements_of(topology, spec, mesh)
    for position in range(topology.world_size):
        expected = array[slices_of(topology, spec, shape, position)]
        np.testing.assert_array_equal(held(array, placements, mesh, position), expected, err_msg=repr(spec))
        assert summed_over(placements, mesh, position) == sorted(topology.ranks(spec.partial, position))
    assert spec_for(topology, placements, mesh) == canonical(topology, spec)
    assert placements_of(topology, canonical(topology, spec), mesh) == placements
    return placements


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_spec_gives_each_rank_its_slice_and_comes_back(name):
    topology = TOPOLOGIES[name]
    mesh = grid(topology)
    specs = all_specs(topology)
    assert len({check(topology, spec, mesh) for spec in specs}) > 1
    assert len(specs) > 5


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_spec_has_placements_on_the_smallest_mesh_that_serves_it(name):
    topology = TOPOLOGIES[name]
    for spec in all_specs(topology):
        mesh = array_mesh(topology, [spec])
        check(topology, spec, mesh)
        fewer = [m for m in range(len(mesh) - 1) if mesh[m].stride == mesh[m + 1].size * mesh[m + 1].stride]
        for m in fewer:
            merged = Digit(mesh[m].size * mesh[m + 1].size, mesh[m + 1].stride)
            one_less = [*mesh[:m], merged, *mesh[m + 2 :]]
            try:
                placements_of(topology, spec, one_less)
            except ShardingError:
                continue
            check(topology, spec, one_less)


@pytest.mark.parametrize("name", ["2x2x2", "2x3", "view"])
def test_mesh_dims_in_any_order_and_of_size_one_give_the_same_slices(name):
    topology = TOPOLOGIES[name]
    for mesh in itertools.permutations(grid(topology)):
        for spec in all_specs(topology)[::5]:
            check(topology, spec, mesh)
            padded = [Digit(1, 1), *mesh, Digit(1, topology.world_size)]
            placements = check(topology, spec, padded)
            assert placements[0] == placements[-1] == Replicate()


def test_known_placements():
    topology = dm.TopologySpec({"a": 2, "b": 2, "c": 2}, combined={"ab": ("a", "b")}).resolve(8)
    mesh = grid(topology)
    known = {
        dm.P("ab", "c"): (Shard(0), Shard(0), Shard(1)),
        dm.P(("b", "a"), "c"): (StridedShard(0, 2), Shard(0), Shard(1)),
        dm.P(("c", "b", "a")): (StridedShard(0, 4), StridedShard(0, 2), Shard(0)),
        dm.P(("b", "c", "a")): (StridedShard(0, 4), Shard(0), Shard(0)),
        dm.P(("c", "ab")): (StridedShard(0, 2), StridedShard(0, 2), Shard(0)),
        dm.P(None, "b", partial=("c", "a")): (Partial(), Shard(1), Partial()),
        dm.P(): (Replicate(), Replicate(), Replicate()),
    }
    assert {spec: placements_of(topology, spec, mesh) for spec in known} == known


def test_names_come_back_as_users_know_them():
    topology = dm.parallel_spec(dp_replicate_size=2, dp_shard_size=2, ulysses_size=2, ep_size=2).resolve(8)
    mesh = grid(topology)
    known = {
        (Replicate(), Shard(0), Shard(0)): dm.P("dp_shard_sp"),
        (Shard(0), Shard(0), Replicate()): dm.P("dp"),
        (Shard(0), Shard(0), Shard(0)): dm.P("dp_sp"),
        (Replicate(), Shard(1), Shard(0)): dm.P("ulysses", "dp_shard"),
        (Shard(0), StridedShard(0, 2), Shard(0)): dm.P(("dp_replicate", "ulysses", "dp_shard")),
        (Partial(), Partial(), Shard(0)): dm.P("ulysses", partial="dp"),
        (Partial(), Shard(2), Partial()): dm.P(None, None, "dp_shard", partial=("dp_replicate", "ulysses")),
    }
    assert {placements: spec_for(topology, placements, mesh) for placements in known} == known


def test_a_split_factor_that_cuts_a_merged_mesh_dim_names_the_axes_on_both_sides():
    topology = dm.TopologySpec({"c": 2, "a": 2, "b": 2}).resolve(8)
    mesh = [Digit(2, 4), Digit(4, 1)]
    placements = (StridedShard(0, 2), Shard(0))
    assert spec_for(topology, placements, mesh) == dm.P(("a", "c", "b"))
    assert check(topology, dm.P(("a", "c", "b")), mesh) == placements


def test_what_is_said_of_a_mesh_dim_of_size_one_is_no_matter():
    topology = dm.TopologySpec({"a": 2}).resolve(2)
    mesh = [Digit(1, 2), Digit(2, 1), Digit(1, 1)]
    assert spec_for(topology, [StridedShard(0, 2), Shard(0), Partial("max")], mesh) == dm.P("a")


def test_array_mesh_leaves_out_what_no_spec_tells_apart():
    topology = dm.parallel_spec(dp_replicate_size=2, dp_shard_size=2, ulysses_size=2, tp_size=2, ep_size=4)
    topology = topology.resolve(16)
    assert array_mesh(topology, []) == (Digit(16, 1),)
    assert array_mesh(topology, [dm.P("dp_sp")]) == (Digit(8, 2), Digit(2, 1))
    assert array_mesh(topology, [dm.P("dp_shard_sp"), dm.P("tp")]) == (Digit(2, 8), Digit(4, 2), Digit(2, 1))
    assert array_mesh(topology, [dm.P(partial=("tp", "ulysses"))]) == (Digit(4, 4), Digit(4, 1))
    assert array_mesh(dm.TopologySpec({"dp": 1}).resolve(1), [dm.P("dp")]) == (Digit(1, 1),)


def test_more_than_three_mesh_dims_warn_with_the_cost():
    topology = dm.TopologySpec({"a": 2, "b": 2, "c": 2, "d": 2}).resolve(16)
    with pytest.warns(StateWarning, match=r"has 4 dims \(2x2x2x2\).*1 s on 4"):
        array_mesh(topology, [dm.P("a", "c")])
    assert len(array_mesh(topology, [dm.P("a", ("c", "d"))])) == 3


def test_views_that_cut_at_no_common_places_have_no_common_mesh():
    topology = dm.TopologySpec({"dp": 2, "tp": 6}, views={"v": dm.View(("dp", "tp"), {"x": 3, "y": 4})}).resolve(12)
    with pytest.raises(ShardingError, match=r"P\('tp'\), P\('y'\) cut the 12 ranks.*one mesh per view"):
        array_mesh(topology, [dm.P("tp"), dm.P("y")])
    assert len(array_mesh(topology, [dm.P("tp")])) == len(array_mesh(topology, [dm.P("y")])) == 2


def test_what_a_mesh_cannot_say_is_refused_by_name():
    topology = dm.TopologySpec({"a": 2, "b": 2, "c": 2}).resolve(8)
    merged = [Digit(4, 2), Digit(2, 1)]
    with pytest.raises(ShardingError, match=r"P\('a'\) has no placements on the mesh 4x2.*cuts mesh dim 0 of size 4"):
        placements_of(topology, dm.P("a"), merged)
    with pytest.raises(ShardingError, match=r"P\(\('b', 'a'\)\).*cuts mesh dim 0 of size 4.*array_mesh"):
        placements_of(topology, dm.P(("b", "a")), merged)
    with pytest.raises(ShardingError, match="splits over ranks 1 apart, which no mesh dim tells apart"):
        placements_of(topology, dm.P("c"), merged[:1])
    with pytest.raises(UnknownAxisError, match="no axis 'd'"):
        placements_of(topology, dm.P("d"), merged)
    six = dm.TopologySpec({"a": 2, "b": 3}).resolve(6)
    with pytest.raises(ShardingError, match=r"cuts mesh dim 0 of size 3 where that does not divide"):
        placements_of(six, dm.P("b"), [Digit(3, 2), Digit(2, 1)])


def test_placements_that_are_no_spec_are_refused_by_name():
    topology = dm.TopologySpec({"a": 2, "b": 2, "c": 3}).resolve(12)
    mesh = grid(topology)
    with pytest.raises(ShardingError, match=r"StridedShard\(dim=0, split_factor=2\) on mesh dim 0 of 2x2x3"):
        spec_for(topology, [StridedShard(0, 2), Replicate(), Shard(0)], mesh)
    with pytest.raises(ShardingError, match=r"split_factor=4\) on mesh dim 1"):
        spec_for(topology, [Shard(0), StridedShard(0, 4), Replicate()], mesh)
    with pytest.raises(ShardingError, match="dims count from 0"):
        spec_for(topology, [Shard(-1), Replicate(), Replicate()], mesh)
    with pytest.raises(ShardingError, match="not a 'max'"):
        spec_for(topology, [Partial("max"), Replicate(), Replicate()], mesh)
    with pytest.raises(ShardingError, match="are 1, but the mesh has 3 dims"):
        spec_for(topology, [Replicate()], mesh)
    with pytest.raises(ShardingError, match=r"dim 0 is split by \(size, stride\) \[\(2, 1\)\], which no axes.*a, b, c"):
        spec_for(topology, [Shard(0), Replicate()], [Digit(2, 1), Digit(3, 2)])
