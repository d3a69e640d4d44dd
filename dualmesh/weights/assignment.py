"""Trainers and rollouts on shared or separate nodes: which rank each actor gets, and who sends weights to whom.

Nodes are described in `nodes`; the groups that carry the weights are made by the backends.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Literal, NamedTuple, get_args

from dualmesh._support.checks import is_one_of
from dualmesh.errors import ArgumentError, did_you_mean, listed
from dualmesh.topology.nodes import Nodes
from dualmesh.topology.rank_groups import RankGroups
from dualmesh.topology.resolve import refuse

Buffers = Literal["Double", "Shared", "None"]

BUFFERS: tuple[Buffers, ...] = get_args(Buffers)
"""How a node takes weights in: "Shared" has one CPU buffer for all of its rollouts, so one of them receives."""


class Actor(NamedTuple):
    """One process before it has a rank: its node, and the id of its GPU there."""

    node: Hashable
    gpu: int


class PolicyNode(NamedTuple):
    """The ranks of the policies on one node, in rank order."""

    train: tuple[int, ...]
    evaluation: tuple[int, ...]


class Transfer(NamedTuple):
    """One sender and the ranks that it gives weights to."""

    sender: int
    receivers: tuple[int, ...]
    intra: bool
    """Whether it stays on the sender's node."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The group: the sender, which is the source of the broadcast, then the receivers."""
        return (self.sender, *self.receivers)


@dataclass(frozen=True)
class Assignment:
    """The ranks of actors: nodes in the order first seen (trainers first), on a node by GPU id, without gaps.

    >>> found = Assignment((Actor("a", 1), Actor("b", 0)), (Actor("a", 0), Actor("b", 1)))
    >>> found.train_ranks, found.evaluation_ranks, found.nodes.sizes
    ((1, 2), (0, 3), (2, 2))
    """

    train: tuple[Actor, ...]
    evaluation: tuple[Actor, ...]

    @classmethod
    def of(cls, train: Iterable[tuple[Hashable, int]], evaluation: Iterable[tuple[Hashable, int]]) -> "Assignment":
        """Return the assignment of (node, GPU id) pairs. *Pure.*"""
        return cls(tuple(Actor(*actor) for actor in train), tuple(Actor(*actor) for actor in evaluation))

    @cached_property
    def _places(self) -> tuple[tuple[int, ...], ...]:
        """The places of each node's actors in the joined list, in rank order; actors on one GPU keep their order."""
        actors = [*self.train, *self.evaluation]
        found: dict[Hashable, list[int]] = {}
        for place, actor in enumerate(actors):
            found.setdefault(actor.node, []).append(place)
        return tuple(tuple(sorted(places, key=lambda place: actors[place].gpu)) for places in found.values())

    @cached_property
    def _ranks(self) -> tuple[int, ...]:
        """The rank of every actor, trainers first."""
        rank_of = {place: rank for rank, place in enumerate(chain.from_iterable(self._places))}
        return tuple(rank_of[place] for place in range(len(rank_of)))

    @property
    def train_ranks(self) -> tuple[int, ...]:
        """The rank of every trainer, in the given order."""
        return self._ranks[: len(self.train)]

    @property
    def evaluation_ranks(self) -> tuple[int, ...]:
        """The rank of every rollout, in the given order."""
        return self._ranks[len(self.train) :]

    @property
    def nodes(self) -> Nodes:
        """The nodes: local ranks and sizes of every rank."""
        return Nodes.of_sizes(map(len, self._places))

    @property
    def policy_nodes(self) -> tuple[PolicyNode, ...]:
        """The policies of every node, in node order."""
        ranks, trainers = self._ranks, len(self.train)
        return tuple(
            PolicyNode(
                tuple(ranks[place] for place in places if place < trainers),
                tuple(ranks[place] for place in places if place >= trainers),
            )
            for places in self._places
        )


def transfer_plan(nodes: Iterable[tuple[Sequence[int], Sequence[int]]], buffers: Buffers) -> tuple[Transfer, ...]:
    """Return who sends weights to whom, when trainers and rollouts are separate processes. *Pure.*

    A node with both serves itself. The k-th node with rollouts only is served by the trainer-only node k modulo their
    number; without such nodes, by the mixed node k modulo theirs. A node's i-th destination is served by its trainer
    i modulo their number.

    Args:
        nodes: The (training, evaluation) ranks of each node, in order.
        buffers: "Double" and "None": all rollouts of a destination receive. "Shared": only its first, and none on the
            sender's own node, whose rollouts read the sender's memory.

    Raises:
        ArgumentError: `buffers` is none of these.
        SpecError: There are no trainers or no rollouts, or a rank is listed twice.

    >>> transfer_plan([([0, 1], [2, 3]), ([], [4, 5])], "Shared")
    (Transfer(sender=0, receivers=(), intra=True), Transfer(sender=1, receivers=(4,), intra=False))
    """
    if not is_one_of(buffers, BUFFERS):
        raise ArgumentError(
            f"transfer_plan: buffers={buffers!r}. Allowed: {listed(BUFFERS)}.{did_you_mean(buffers, BUFFERS)}",
            buffers=buffers,
        )
    policies = [PolicyNode(tuple(train), tuple(evaluation)) for train, evaluation in nodes]
    RankGroups(ranks for node in policies for ranks in node if ranks)
    problems = [] if any(node.train for node in policies) else ["no node has trainers, so nobody can send."]
    problems += [] if any(node.evaluation for node in policies) else ["no node has rollouts, so nobody can receive."]
    refuse("transfer_plan", problems)
    return tuple(
        Transfer(node.train[turn % len(node.train)], _receivers(node, destination, buffers), destination is node)
        for node, destinations in _destinations(policies)
        for turn, destination in enumerate(destinations)
    )


def _destinations(policies: Sequence[PolicyNode]) -> list[tuple[PolicyNode, list[PolicyNode]]]:
    """Return every node with trainers and the nodes it serves, its own first."""
    served = [(node, [node] if node.evaluation else []) for node in policies if node.train]
    servers = [pair for pair in served if not pair[0].evaluation] or served
    for turn, node in enumerate(node for node in policies if node.evaluation and not node.train):
        servers[turn % len(servers)][1].append(node)
    return served


def _receivers(sender: PolicyNode, destination: PolicyNode, buffers: Buffers) -> tuple[int, ...]:
    if buffers != "Shared":
        return destination.evaluation
    return () if destination is sender else destination.evaluation[:1]
