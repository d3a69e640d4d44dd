"""A resolved topology against numpy's grid, as a value, and at a million ranks."""

import copy
import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings

import dualmesh as dm
from dualmesh.errors import DualmeshError, RankError, SpecError, UnknownAxisError
from tests.core.any_topology import examples


@settings(max_examples=200)
@given(examples())
def test_every_axis_answers_as_the_grid_does(example):
    topology = example.spec.resolve(example.world_size)
    first = topology.rank_offset
    ranks = range(first, first + example.world_size)
    for axis, expected in example.index.items():
        assert [topology.index(axis, rank) for rank in ranks] == expected.tolist()
        groups = topology.partition(axis)
        assert groups.shape == (example.world_size // topology.size(axis), topology.size(axis))
        assert sorted(groups.reshape(-1).tolist()) == list(ranks)
        for group in groups.tolist():
            assert [topology.index(axis, rank) for rank in group] == list(range(len(group)))
            assert topology.ranks(axis, group[-1]) == tuple(group)
            assert [topology.member(axis, group[0], index) for index in range(len(group))] == group
    for rank in ranks:
        coords = topology.coords(rank)
        assert list(coords) == list(topology.base_axes)
        assert np.ravel_multi_index(tuple(coords.values()), tuple(topology.sizes.values())) == rank - first


@given(examples())
def test_a_tuple_of_names_is_the_combined_axis_of_those_names(example):
    topology = example.spec.resolve(example.world_size)
    members = topology.spec.combined["joined"]
    assert topology.layout(members) == topology.layout("joined")
    assert topology.size(members) == np.prod([topology.size(name) for name in members], dtype=int)
    assert topology.partition("world").shape == (1, example.world_size)


@given(examples())
def test_a_topology_is_a_value(example):
    topology = example.spec.resolve(example.world_size)
    again = topology.spec.resolve(example.world_size)
    assert again == topology
    assert again.spec == topology.spec
    assert hash(again) == hash(topology)
    assert pickle.loads(pickle.dumps(topology)) == topology
    assert copy.deepcopy(topology) is copy.copy(topology) is topology
    assert dm.TopologySpec.from_dict(topology.spec.to_dict()).resolve(example.world_size) == topology
    assert again.diff(topology) == "no difference"
    assert topology != object()


def test_a_topology_is_frozen():
    topology = dm.TopologySpec({"dp": 2}).resolve(2)
    with pytest.raises(AttributeError, match="frozen: world_size cannot be set"):
        topology.world_size = 3
    with pytest.raises(AttributeError, match="frozen: spec cannot be deleted"):
        del topology.spec
    with pytest.raises(TypeError):
        topology.layouts["dp"] = None


def test_other_worlds_and_specs_are_other_topologies():
    spec = dm.TopologySpec({"dp": -1, "tp": 2})
    assert spec.resolve(4) != spec.resolve(8)
    assert spec.resolve(4) != dm.TopologySpec({"dp": 2, "tp": 2}, rank_offset=4).resolve(4)
    assert len({spec.resolve(4), spec.resolve(4), spec.resolve(8)}) == 2


@pytest.mark.parametrize("rank", [-1, 8, 4.0, "1", None, True and 1.5])
def test_a_rank_outside_the_world_is_refused_with_its_ranks(rank):
    topology = dm.TopologySpec({"dp": 8}).resolve(8)
    for question in (topology.ranks, topology.index):
        with pytest.raises(RankError, match=r"is not in its world. Ranks: 0..7") as caught:
            question("dp", rank)
        assert caught.value.rank == rank
    with pytest.raises(RankError):
        topology.coords(rank)


def test_an_offset_moves_the_ranks_that_are_known():
    topology = dm.TopologySpec({"dp": 2, "tp": 2}, rank_offset=8).resolve(4)
    assert topology.ranks("dp", 9) == (9, 11)
    assert topology.has_rank(11)
    assert not topology.has_rank(7)
    with pytest.raises(RankError, match=r"Ranks: 8..11"):
        topology.index("dp", 0)


def test_numpy_ranks_give_plain_ints():
    topology = dm.TopologySpec({"dp": 2, "tp": np.int64(2)}).resolve(np.int32(4))
    assert {type(rank) for rank in topology.ranks("dp", np.int64(3))} == {int}
    assert type(topology.index("tp", np.int64(3))) is int


def test_an_index_outside_an_axis_is_refused():
    topology = dm.TopologySpec({"dp": 4}).resolve(4)
    for index in (-1, 4):
        with pytest.raises(RankError, match=r"axis 'dp' has no index .*Indices: 0..3"):
            topology.member("dp", 0, index)


@pytest.mark.parametrize("axis", ["dpp", "", None, ("dp", "x"), ["dp"], 3])
def test_unknown_axes_are_refused_with_those_that_exist(axis):
    topology = dm.TopologySpec({"dp": 2, "tp": 2}).resolve(4)
    with pytest.raises(UnknownAxisError, match=r"Axes: dp, tp, world") as caught:
        topology.size(axis)
    assert isinstance(caught.value, KeyError)


def test_a_wrong_name_is_answered_with_the_closest():
    with pytest.raises(UnknownAxisError, match=r"no axis 'ulyses'.*Did you mean 'ulysses'"):
        dm.parallel_spec().resolve(1).size("ulyses")


def test_axes_that_share_ranks_do_not_combine():
    views = {"one": dm.View("dp", {"a": 2, "b": 3}), "two": dm.View("dp", {"c": 3, "d": 2})}
    topology = dm.TopologySpec({"dp": 6}, views=views).resolve(6)
    for axes in (("dp", "a"), ("dp", "dp"), ("d", "a"), ("a", "c"), ("world", "dp")):
        with pytest.raises(SpecError, match="share ranks, so they do not combine") as caught:
            topology.partition(axes)
        assert caught.value.axes == axes
    assert topology.partition(("a", "b")).tolist() == topology.partition("dp").tolist()


def test_roles_are_answered_or_refused_by_name():
    topology = dm.TopologySpec({"dp": 2, "tp": 2}, roles={"data": "dp"}).resolve(4)
    assert topology.role("data") == ("dp",)
    with pytest.raises(SpecError, match=r"which axes play the role 'loss'. Roles given: data"):
        topology.role("loss")
    with pytest.raises(SpecError, match=r"no role 'dta'.*Did you mean 'data'"):
        topology.role("dta")


def test_the_repr_has_names_sizes_and_world():
    spec = dm.TopologySpec({"pp": 2, "dp": 4}, views={"expert": dm.View("dp", {"edp": -1, "ep": 2})}, rank_offset=8)
    assert repr(spec.resolve(8)) == "Topology(pp=2, dp=4, expert=(edp=2, ep=2), world_size=8, rank_offset=8)"


MILLION = 1 << 20


def test_a_million_ranks_are_described_without_a_table_of_them():
    spec = dm.parallel_spec(dp_shard_size=-1, dp_replicate_size=16, ulysses_size=8, tp_size=8, pp_size=4, ep_size=64)
    str(spec.resolve(MILLION))  # what is imported on the way is no answer
    tracemalloc.start()
    topology = spec.resolve(MILLION)
    answers = [topology.coords(MILLION - 1), topology.index(("dp", "tp"), 777_777), topology.ranks("ep", 777_777)]
    text = str(topology)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000  # bytes: one byte for each rank would be ten times as much
    assert len(answers[2]) == 64
    assert "world_size=1048576" in text


def test_ten_thousand_axes_are_resolved_and_refused():
    names = [f"axis{place}" for place in range(10_000)]
    sizes = dict.fromkeys(names, 1) | {names[0]: 2, names[-1]: -1}
    topology = dm.TopologySpec(sizes, {"all": names, "back": names[::-1]}).resolve(64)
    assert topology.size("all") == 64
    assert topology.coords(63)[names[-1]] == 31
    wrong = dm.TopologySpec({name: 0 for name in names}, {"c": [f"x{name}" for name in names]})
    with pytest.raises(SpecError, match="10001 problems") as caught:
        wrong.resolve(64)
    assert len(caught.value.problems) == 10_001
    assert len(str(caught.value)) < 20_000


def test_errors_are_dualmesh_errors():
    for kind in (RankError, SpecError, UnknownAxisError):
        assert issubclass(kind, DualmeshError)
