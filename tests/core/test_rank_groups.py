"""Partitions that are no grid: lists keep their order, questions about strangers are refused by name."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmesh import RankGroups
from dualmesh.errors import MembershipError, RankError, SpecError


@st.composite
def partitions(draw):
    ranks = draw(st.permutations(range(draw(st.integers(1, 12)))))
    cuts = sorted(draw(st.sets(st.integers(1, len(ranks)), min_size=1)))
    return [ranks[low:high] for low, high in zip([0, *cuts], cuts, strict=False)], draw(st.integers(0, 9))


@given(partitions())
def test_every_member_is_at_its_place_in_its_list(example):
    lists, offset = example
    groups = RankGroups(lists, rank_offset=offset)
    assert len(groups) == len(lists)
    assert groups.partition() == [tuple(rank + offset for rank in group) for group in lists]
    for group in groups:
        for index, rank in enumerate(group):
            assert (groups.index(rank), groups.ranks(rank), groups.size(rank)) == (index, group, len(group))
            assert groups.member(group[0], index) == rank
            assert groups.is_member(rank)
    members = sorted(rank for group in groups for rank in group)
    assert groups.members == tuple(members)
    assert groups.covers(len(members)) == (members == list(range(len(members))))


@given(partitions())
def test_rank_groups_are_a_value(example):
    lists, offset = example
    groups = RankGroups(lists, rank_offset=offset)
    groups.is_member(0)
    for same in (
        RankGroups.from_dict(groups.to_dict()),
        RankGroups.from_dict({"groups": lists, "rank_offset": offset}),
        pickle.loads(pickle.dumps(groups)),
        copy.deepcopy(groups),
        RankGroups(groups.groups),
    ):
        assert same == groups
        assert hash(same) == hash(groups)


def test_order_is_meaning():
    assert RankGroups([[0, 1]]) != RankGroups([[1, 0]])
    assert RankGroups([[0], [1]]) != RankGroups([[1], [0]])


def test_unequal_groups_have_a_size_per_rank_only():
    assert RankGroups([[0, 1], [2, 3]]).size() == 2
    with pytest.raises(RankError, match=r"sizes 2, 1, so the size depends on the rank. Name one") as caught:
        RankGroups([[0, 1], [2]]).size()
    assert caught.value.sizes == (2, 1)


@pytest.mark.parametrize("question", ["index", "ranks", "size"])
@pytest.mark.parametrize("rank", [4, -1, "0"])
def test_a_rank_in_no_group_is_refused_with_the_members(question, rank):
    groups = RankGroups([[5, 0, 1], [2, 3]])
    assert not groups.is_member(rank)
    with pytest.raises(MembershipError, match=r"in no group. Members: 0, 1, 2, 3, 5. Ask is_member first"):
        getattr(groups, question)(rank)


def test_an_index_outside_the_group_is_refused():
    with pytest.raises(RankError, match=r"no index 2. Indices: 0..1"):
        RankGroups([[0, 1, 2], [3, 4]]).member(3, 2)


def test_consecutive_ranks_may_differ_in_number():
    assert RankGroups.consecutive([2, 3, 1], rank_offset=4).partition() == [(4, 5), (6, 7, 8), (9,)]


def test_numpy_lists_give_plain_ints():
    groups = RankGroups(np.arange(4).reshape(2, 2))
    assert groups.to_dict() == {"groups": [[0, 1], [2, 3]]}
    assert {type(rank) for rank in groups.ranks(3)} == {int}


def test_all_problems_come_in_one_error():
    with pytest.raises(SpecError) as caught:
        RankGroups([[0, 1], [], [1, True, -2, 2.5], "01", [3, 3]])
    assert caught.value.problems == (
        "group 1 is empty. A group has at least one rank.",
        "group 2 has True, -2, 2.5. Ranks are integers of at least 0.",
        "group 3 is '01'. Give a list of ranks.",
        "rank 1 is listed twice (groups 0 and 2). Groups are disjoint.",
        "rank 3 is listed twice (groups 4 and 4). Groups are disjoint.",
    )


@pytest.mark.parametrize("groups", [3, "01", {0: [1]}])
def test_what_is_no_list_of_lists_is_refused(groups):
    with pytest.raises(SpecError, match="Give a list of lists of ranks"):
        RankGroups(groups)
