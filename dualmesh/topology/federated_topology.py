"""`FederatedTopology`: who holds what in a federated world, and who speaks to whom.

What a user declares is in `federation`; what federations exchange to average their models is in `averaging`.

Federation f has the S_f consecutive ranks from O_f = S_0 + .. + S_(f-1) on and trains one model. With `shard_size` h
these form R_f = S_f / h replicas of h shards each, shard fastest: rank O_f + k * h + p holds shard p of replica k.
Without, the federation is the one shard group. A *federated group* joins the ranks that hold the same shard in all
federations, and exchanges:

- sizes all equal: every rank with the ranks at its own place in the other federations;
- sizes that differ, with h: for every shard p the communicating ranks O_f + (p % R_f) * h + p; the others stand alone
  and receive from the one in their replica group;
- sizes that differ, without h: the shards themselves differ in size, so no two ranks hold the same. The model is cut
  where the shards of *all* federations have a border, into g = gcd(S_0, S_1, ..) parts, and the ranks that hold pieces
  of one part are together: S_f / g consecutive ranks of every federation. The source has no answer here. This one is
  the first rule where sizes are equal, leaves nobody without the result, and keeps groups disjoint, as JAX requires.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import gcd
from typing import TYPE_CHECKING, Any, Literal, get_args

from dualmesh.errors import ArgumentError, RankError, did_you_mean, listed
from dualmesh.topology.federation_axes import FederatedGroups
from dualmesh.topology.rank_groups import RankGroups
from dualmesh.topology.resolve import whole

if TYPE_CHECKING:
    from dualmesh.topology.federation import FederatedSpec

Kind = Literal["federated", "replica", "shard", "federation"]

KINDS: tuple[Kind, ...] = get_args(Kind)
"""The partitions of a federated world; `FederatedTopology.group_spec` has them as axes of these names."""


@dataclass(frozen=True)
class FederatedTopology:
    """A federation in a world of known size. Frozen and hashable; made by `FederatedSpec.resolve`.

    Answers in the time that the answer takes; nothing is as long as the world but `partition`.
    """

    spec: "FederatedSpec"
    """What was declared, with all sizes known."""

    # -- sizes -----------------------------------------------------------------------------------------------------

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Ranks in each federation."""
        sizes = self.spec.group_sizes
        return sizes if isinstance(sizes, tuple) else (sizes,)

    @property
    def shard_size(self) -> int | None:
        """Ranks that a replica is sharded over; None: the whole federation."""
        return self.spec.shard_size

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return tuple(accumulate(self.sizes))

    @cached_property
    def parts(self) -> int:
        """How many parts the model is cut into at borders that the shards of all federations have."""
        return self.shard_size or gcd(*self.sizes)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._ends[-1]

    @property
    def federated_world_size(self) -> int:
        """Number of federations."""
        return len(self.sizes)

    @cached_property
    def is_symmetric(self) -> bool:
        """Whether all federations have the same size."""
        return len(set(self.sizes)) == 1

    @cached_property
    def replica_world_size(self) -> tuple[int, ...] | None:
        """Number of replicas in each federation; None without `shard_size`."""
        return None if self.shard_size is None else tuple(size // self.shard_size for size in self.sizes)

    # -- where a rank is -------------------------------------------------------------------------------------------

    def federated_rank(self, rank: int) -> int:
        """Return the number of a rank's federation. *Pure.*

        Raises:
            RankError: The rank is not in the world.
        """
        return self._place(rank)[0]

    def federated_index(self, rank: int) -> int:
        """Return the place of a rank inside its federation. *Pure.*"""
        return self._place(rank)[1]

    def replica_rank(self, rank: int) -> int | None:
        """Return the replica of a rank, counted inside its federation; None without `shard_size`. *Pure.*"""
        index = self.federated_index(rank)
        return None if self.shard_size is None else index // self.shard_size

    def shard_index(self, rank: int) -> int:
        """Return which shard of the model a rank holds. *Pure.*"""
        index = self.federated_index(rank)
        return index if self.shard_size is None else index % self.shard_size

    # -- who speaks to whom ----------------------------------------------------------------------------------------

    def communicating(self, federated_rank: int) -> tuple[int, ...]:
        """Return the ranks of a federation that exchange, by shard: spread over its replicas. *Pure.*

        Raises:
            RankError: There is no such federation.
        """
        number = whole(federated_rank)
        if number is None or not 0 <= number < len(self.sizes):
            raise RankError(
                f"FederatedTopology: there is no federation {federated_rank!r}. Federations: 0..{len(self.sizes) - 1}.",
                federated_rank=federated_rank,
            )
        shards = self.shard_size or self.sizes[number]
        return tuple(self._sender(number, shard) for shard in range(shards))

    def is_sender(self, rank: int) -> bool:
        """Tell whether a rank exchanges with other federations. *Pure.*"""
        return self._sender(self.federated_rank(rank), self.shard_index(rank)) == rank

    def receive_from(self, rank: int) -> int | None:
        """Return the rank of its replica group from which a rank receives the result; None for senders. *Pure.*"""
        sender = self._sender(self.federated_rank(rank), self.shard_index(rank))
        return None if sender == rank else sender

    # -- groups ----------------------------------------------------------------------------------------------------

    def federated_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the same part of the model in all federations, in that order. *Pure.*

        Where sizes differ and `shard_size` is given, a rank that is no sender is alone.
        """
        number, index = self._place(rank)
        if self.is_symmetric:
            return tuple(range(index, self.world_size, self.sizes[0]))
        if self.shard_size is not None:
            shard = index % self.shard_size
            if self._sender(number, shard) != rank:
                return (self._first(number) + index,)
            return tuple(self._sender(other, shard) for other in range(len(self.sizes)))
        part = index * self.parts // self.sizes[number]
        pieces = [size // self.parts for size in self.sizes]
        firsts = [self._first(other) + part * count for other, count in enumerate(pieces)]
        return tuple(first + place for first, count in zip(firsts, pieces, strict=True) for place in range(count))

    def replica_group(self, rank: int) -> tuple[int, ...] | None:
        """Return the ranks that hold the same shard in a rank's federation; None without `shard_size`. *Pure.*"""
        number, index = self._place(rank)
        if self.shard_size is None:
            return None
        return tuple(range(self._first(number) + index % self.shard_size, self._ends[number], self.shard_size))

    def shard_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that together hold one replica of the model, by shard. *Pure.*"""
        number, index = self._place(rank)
        width = self.shard_size or self.sizes[number]
        first = self._first(number) + index // width * width
        return tuple(range(first, first + width))

    def federation(self, rank: int) -> tuple[int, ...]:
        """Return all ranks of a rank's federation. *Pure.*"""
        number = self.federated_rank(rank)
        return tuple(range(self._first(number), self._ends[number]))

    def mesh(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Return a rank's federation as a grid of (replicas, shards); one row without `shard_size`. *Pure.*"""
        ranks = self.federation(rank)
        width = self.shard_size or len(ranks)
        return tuple(ranks[first : first + width] for first in range(0, len(ranks), width))

    # -- partitions ------------------------------------------------------------------------------------------------

    def partition(self, kind: Kind) -> list[tuple[int, ...]]:
        """Return all groups of a kind, by first rank; they cover the world, ranks alone included. *Pure*, O(world).

        Args:
            kind: "federated", "replica" (ranks alone without `shard_size`), "shard" or "federation".

        Raises:
            ArgumentError: There is no such kind.
        """
        if kind not in KINDS:
            raise ArgumentError(
                f"FederatedTopology.partition: no kind {kind!r}. Kinds: {listed(KINDS)}.{did_you_mean(kind, KINDS)}",
                kind=kind,
            )
        groups: list[tuple[int, ...]] = []
        seen = bytearray(self.world_size)
        for rank in range(self.world_size):
            if not seen[rank]:
                groups.append(self._group(kind, rank))
                for member in groups[-1]:
                    seen[member] = True
        return groups

    def axis_index_groups(self, kind: Kind) -> list[list[int]]:
        """Return `partition` as JAX's `axis_index_groups` over one axis of all ranks. *Pure*, O(world).

        Sizes may differ: only under `check_vma=False`, and a mean must divide by the size of its own group.
        """
        return [list(group) for group in self.partition(kind)]

    def rank_groups(self, kind: Kind) -> RankGroups:
        """Return `partition` as rank groups. *Pure*, O(world)."""
        return RankGroups(self.partition(kind))

    def group_spec(self) -> FederatedGroups:
        """Return all partitions as the axes of one spec, for a named state. *Pure*, O(world)."""
        return FederatedGroups(self, {kind: self.rank_groups(kind) for kind in KINDS})

    def _group(self, kind: Kind, rank: int) -> tuple[int, ...]:
        if kind == "federated":
            return self.federated_group(rank)
        if kind == "replica":
            return self.replica_group(rank) or (rank,)
        return self.shard_group(rank) if kind == "shard" else self.federation(rank)

    def _sender(self, group: int, shard: int) -> int:
        first = self._first(group)
        if self.shard_size is None:
            return first + shard
        return first + shard % (self.sizes[group] // self.shard_size) * self.shard_size + shard

    def _first(self, group: int) -> int:
        return self._ends[group] - self.sizes[group]

    def _place(self, rank: int) -> tuple[int, int]:
        """Return the federation of a rank and its place there."""
        number = whole(rank)
        if number is None or not 0 <= number < self.world_size:
            raise RankError(
                f"FederatedTopology: rank {rank!r} is not in the world. Ranks: 0..{self.world_size - 1}.",
                rank=rank,
                world_size=self.world_size,
            )
        federation = bisect_right(self._ends, number)
        return federation, number - self._first(federation)

    def __getstate__(self) -> dict[str, Any]:
        return {"spec": self.spec}
