"""The plan of federated averaging: which steps each rank takes, with whom, and how much each value weighs.

Who holds what is in `federated_topology`; carrying the steps out on arrays is for the backends.

Three steps, each over disjoint groups, take every rank to the weighted mean of the federations' models:

1. *mean* (where asked): the replicas of a federation average their own values;
2. *exchange*: the senders of a federated group sum theirs, each times the share of its federation;
3. *broadcast*: each sender gives the result to its replica group.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal, NamedTuple, get_args

from dualmesh.errors import SpecError, counted, listed
from dualmesh.topology.federated_topology import FederatedTopology
from dualmesh.topology.resolve import refuse

Action = Literal["mean", "exchange", "broadcast"]

ACTIONS: tuple[Action, ...] = get_args(Action)
"""The steps in the order in which they are taken."""


class Piece(NamedTuple):
    """Which of `total` equal pieces of a part of the model a rank holds; (0, 1): all of it."""

    place: int
    total: int


class Step(NamedTuple):
    """One collective of one group.

    Where pieces are whole an exchange is a sum of like shards. Otherwise shards differ in size between federations:
    each member sums its piece, put at its place among zeros, and keeps what lies at its own place. A value that is not
    sharded enters from the first piece of each federation only. A weight of 0 means that the value is left out, not
    that it is multiplied.
    """

    action: Action
    ranks: tuple[int, ...]
    """The group, in index order."""
    weights: tuple[float, ...]
    """What the value of each member is multiplied with in the sum; for "broadcast" 1 at the sender."""
    pieces: tuple[Piece, ...]
    """What each member holds of the part that the group is about."""

    @property
    def src(self) -> int:
        """The index of the member that a broadcast starts from."""
        return self.weights.index(1.0)


@dataclass(frozen=True)
class AveragingPlan:
    """Federated averaging in integers: `steps(rank)` for one rank, `partition(action)` for all. Frozen and hashable."""

    topology: FederatedTopology
    shares: tuple[float, ...]
    """The weight of each federation, summing to 1."""
    averages_replicas: bool
    """Whether replicas differ, so that each federation first takes the mean of its own."""

    def steps(self, rank: int) -> tuple[Step, ...]:
        """Return the steps that a rank takes, in order; groups of one are left out. *Pure*, O(answer).

        >>> from dualmesh.topology.federation import FederatedSpec
        >>> plan = averaging_plan(FederatedSpec((4, 2), shard_size=2).resolve(6), weights=(3, 1))
        >>> [(step.action, step.ranks, step.weights) for step in plan.steps(2)]
        [('broadcast', (0, 2), (1.0, 0.0))]
        >>> [(step.action, step.ranks, step.weights) for step in plan.steps(0)]
        [('exchange', (0, 4), (0.75, 0.25)), ('broadcast', (0, 2), (1.0, 0.0))]
        """
        found = (self.step(action, rank) for action in ACTIONS)
        return tuple(step for step in found if len(step.ranks) > 1)

    def step(self, action: Action, rank: int) -> Step:
        """Return one step of a rank; a rank that takes no part is a group of its own. *Pure*, O(answer)."""
        ranks = self._ranks(action, rank)
        if action == "exchange":
            groups = [self.topology.federated_rank(member) for member in ranks]
            weights = tuple(self.shares[group] for group in groups) if len(ranks) > 1 else (1.0,)
            return Step(action, ranks, weights, tuple(map(self.piece, ranks)))
        if action == "mean":
            weights = (1.0 / len(ranks),) * len(ranks)
        else:
            weights = tuple(float(len(ranks) == 1 or self.topology.is_sender(member)) for member in ranks)
        return Step(action, ranks, weights, (Piece(0, 1),) * len(ranks))

    def partition(self, action: Action) -> list[tuple[int, ...]]:
        """Return all groups of a step, by first rank; they cover the world, ranks alone included. *Pure*, O(world).

        As lists these are JAX's `axis_index_groups`; sizes may differ (see `FederatedTopology.axis_index_groups`).
        """
        groups: list[tuple[int, ...]] = []
        seen = bytearray(self.topology.world_size)
        for rank in range(self.topology.world_size):
            if not seen[rank]:
                groups.append(self._ranks(action, rank))
                for member in groups[-1]:
                    seen[member] = True
        return groups

    def factors(self, action: Action) -> tuple[float, ...]:
        """Return the weight of each rank's own value in a step, by rank. *Pure*, O(world)."""
        factors = [1.0] * self.topology.world_size
        for group in self.partition(action):
            for member, weight in zip(group, self.step(action, group[0]).weights, strict=True):
                factors[member] = weight
        return tuple(factors)

    def piece(self, rank: int) -> Piece:
        """Return which piece of its federated group's part a rank holds. *Pure.*"""
        if self.topology.shard_size is not None:
            return Piece(0, 1)
        size = self.topology.sizes[self.topology.federated_rank(rank)]
        total = size // self.topology.parts
        return Piece(self.topology.federated_index(rank) % total, total)

    def _ranks(self, action: Action, rank: int) -> tuple[int, ...]:
        topology = self.topology
        if action == "exchange":
            return topology.federated_group(rank) if topology.is_sender(rank) else (rank,)
        idle = not self.averages_replicas if action == "mean" else topology.federated_world_size == 1
        return (rank,) if idle else topology.replica_group(rank) or (rank,)


def averaging_plan(
    topology: FederatedTopology, weights: Iterable[float] | None = None, *, averages_replicas: bool = False
) -> AveragingPlan:
    """Return the plan that takes every rank to the weighted mean of the federations' models. *Pure.*

    Args:
        weights: One per federation, for example its number of samples; None: all the same.
        averages_replicas: Whether the replicas of a federation hold different values, whose mean is its model.

    Raises:
        SpecError: The weights are not one finite number of at least 0 per federation, or they are all 0.
    """
    given: list[Any] = [1.0] * topology.federated_world_size if weights is None else list(weights)
    problems = [
        f"weight {number} is {weight!r}. Weights are finite numbers of at least 0."
        for number, weight in enumerate(given)
        if not _is_weight(weight)
    ]
    if len(given) != topology.federated_world_size:
        problems.append(
            f"{counted(len(given), 'weight')} given for {counted(topology.federated_world_size, 'federation')}. Give "
            f"one each."
        )
    if not problems and not sum(given) > 0:
        problems.append(f"the weights {listed(given)} are all 0. At least one federation must count.")
    refuse("federated_mean", problems, weights=tuple(given))
    total = sum(map(float, given))
    if not isfinite(total):
        raise SpecError(f"federated_mean: the weights {listed(given)} sum to {total}. Scale them down.", weights=given)
    return AveragingPlan(topology, tuple(float(weight) / total for weight in given), averages_replicas)


def _is_weight(value: Any) -> bool:
    if isinstance(value, bool | str):
        return False
    try:
        return isfinite(value) and value >= 0
    except (TypeError, OverflowError):
        return False
