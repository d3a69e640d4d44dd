"""`Nodes`: which ranks share a machine, whatever their order and however many each machine holds.

What launchers say about it is read in `node_variables`; asking the other processes is for the backends.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from dualmesh.errors import LaunchError, SpecError, counted, listed
from dualmesh.topology.group_topology import GroupSpec
from dualmesh.topology.rank_groups import RankGroups
from dualmesh.topology.resolve import refuse

UNEQUAL_NODES = (
    "Nodes.inter_node: the nodes hold {sizes} ranks, so ranks with the same local rank are not on every node. Groups "
    "across nodes need equal sizes: use `leaders()` (one rank of each node), or start as many ranks on every node."
)


class Place(NamedTuple):
    """Where a rank is among the nodes; None: its launcher did not say."""

    local_rank: int
    local_size: int
    node_rank: int | None = None
    node_count: int | None = None


@dataclass(frozen=True)
class Nodes:
    """The ranks of every node: unequal numbers and ranks that are not neighbours are allowed. Frozen and hashable.

    Args:
        groups: One list of ranks per node, by node rank; the place in the list is the local rank.

    Raises:
        SpecError: A rank is missing or listed twice; the message lists every problem.

    >>> nodes = Nodes.of_hosts(["a", "b", "a", "a"])
    >>> nodes.intra_node().groups, nodes.local_rank(3), nodes.node_rank(1), nodes.leaders().groups
    (((0, 2, 3), (1,)), 2, 1, ((0, 1),))
    """

    groups: RankGroups

    def __post_init__(self) -> None:
        groups = self.groups if isinstance(self.groups, RankGroups) else RankGroups(self.groups)
        object.__setattr__(self, "groups", groups)
        world_size = sum(groups.sizes)
        problems = [] if groups.groups else ["no nodes are given. Give at least one list of ranks."]
        missing = sorted(set(range(world_size)).difference(groups.members))
        if missing:
            problems.append(
                f"{counted(world_size, 'rank')} are listed, but not {listed(missing)}. Every rank from 0 on is on a "
                f"node."
            )
        refuse("Nodes", problems, groups=groups)

    @classmethod
    def of_sizes(cls, sizes: Iterable[int]) -> "Nodes":
        """Return nodes that hold consecutive ranks: the first size from rank 0 on, and so on. *Pure.*

        >>> Nodes.of_sizes([2, 1]).intra_node().groups
        ((0, 1), (2,))
        """
        return cls(RankGroups.consecutive(sizes))

    @classmethod
    def of_hosts(cls, hosts: Iterable[Hashable]) -> "Nodes":
        """Return nodes from the identity of every rank's host, by rank; nodes in the order first seen. *Pure.*"""
        found: dict[Hashable, list[int]] = {}
        for rank, host in enumerate(hosts):
            found.setdefault(host, []).append(rank)
        return cls(RankGroups(found.values()))

    @classmethod
    def of_places(cls, places: Sequence[Place], hosts: Sequence[Hashable] | None = None) -> "Nodes":
        """Return nodes from what the launcher told every rank, by rank, if it agrees with itself. *Pure.*

        Args:
            places: One per rank.
            hosts: What tells nodes apart where places have no node rank: one identity per rank.

        Raises:
            LaunchError: The places contradict each other; the message names the ranks.
        """
        numbered = all(place.node_rank is not None for place in places)
        if not numbered and (hosts is None or len(hosts) != len(places)):
            unknown = [rank for rank, place in enumerate(places) if place.node_rank is None]
            raise LaunchError(
                f"Nodes: ranks {listed(unknown)} do not know their node, and there is not one host per rank. Exchange "
                f"host identities, or set GROUP_RANK and GROUP_WORLD_SIZE.",
                ranks=tuple(unknown),
            )
        keys: Sequence[Hashable] = [place.node_rank for place in places] if numbered else list(hosts or ())
        members: dict[Hashable, list[int]] = {}
        for rank, key in enumerate(keys):
            members.setdefault(key, []).append(rank)
        _agree(places, members, numbered=numbered)
        lists = [sorted(ranks, key=lambda rank: places[rank].local_rank) for ranks in members.values()]
        if numbered:
            lists.sort(key=lambda ranks: places[ranks[0]].node_rank or 0)
        return cls(RankGroups(lists))

    # -- answers ---------------------------------------------------------------------------------------------------

    @cached_property
    def _numbers(self) -> Mapping[int, int]:
        return {group[0]: number for number, group in enumerate(self.groups)}

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(self.groups.sizes)

    @property
    def node_count(self) -> int:
        """Number of nodes."""
        return len(self.groups)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks on each node, by node rank."""
        return self.groups.sizes

    @property
    def is_uniform(self) -> bool:
        """Whether all nodes hold the same number of ranks."""
        return len(set(self.sizes)) == 1

    def node_rank(self, rank: int) -> int:
        """Return the number of a rank's node. *Pure.*

        Raises:
            MembershipError: The rank is not in the world.
        """
        first = self.groups.ranks(rank)[0]
        return self._numbers[first]

    def local_rank(self, rank: int) -> int:
        """Return the place of a rank on its node. *Pure.*"""
        return self.groups.index(rank)

    def local_size(self, rank: int) -> int:
        """Return the number of ranks on a rank's node. *Pure.*"""
        return self.groups.size(rank)

    def place(self, rank: int) -> Place:
        """Return where a rank is. *Pure.*"""
        return Place(self.local_rank(rank), self.local_size(rank), self.node_rank(rank), self.node_count)

    # -- groups ----------------------------------------------------------------------------------------------------

    def intra_node(self) -> RankGroups:
        """Return the ranks of each node: groups of any sizes, by node rank. *Pure.*"""
        return self.groups

    def inter_node(self) -> RankGroups:
        """Return the ranks with the same local rank, one from every node, by local rank. *Pure.*

        Raises:
            SpecError: Nodes hold different numbers of ranks.
        """
        if not self.is_uniform:
            raise SpecError(UNEQUAL_NODES.format(sizes=listed(self.sizes)), sizes=self.sizes)
        return RankGroups(zip(*self.groups, strict=True))

    def leaders(self) -> RankGroups:
        """Return one group: the rank with local rank 0 of every node; the others are in no group. *Pure.*"""
        return RankGroups([[group[0] for group in self.groups]])

    def group_spec(self) -> GroupSpec:
        """Return axes "intra_node", "leaders" and, between nodes of equal size, "inter_node". *Pure.*"""
        axes = {"intra_node": self.intra_node(), "leaders": self.leaders()}
        return GroupSpec({**axes, "inter_node": self.inter_node()} if self.is_uniform else axes)

    def __getstate__(self) -> dict[str, Any]:
        return {"groups": self.groups}

    def __repr__(self) -> str:
        return f"Nodes({self.groups!r})"


def _agree(places: Sequence[Place], members: Mapping[Hashable, Sequence[int]], *, numbered: bool) -> None:
    """Refuse places that cannot all be true."""
    problems: list[str] = []
    for key, ranks in members.items():
        node = f"node {key}" if numbered else f"host {key!r}"
        found = [places[rank].local_rank for rank in ranks]
        if sorted(found) != list(range(len(ranks))):
            problems.append(
                f"{node} has the ranks {listed(ranks)} with the local ranks {listed(found)}. They must be 0 to "
                f"{len(ranks) - 1}, each once."
            )
        wrong = [rank for rank in ranks if places[rank].local_size != len(ranks)]
        if wrong:
            sizes = sorted({places[rank].local_size for rank in wrong})
            problems.append(
                f"{node} has {counted(len(ranks), 'rank')}, but ranks {listed(wrong)} were told {listed(sizes)}."
            )
    counts = {place.node_count for place in places} - {None}
    if numbered and sorted(key for key in members if isinstance(key, int)) != list(range(len(members))):
        problems.append(f"the node ranks are {listed(sorted(members, key=str))}. They must be 0 to {len(members) - 1}.")
    if counts - {len(members)}:
        problems.append(
            f"there are {counted(len(members), 'node')}, but ranks were told {listed(sorted(counts, key=str))}."
        )
    if problems:
        shown = "\n".join(f"  - {problem}" for problem in problems)
        raise LaunchError(
            f"Nodes: what the launcher told the ranks cannot be.\n{shown}\nCheck the launcher's variables on the ranks "
            f"named.",
            problems=tuple(problems),
        )
