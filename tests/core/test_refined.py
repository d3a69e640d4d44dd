"""Shared atoms: every axis is whole atoms, and no atom bears a name that means something else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dualmesh as dm
from dualmesh.topology.refinement import Refinement

GRIDS = st.permutations([2, 2, 3]) | st.sampled_from([[4, 3], [3, 4], [12], [2, 6], [6, 2]])


def topology(sizes, names="abc"):
    return dm.TopologySpec(dict(zip(names, sizes, strict=False))).resolve(12)


def index_on(refined, axes, rank):
    """Spell an index from the digits of atoms, slowest first."""
    index = 0
    for name in axes:
        size, stride = refined.atoms[refined.names.index(name)]
        index = index * size + rank // stride % size
    return index


@given(GRIDS, GRIDS, st.permutations("abc"))
def test_every_axis_of_both_topologies_is_spelled_by_whole_atoms(first, second, names):
    topologies = [topology(first), topology(second, names)]
    refined = Refinement.of(topologies)
    if refined is None:
        return
    assert len(set(refined.names)) == len(refined.names)
    for each in topologies:
        assert refined.misfits(each) == ()
        for axis in [*each.axis_names, tuple(reversed(each.base_axes))]:
            axes = refined.axes(each.layout(axis))
            assert [index_on(refined, axes, rank) for rank in range(12)] == [
                each.index(axis, rank) for rank in range(12)
            ]
            if axis in refined.names:
                assert axes == (axis,)


def test_a_divisor_chain_is_needed():
    assert Refinement.of([topology([2, 6]), topology([3, 4])]) is None


@pytest.mark.parametrize(
    ("second", "names"),
    [
        ({"dp": 4, "tp": 2}, ("atom_2x4", "cp", "tp")),
        ({"x": 2, "tp": 2, "dp": 2}, ("x", "cp", "atom_2x1")),
        ({"dp": 2, "atom_2x2": 4}, ("dp", "cp", "tp")),
        ({"dp": 8}, ("atom_2x4", "cp", "tp")),
        ({"dp": 8, "cp": 1}, ("atom_2x4", "atom_2x2", "tp")),
    ],
)
def test_an_atom_bears_a_name_only_where_it_means_exactly_that_atom(second, names):
    first = dm.TopologySpec({"dp": 2, "cp": 2, "tp": 2}).resolve(8)
    assert Refinement.of([first, dm.TopologySpec(second).resolve(8)]).names == names


def test_neutral_names_are_no_axis_of_any_topology():
    first = dm.TopologySpec({"atom_2x2": 4, "dp": 2}).resolve(8)
    second = dm.TopologySpec({"dp": 8}).resolve(8)
    assert Refinement.of([first, second]).names == ("atom_2x2", "atom_2x1")
    assert Refinement.of([dm.TopologySpec({"dp": 4, "atom_2x1": 1}).resolve(4)] * 2).names == ("dp",)


def test_misfits_are_axes_that_are_not_spelled_or_would_be_misread():
    refined = Refinement.of([dm.TopologySpec({"dp": 4, "tp": 2}).resolve(8)])
    assert refined.misfits(dm.TopologySpec({"dp": 2, "x": 4}).resolve(8)) == ("dp", "x")
    assert refined.misfits(dm.TopologySpec({"tp": 4, "dp": 2}).resolve(8)) == ("tp", "dp")
    assert refined.misfits(dm.TopologySpec({"x": 4, "y": 2}, combined={"z": ("y", "x")}).resolve(8)) == ()
    assert refined.misfits(dm.TopologySpec({"x": 4, "tp": 2}).resolve(8)) == ()
