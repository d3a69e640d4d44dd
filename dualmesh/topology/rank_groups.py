"""`RankGroups`: a partition that is no grid, listed group by group.

Axes that are digits of a rank are in `layout`; named axes over rank groups, for a state, are in `group_topology`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dualmesh._support.checks import items_in
from dualmesh._support.plain_data import check_keys
from dualmesh.errors import MembershipError, RankError, listed
from dualmesh.topology.resolve import positive, refuse, whole


@dataclass(frozen=True, init=False)
class RankGroups:
    """Disjoint groups of ranks: of any sizes, in any order, covering all ranks or not. Frozen and hashable; a value.

    The order inside a group is meaning: the index of a rank is its place in the list.

    Args:
        groups: One list of ranks per group.
        rank_offset: Added to every rank.

    Raises:
        SpecError: A group is empty, or a rank is no rank or is listed twice; the message lists every problem.

    >>> groups = RankGroups([[5, 0, 1], [2, 3]])
    >>> groups.index(5), groups.ranks(1), groups.size(3), groups.is_member(4)
    (0, (5, 0, 1), 2, False)
    """

    groups: tuple[tuple[int, ...], ...]

    def __init__(self, groups: Iterable[Iterable[int]], *, rank_offset: int = 0) -> None:
        offset = whole(rank_offset)
        problems = [] if offset is not None else [f"rank_offset is {rank_offset!r}. It must be an integer."]
        checked = tuple(
            _check_group(place, group, offset or 0, problems) for place, group in enumerate(_lists(groups, problems))
        )
        problems += _repetitions(checked)
        refuse("RankGroups", problems, groups=groups)
        object.__setattr__(self, "groups", checked)

    @classmethod
    def consecutive(cls, sizes: Iterable[int], *, rank_offset: int = 0) -> "RankGroups":
        """Return groups of consecutive ranks, one per size: the processes of each node, of each federation. *Pure.*

        >>> RankGroups.consecutive([2, 3], rank_offset=4).groups
        ((4, 5), (6, 7, 8))
        """
        groups: list[range] = []
        first = 0
        for size in sizes:
            count = positive("RankGroups.consecutive", "size", size)
            groups.append(range(first, first + count))
            first += count
        return cls(groups, rank_offset=rank_offset)

    @cached_property
    def _places(self) -> Mapping[int, tuple[int, int]]:
        return {rank: (place, index) for place, group in enumerate(self.groups) for index, rank in enumerate(group)}

    @property
    def members(self) -> tuple[int, ...]:
        """All ranks that are in a group, rising."""
        return tuple(sorted(self._places))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of every group, in order."""
        return tuple(len(group) for group in self.groups)

    def is_member(self, rank: int) -> bool:
        """Tell whether a rank is in a group. *Pure.*"""
        return rank in self._places

    def size(self, rank: int | None = None) -> int:
        """Return the size of a rank's group; without a rank, the size that all groups have. *Pure.*

        Raises:
            MembershipError: The rank is in no group.
            RankError: No rank was named, and the groups have different sizes.
        """
        if rank is not None:
            return len(self.ranks(rank))
        sizes = set(self.sizes)
        if len(sizes) == 1:
            return sizes.pop()
        raise RankError(
            f"RankGroups: the groups have the sizes {listed(self.sizes)}, so the size depends on the rank. Name one "
            f"(rank=...).",
            sizes=self.sizes,
        )

    def index(self, rank: int) -> int:
        """Return the place of a rank in its group's list. *Pure.*

        Raises:
            MembershipError: The rank is in no group.
        """
        return self._place(rank)[1]

    def ranks(self, rank: int) -> tuple[int, ...]:
        """Return the group of a rank, in the listed order. *Pure.*

        Raises:
            MembershipError: The rank is in no group.
        """
        return self.groups[self._place(rank)[0]]

    def member(self, rank: int, index: int) -> int:
        """Return the rank at `index` in the group of `rank`. *Pure.*

        Raises:
            MembershipError: The rank is in no group.
            RankError: The index is outside its group.
        """
        group = self.ranks(rank)
        if not 0 <= index < len(group):
            raise RankError(
                f"RankGroups: the group {group} of rank {rank} has no index {index!r}. Indices: 0..{len(group) - 1}.",
                index=index,
            )
        return group[index]

    def partition(self) -> list[tuple[int, ...]]:
        """Return all groups, in the listed order. *Pure.*"""
        return list(self.groups)

    def covers(self, world_size: int) -> bool:
        """Tell whether exactly the ranks 0..world_size-1 are members. *Pure.*"""
        return self.members == tuple(range(world_size))

    def to_dict(self) -> dict[str, Any]:
        """Return the groups as plain data. *Pure.*"""
        return {"groups": [list(group) for group in self.groups]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "RankGroups":
        """Build groups from what `to_dict` gives; a key `rank_offset` is added to every rank. *Pure.*"""
        check_keys("RankGroups.from_dict", data, ("groups", "rank_offset"), ("groups",))
        return cls(data["groups"], rank_offset=data.get("rank_offset", 0))

    def __len__(self) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return iter(self.groups)

    def __getstate__(self) -> dict[str, Any]:
        return {"groups": self.groups}

    def __repr__(self) -> str:
        shown = ", ".join(str(list(group)) for group in self.groups[:8])
        return f"RankGroups([{shown}{', ..' if self.groups[8:] else ''}])"

    def _place(self, rank: int) -> tuple[int, int]:
        try:
            return self._places[rank]
        except (KeyError, TypeError):
            raise MembershipError(
                f"RankGroups: rank {rank!r} is in no group. Members: {listed(self.members)}. Ask is_member first.",
                rank=rank,
                groups=self.groups,
            ) from None


def _lists(groups: Any, problems: list[str]) -> list[Any]:
    items = items_in(groups)
    if items is not None:
        return list(items)
    problems.append(f"the groups are {groups!r}. Give a list of lists of ranks.")
    return []


def _check_group(place: int, group: Any, offset: int, problems: list[str]) -> tuple[int, ...]:
    given = items_in(group)
    if given is None:
        problems.append(f"group {place} is {group!r}. Give a list of ranks.")
        return ()
    ranks = [whole(rank) for rank in given]
    bad = [rank for rank, number in zip(given, ranks, strict=True) if number is None or number + offset < 0]
    if bad:
        problems.append(f"group {place} has {listed(map(repr, bad))}. Ranks are integers of at least 0.")
    if not given:
        problems.append(f"group {place} is empty. A group has at least one rank.")
    return tuple(rank + offset for rank in ranks if rank is not None)


def _repetitions(groups: Sequence[tuple[int, ...]]) -> Iterator[str]:
    seen: dict[int, int] = {}
    for place, group in enumerate(groups):
        for rank in group:
            if rank in seen:
                yield f"rank {rank} is listed twice (groups {seen[rank]} and {place}). Groups are disjoint."
            seen.setdefault(rank, place)
