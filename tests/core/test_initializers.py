"""Process-group initializers against the answers of the source's own code, on every rank."""

import inspect
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dualmesh as dm
from dualmesh import initializers
from dualmesh.errors import ArgumentError, RankError, SpecError
from dualmesh.initializers import (
    DPGroupInitializer,
    InterNodeGroupInitializer,
    ProcessGroupInitializer,
    SPGroupInitializer,
    TPGroupInitializer,
    WeightTransferGroupInitializer,
)
from dualmesh.topology.parallel_modes import ParallelMode, mode_groups

FILE = json.loads((Path(__file__).parent.parent / "cases" / "initializers.json").read_text())
DROPPED = "are in no group"
"""The source leaves ranks out where a size does not divide the world, or is larger or negative."""
HELD = [case for case in FILE["cases"] if not any(DROPPED in fault for fault in case.get("peer_error", []))]
REFUSED = [case for case in FILE["cases"] + FILE["rejected"] if case not in HELD]


def each(cases):
    return pytest.mark.parametrize("case", cases, ids=[case["id"] for case in cases])


def made(case, rank, make_group):
    return getattr(initializers, case["cls"])(rank, case["world"], **case["args"], make_group=make_group)


class Groups:
    """Makes lists of ranks for groups, and keeps what was asked of it."""

    def __init__(self):
        self.asked = []

    def __call__(self, initializer, backend):
        self.asked.append((initializer.groups, backend))
        return initializer.groups.ranks(initializer.rank) if initializer.groups.is_member(initializer.rank) else None


@each(HELD)
def test_every_rank_gets_the_sources_tuple(case):
    groups = Groups()
    for rank in range(case["world"]):
        local_rank, size, group, ranks, mode = case["tuples"][rank]
        initializer = made(case, rank, groups)
        found = initializer.init_dist_group()
        assert (local_rank, size, ranks, ParallelMode[mode]) == (found[0], found[1], found[3], found[4])
        assert group == (None if found[2] is None else sorted(found[2]))
        # The source's group is sorted, so that its order contradicts local_rank; here the order listed is the group's.
        assert ranks == (None if found[2] is None else list(found[2]))
        kept = (initializer.local_rank, initializer.group_world_size, initializer.process_group)
        assert found == (*kept, initializer.ranks_in_group, initializer.mode)
        assert (rank, case["world"]) == (initializer.rank, initializer.world_size)


@each(HELD)
def test_every_rank_asks_for_the_same_groups(case):
    groups = Groups()
    for rank in range(case["world"]):
        made(case, rank, groups).init_dist_group()
    assert {case["world"]} == {len(groups.asked)}
    for partition, backend in groups.asked:
        assert case["new_group_calls"] == [list(group) for group in partition]
        assert backend == "nccl"
        outside = [rank for rank in range(case["world"]) if not partition.is_member(rank)]
        assert case["outside"] == outside


@each(REFUSED)
def test_what_the_source_drops_ranks_for_or_crashes_on_is_refused(case):
    (value,) = case["args"].values()
    match = rf"={value} does not divide the world of {case['world']} rank" if isinstance(value, int) else "ranks|empty"
    with pytest.raises(SpecError, match=match):
        made(case, 0, Groups())


@pytest.mark.parametrize(
    ("mode", "world", "extent", "expected"),
    [
        ("DATA_PARALLEL", 8, 2, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("DATA_PARALLEL", 8, 4, [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("TENSOR_PARALLEL", 8, 2, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("SEQUENCE_PARALLEL", 8, 4, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("INTER_NODE", 8, 4, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("INTRA_NODE", 8, [4, 5, 6, 7], [[4, 5, 6, 7]]),
        ("WEIGHT_TRANSFER", 8, [5, 0, 1], [[5, 0, 1]]),
        ("GLOBAL", 3, None, [[0, 1, 2]]),
    ],
)
def test_worked_layouts(mode, world, extent, expected):
    assert expected == [list(group) for group in mode_groups(ParallelMode[mode], world, extent)]


@settings(max_examples=60)
@given(st.integers(1, 12), st.integers(1, 12))
def test_sized_modes_are_the_axes_of_a_grid(outer, inner):
    world = outer * inner
    grid = np.arange(world).reshape(outer, inner)
    assert grid.T.tolist() == [list(group) for group in mode_groups(ParallelMode.DATA_PARALLEL, world, outer)]
    assert grid.tolist() == [list(group) for group in mode_groups(ParallelMode.TENSOR_PARALLEL, world, inner)]
    assert grid.tolist() == [list(group) for group in mode_groups(ParallelMode.SEQUENCE_PARALLEL, world, inner)]
    assert grid.T.tolist() == [list(group) for group in mode_groups(ParallelMode.INTER_NODE, world, inner)]


@settings(max_examples=80)
@given(st.integers(1, 24), st.integers(-3, 30), st.sampled_from(["DATA", "TENSOR", "SEQUENCE"]))
def test_a_size_is_held_by_groups_that_cover_the_world_or_refused(world, size, kind):
    mode = ParallelMode[f"{kind}_PARALLEL"]
    if size < 1 or world % size:
        with pytest.raises(SpecError, match=rf"{kind.lower()}_parallel_size={size} does not divide.*fit: 1"):
            mode_groups(mode, world, size)
    else:
        groups = mode_groups(mode, world, size)
        assert groups.covers(world)
        assert size == groups.size()


def test_modes_are_the_ones_of_the_source():
    names = "GLOBAL INTRA_NODE INTER_NODE TRAIN_DATA_PARALLEL DATA_PARALLEL TENSOR_PARALLEL SEQUENCE_PARALLEL"
    assert [*names.split(), "WEIGHT_TRANSFER"] == [mode.name for mode in ParallelMode]


def test_constructors_take_rank_world_and_one_argument_by_position_or_name():
    arguments = {
        "TrainDPGroupInitializer": "ranks",
        "IntraNodeGroupInitializer": "ranks",
        "WeightTransferGroupInitializer": "ranks",
        "DPGroupInitializer": "data_parallel_size",
        "TPGroupInitializer": "tensor_parallel_size",
        "SPGroupInitializer": "sequence_parallel_size",
        "InterNodeGroupInitializer": "local_world_size",
    }
    for name, last in arguments.items():
        cls = getattr(initializers, name)
        assert issubclass(cls, ProcessGroupInitializer)
        parameters = inspect.signature(cls).parameters.values()
        positional = [item.name for item in parameters if item.kind is item.POSITIONAL_OR_KEYWORD]
        assert ["rank", "world_size", last] == positional
        init = inspect.signature(cls.init_dist_group).parameters
        assert ["self", "backend", "use_cpu"] == list(init)
        assert ("nccl", False) == (init["backend"].default, init["use_cpu"].default)


def test_the_base_class_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        ProcessGroupInitializer(0, 1)


@pytest.mark.parametrize(
    ("arguments", "backend"),
    [
        ({}, "nccl"),
        ({"backend": "gloo"}, "gloo"),
        ({"use_cpu": True}, "gloo"),
        ({"backend": "nccl", "use_cpu": True}, "gloo"),
    ],
)
def test_use_cpu_forces_gloo(arguments, backend):
    groups = Groups()
    TPGroupInitializer(1, 4, 2, make_group=groups).init_dist_group(**arguments)
    assert [backend] == [asked for _, asked in groups.asked]


def test_other_communication_backends_are_refused_before_any_group():
    groups = Groups()
    with pytest.raises(ArgumentError, match=r"backend='gloa'. Allowed: nccl, gloo. Did you mean 'gloo'"):
        TPGroupInitializer(1, 4, 2, make_group=groups).init_dist_group("gloa")
    assert groups.asked == []


@pytest.mark.parametrize("rank", [-1, 4, True, "0", None])
def test_a_rank_outside_the_world_is_refused(rank):
    with pytest.raises(RankError, match=r"TPGroupInitializer: rank .* is not in the world. Ranks: 0\.\.3"):
        TPGroupInitializer(rank, 4, 2)


@pytest.mark.parametrize(
    ("ranks", "match"),
    [([], "empty"), ([0, 0], "listed twice"), ([2, 5], "has 5, outside the world of 4 ranks"), ([-1], "at least 0")],
)
def test_lists_of_ranks_that_cannot_be_are_refused(ranks, match):
    with pytest.raises(SpecError, match=match):
        WeightTransferGroupInitializer(0, 4, ranks)
    with pytest.raises(SpecError, match="ranks is 3"):
        WeightTransferGroupInitializer(0, 4, 3)
    with pytest.raises(ArgumentError, match="GLOBAL: 2 was given"):
        mode_groups(ParallelMode.GLOBAL, 4, 2)


def test_groups_are_named_states_of_the_running_world():
    with dm.session(backend="sim", world_size=8):
        found = [DPGroupInitializer(rank, 8, 4).init_dist_group() for rank in range(8)]
        assert [(1, 4, [0, 2, 4, 6]), (1, 4, [1, 3, 5, 7])] == [(t[0], t[1], t[3]) for t in found[2:4]]
        assert [(0, 2, 4, 6), (1, 3, 5, 7)] == [t[2].ranks for t in found[2:4]]
        one = WeightTransferGroupInitializer(3, 8, [6, 0, 3])
        local_rank, size, group, ranks, mode = one.init_dist_group(use_cpu=True)
        assert (2, 3, [6, 0, 3], ParallelMode.WEIGHT_TRANSFER) == (local_rank, size, ranks, mode)
        assert ((6, 0, 3), "gloo") == (group.ranks, group.backend)
        assert (None,) * 4 == WeightTransferGroupInitializer(1, 8, [6, 0, 3]).init_dist_group()[:4]
        state = dm.get_parallel_state_by_name(f"{one.state_name}@cpu")
        assert (6, 0, 3) == state.ranks("weight_transfer", 3)
        assert "data_parallel:2x4" == DPGroupInitializer(0, 8, 4).state_name
        assert 1 == dm.get_parallel_state_by_name("data_parallel:2x4").index("data_parallel", 3)


def test_a_rank_of_another_world_is_refused():
    with dm.session(backend="sim", world_size=4), pytest.raises(RankError, match=r"rank 5 of 8, but .* world of 4"):
        InterNodeGroupInitializer(5, 8, 4).init_dist_group()
    with dm.session(backend="sim", world_size=4), pytest.raises(dm.DualmeshError, match="'inter_node:4x2' is not"):
        dm.get_parallel_state_by_name("inter_node:4x2")


def test_sizes_are_kept_under_the_names_of_the_source():
    assert 4 == SPGroupInitializer(0, 8, 4).sequence_parallel_size
    assert 4 == InterNodeGroupInitializer(0, 8, 4).local_world_size


def test_attributes_and_modes_are_the_sources():
    """Counts, lists and strings that the source's callers read."""
    assert ([6, 0, 3], "WEIGHT_TRANSFER") == (
        WeightTransferGroupInitializer(0, 8, (6, 0, 3)).ranks,
        WeightTransferGroupInitializer.mode,
    )
    assert [5, 4] == initializers.TrainDPGroupInitializer(0, 8, [5, 4]).ranks
    assert [5, 4] == initializers.IntraNodeGroupInitializer(4, 8, [5, 4]).ranks
    assert 4 == DPGroupInitializer(0, 8, 2).process_num_between_dp_rank
    assert 2 == TPGroupInitializer(0, 8, 4).tensor_parallel_group_num
    assert 8 == SPGroupInitializer(0, 8, 1).sequence_parallel_group_num
    assert 3 == InterNodeGroupInitializer(0, 12, 4).node_count
    assert ("GLOBAL", "INTRA_NODE", "INTER_NODE") == (
        initializers.CommMode.GLOBAL,
        initializers.CommMode.INTRA_NODE,
        initializers.CommMode.INTER_NODE,
    )
    assert all(mode == mode.name == str(mode) and isinstance(mode, str) for mode in ParallelMode)


class Halves(ProcessGroupInitializer):
    """A subclass as it is written for the source: two groups, of which every rank makes both."""

    def __init__(self, rank, world_size):
        super().__init__(rank, world_size)
        self.mode = "HALVES"

    def init_dist_group(self, backend="nccl", use_cpu=False):
        half = self.world_size // 2
        for first in (0, half):
            self._new_and_update_group_info(list(range(first, first + half))[::-1], use_cpu, backend)
        return self.local_rank, self.group_world_size, self.process_group, self.ranks_in_group, self.mode


def test_a_subclass_written_for_the_source_makes_its_groups():
    """Each rank is in one of the two groups, at its place in the listed order."""
    assert Halves(0, 4).mode == "HALVES"
    with dm.session(backend="sim", world_size=4):
        for rank in range(4):
            ranks = [[1, 0], [3, 2]][rank // 2]
            local_rank, size, group, found, mode = Halves(rank, 4).init_dist_group(use_cpu=True)
            assert (ranks.index(rank), 2, ranks, "HALVES") == (local_rank, size, found, mode)
            assert (tuple(ranks), "gloo") == (group.ranks, group.backend)
        one = Halves(0, 4)
        for given, match in (([0, 7], "outside the world"), ([], "empty"), ("01", "Give a list")):
            with pytest.raises(SpecError, match=match):
                one._new_and_update_group_info(given)
        with pytest.raises(ArgumentError, match="backend='gloa'"):
            one._new_and_update_group_info([0], backend="gloa")
        assert one.process_group is None


def test_a_state_is_initialised_without_a_meta_device_unless_asked():
    """`set_init_device(device)` has the source's default."""
    from dualmesh.backend.group_factory import ListedFabric

    state = dm.DistributedState(fabric=ListedFabric())
    state.set_init_device("cpu")
    assert ("cpu", False) == (state.init_device, state.meta_initialization)
