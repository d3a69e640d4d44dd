"""The plan of federated averaging, carried out in numpy on every rank, against numpy's weighted mean of the models."""

import json
import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualmesh.errors import SpecError
from dualmesh.topology.averaging import ACTIONS, Piece, averaging_plan
from dualmesh.topology.federation import FederatedSpec

LENGTH = 2 * 3 * 4 * 5 * 7
"""Divides by every number of shards below."""


def shard_of(topology, rank):
    count = topology.shard_size or topology.sizes[topology.federated_rank(rank)]
    width = LENGTH // count
    return slice(topology.shard_index(rank) * width, (topology.shard_index(rank) + 1) * width)


def models(topology, replicas_differ):
    """One model per replica: different in every element, and in every replica where asked."""
    generator = np.random.default_rng(5)
    found = {}
    for number in range(topology.federated_world_size):
        shared = generator.normal(size=LENGTH)
        for replica in range((topology.replica_world_size or [1] * (number + 1))[number]):
            noise = generator.normal(size=LENGTH) if replicas_differ else 0
            found[number, replica] = shared + noise
    return found


def carried_out(plan, values):
    """Take every step of every rank, one collective after the other; `values` by rank."""
    values = dict(values)
    for action in ACTIONS:
        before = dict(values)
        for group in plan.partition(action):
            step = plan.step(action, group[0])
            assert group == step.ranks
            if len(group) == 1:
                continue
            assert all(step in plan.steps(rank) for rank in group)
            if action == "broadcast":
                results = [before[group[step.src]]] * len(group)
            elif action == "mean":
                results = [sum(w * before[rank] for w, rank in zip(step.weights, group, strict=True))] * len(group)
            else:
                total = 0
                for rank, weight, piece in zip(group, step.weights, step.pieces, strict=True):
                    rows = np.zeros((piece.total, len(before[rank])))
                    rows[piece.place] = weight * before[rank]
                    total = total + rows.reshape(-1)
                results = [total.reshape(piece.total, -1)[piece.place] for piece in step.pieces]
            values.update(zip(group, results, strict=True))
    return values


def check(topology, weights, replicas_differ):
    plan = averaging_plan(topology, weights, averages_replicas=replicas_differ)
    held = models(topology, replicas_differ)
    ranks = range(topology.world_size)
    before = {
        rank: held[topology.federated_rank(rank), topology.replica_rank(rank) or 0][shard_of(topology, rank)]
        for rank in ranks
    }
    numbers = range(topology.federated_world_size)
    of_each = [np.mean([held[key] for key in held if key[0] == number], axis=0) for number in numbers]
    expected = np.average(of_each, axis=0, weights=None if weights is None else list(weights))
    after = carried_out(plan, before)
    for rank in ranks:
        np.testing.assert_allclose(after[rank], expected[shard_of(topology, rank)], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("replicas_differ", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shards", [None, 1, 2])
@pytest.mark.parametrize("sizes", [(4, 4), (4, 2), (2, 4, 2), (2, 2, 2), (6, 2, 4), (4,)])
def test_every_rank_ends_with_the_weighted_mean_of_the_models(sizes, shards, weighted, replicas_differ):
    weights = [3.0, 1.0, 0.5][: len(sizes)] if weighted else None
    check(FederatedSpec(sizes, shards).resolve(sum(sizes)), weights, replicas_differ)


@settings(max_examples=60)
@given(
    shards=st.sampled_from([None, 1, 2]),
    counts=st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.01, 100), min_size=4, max_size=4),
    replicas_differ=st.booleans(),
)
def test_any_federation_ends_with_the_weighted_mean(shards, counts, weights, replicas_differ):
    sizes = tuple(count * (shards or 2) for count in counts)
    check(FederatedSpec(sizes, shards).resolve(sum(sizes)), weights[: len(sizes)], replicas_differ)


@pytest.mark.parametrize(
    ("sizes", "shards"), [((4, 4), 2), ((8, 4), 2), ((4, 8, 4), 4), ((4, 2), None), ((4, 4), None)]
)
def test_only_communicating_ranks_exchange_between_federations(sizes, shards):
    topology = FederatedSpec(sizes, shards).resolve(sum(sizes))
    plan = averaging_plan(topology)
    senders = {rank for number in range(len(sizes)) for rank in topology.communicating(number)}
    exchanging = {rank for group in plan.partition("exchange") if len(group) > 1 for rank in group}
    assert senders == exchanging
    for action in ACTIONS:
        members = [rank for group in plan.partition(action) for rank in group]
        assert list(range(topology.world_size)) == sorted(members)
    for action in ("mean", "broadcast"):
        for group in plan.partition(action):
            assert len({topology.federated_rank(rank) for rank in group}) == 1


def test_a_receiver_takes_the_result_from_the_rank_that_the_topology_names():
    topology = FederatedSpec((8, 4), 2).resolve(12)
    plan = averaging_plan(topology)
    for rank in range(12):
        step = plan.step("broadcast", rank)
        assert step.ranks[step.src] == (topology.receive_from(rank) if not topology.is_sender(rank) else rank)
        assert ("exchange" in [taken.action for taken in plan.steps(rank)]) == topology.is_sender(rank)
    assert (0.5, 1.0, 1.0, 0.5) == plan.factors("exchange")[:4]
    assert (1.0, 0.0, 0.0, 1.0) == plan.factors("broadcast")[:4]
    assert (1.0,) * 12 == plan.factors("mean")
    assert (0.25,) * 8 + (0.5,) * 4 == averaging_plan(topology, averages_replicas=True).factors("mean")


@pytest.mark.parametrize("sizes", [(3, 4), (1, 2, 3), (5, 4, 3, 2, 1)])
def test_shards_without_a_common_border_are_exchanged_among_all(sizes):
    topology = FederatedSpec(sizes).resolve(sum(sizes))
    assert [tuple(range(sum(sizes)))] == averaging_plan(topology).partition("exchange")
    check(topology, range(1, len(sizes) + 1), replicas_differ=False)


def test_unequal_shards_are_pieces_of_common_parts():
    plan = averaging_plan(FederatedSpec((4, 2)).resolve(6), [2, 1])
    step = plan.step("exchange", 3)
    assert (2, 3, 5) == step.ranks
    assert (Piece(0, 2), Piece(1, 2), Piece(0, 1)) == step.pieces
    np.testing.assert_allclose(step.weights, (2 / 3, 2 / 3, 1 / 3))


def test_one_federation_exchanges_nothing():
    topology = FederatedSpec((8,), 2).resolve(8)
    assert averaging_plan(topology).steps(3) == ()
    assert ["mean"] == [step.action for step in averaging_plan(topology, averages_replicas=True).steps(3)]


def test_weights_are_shares_of_their_sum_and_plans_are_values():
    topology = FederatedSpec((4, 2), 2).resolve(6)
    plan = averaging_plan(topology, iter([3, np.float32(1)]))
    assert (0.75, 0.25) == plan.shares
    assert plan == pickle.loads(pickle.dumps(plan)) == averaging_plan(topology, [6, 2])
    assert hash(plan) == hash(averaging_plan(topology, [6, 2]))
    assert (0.5, 0.5) == averaging_plan(topology).shares
    assert (1.0, 0.0) == averaging_plan(topology, [Fraction(1, 3), 0]).shares


@pytest.mark.parametrize(
    ("weights", "parts"),
    [
        ([1.0], ["1 weight given for 2 federations"]),
        ([1, 2, 3], ["3 weights given for 2 federations"]),
        ([1, -1], ["weight 1 is -1"]),
        ([float("nan"), 1], ["weight 0 is nan"]),
        ([float("inf"), 1], ["weight 0 is inf"]),
        ([True, 1], ["weight 0 is True"]),
        (["1", 1], ["weight 0 is '1'"]),
        ([None, -2, 1], ["3 problems", "weight 0 is None", "weight 1 is -2", "3 weights given"]),
        ([0, 0], ["0, 0 are all 0"]),
        ([1e308, 1e308], ["sum to inf"]),
    ],
)
def test_weights_that_are_none_are_refused(weights, parts):
    with pytest.raises(SpecError) as refusal:
        averaging_plan(FederatedSpec((4, 2)).resolve(6), weights)
    for part in parts:
        assert part in str(refusal.value)


def test_the_groups_of_a_step_are_what_jax_takes():
    topology = FederatedSpec((8, 4), 2).resolve(12)
    groups = json.loads(json.dumps(averaging_plan(topology).partition("exchange")))
    expected = [[0, 8], [3, 11], [1], [2], [4], [5], [6], [7], [9], [10]]
    assert sorted(expected) == groups
