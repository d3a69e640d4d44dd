"""Ranks of trainers and rollouts, and who sends weights to whom: worked examples and properties."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualmesh.errors import ArgumentError, SpecError
from dualmesh.weights.assignment import BUFFERS, Assignment, transfer_plan


def as_data(plan):
    return [(transfer.sender, list(transfer.receivers), transfer.intra) for transfer in plan]


@pytest.mark.parametrize(
    ("nodes", "buffers", "expected"),
    [
        ([([0, 1], []), ([], [2, 3]), ([], [4, 5])], "Double", [(0, [2, 3], False), (1, [4, 5], False)]),
        ([([0, 1], [2, 3]), ([], [4, 5])], "Shared", [(0, [], True), (1, [4], False)]),
        ([([0, 1], [2, 3]), ([4], [5])], "Double", [(0, [2, 3], True), (4, [5], True)]),
        ([([0, 1], [2, 3]), ([4], [5])], "None", [(0, [2, 3], True), (4, [5], True)]),
        ([([0], []), ([1], [2]), ([], [3])], "Double", [(0, [3], False), (1, [2], True)]),
        (
            [([0], []), ([], [1]), ([2], []), ([], [3]), ([], [4])],
            "Shared",
            [(0, [1], False), (0, [4], False), (2, [3], False)],
        ),
        ([([], [0]), ([1, 2], [])], "Double", [(1, [0], False)]),
        ([([0], [1]), ([2], []), ([], [3])], "Double", [(0, [1], True), (2, [3], False)]),
    ],
)
def test_worked_examples(nodes, buffers, expected):
    plan = transfer_plan(nodes, buffers)
    assert expected == as_data(plan)
    assert all(transfer.ranks == (transfer.sender, *transfer.receivers) for transfer in plan)


@st.composite
def policies(draw):
    counts = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=6))
    nodes, rank = [], 0
    for train, evaluation in [*counts, (1, 1)]:
        nodes.append((range(rank, rank + train), range(rank + train, rank + train + evaluation)))
        rank += train + evaluation
    return nodes


@settings(max_examples=100)
@given(policies(), st.sampled_from(BUFFERS))
def test_every_node_with_rollouts_is_served_once_by_a_trainer(nodes, buffers):
    plan = transfer_plan(nodes, buffers)
    node_of = {rank: number for number, ranks in enumerate(nodes) for part in ranks for rank in part}
    trainers = {rank for train, _ in nodes for rank in train}
    received = sorted(rank for transfer in plan for rank in transfer.receivers)
    everyone = sorted(rank for _, evaluation in nodes for rank in evaluation)
    firsts = sorted(evaluation[0] for train, evaluation in nodes if evaluation and not train)
    assert (firsts if buffers == "Shared" else everyone) == received
    for transfer in plan:
        assert transfer.sender in trainers
        for receiver in transfer.receivers:
            assert transfer.intra == (node_of[receiver] == node_of[transfer.sender])
            assert transfer.intra == bool(nodes[node_of[receiver]][0])


def test_ranks_follow_nodes_as_first_seen_then_gpus():
    assignment = Assignment.of([("b", 1), ("a", 3)], [("a", 0), ("c", 0), ("b", 0), ("a", 1)])
    assert (1, 4) == assignment.train_ranks
    assert (2, 5, 0, 3) == assignment.evaluation_ranks
    assert (2, 3, 1) == assignment.nodes.sizes
    assert [0, 1, 0, 1, 2, 0] == [assignment.nodes.local_rank(rank) for rank in range(6)]
    assert (((1,), (0,)), ((4,), (2, 3)), ((), (5,))) == assignment.policy_nodes
    assert [(1, [0], True), (1, [5], False), (4, [2, 3], True)] == as_data(
        transfer_plan(assignment.policy_nodes, "Double")
    )


def test_actors_on_one_gpu_keep_their_order():
    assignment = Assignment.of([("a", 0), ("a", 1)], [("a", 0), ("a", 1)])
    assert (0, 2) == assignment.train_ranks
    assert (1, 3) == assignment.evaluation_ranks


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 7)), min_size=1, max_size=10), st.integers(0, 10))
def test_ranks_have_no_gaps_and_rise_with_the_gpu_on_a_node(actors, trainers):
    assignment = Assignment.of(actors[:trainers], actors[trainers:])
    ranks = (*assignment.train_ranks, *assignment.evaluation_ranks)
    assert list(range(len(actors))) == sorted(ranks)
    by_rank = [actors[ranks.index(rank)] for rank in range(len(actors))]
    for node, group in enumerate(assignment.nodes.intra_node()):
        assert 1 == len({by_rank[rank][0] for rank in group})
        assert list(dict.fromkeys(name for name, _ in actors))[node] == by_rank[group[0]][0]
        assert sorted(by_rank[rank][1] for rank in group) == [by_rank[rank][1] for rank in group]


@pytest.mark.parametrize(
    ("nodes", "match"),
    [
        ([([], [0, 1])], "no node has trainers"),
        ([([0], [])], "no node has rollouts"),
        ([], "2 problems"),
        ([([0, 1], [1])], "rank 1 is listed twice"),
    ],
)
def test_plans_that_cannot_be_are_refused(nodes, match):
    with pytest.raises(SpecError, match=match):
        transfer_plan(nodes, "Double")


def test_other_buffers_are_refused():
    with pytest.raises(ArgumentError, match=r"buffers='Shard'.*Double, Shared, None.*Did you mean 'Shared'"):
        transfer_plan([([0], [1])], "Shard")
