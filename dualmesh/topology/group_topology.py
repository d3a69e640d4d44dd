"""Named axes that are rank groups, and what they answer in a world: `GroupSpec` and `GroupTopology`.

One partition is in `rank_groups`; axes that are digits of a rank are in `spec` and `topology`, which these resemble.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NoReturn

from dualmesh._support.plain_data import pairs_in, read_fields, stands_as, write_fields, write_pairs
from dualmesh.errors import MembershipError, RankError, SpecError, UnknownAxisError, counted, did_you_mean, listed
from dualmesh.topology.layout import Digit, Layout
from dualmesh.topology.rank_groups import RankGroups
from dualmesh.topology.resolve import ROLES, STAGED, SUMMED_ROLES, TOKEN_ROLES, positive, refuse, whole
from dualmesh.topology.spec import View, parts_of, read_named, write_roles
from dualmesh.topology.topology import Axis, Topology

AXIS = "group"
"""What the axis of rank groups given without a name is called."""

NO_GRID = (
    "Topology: axis {axis!r} is a list of rank groups, which has no place in a grid, so {what} cannot be answered. Ask "
    "for its groups (ranks, index, partition), or declare a grid with dm.TopologySpec."
)


@dataclass(frozen=True, init=False)
class GroupSpec:
    """Named axes that are rank groups, before the size of the world is known. Frozen and hashable.

    Has the face of `TopologySpec` where it means something: no grid, no views, no combined axes.

    Args:
        axes: Rank groups (or lists of lists) by axis name.
        roles: Which axis plays which part, as in `TopologySpec`.

    >>> spec = GroupSpec({"node": RankGroups.consecutive([3, 1]), "heads": [[0, 3]]})
    >>> topology = spec.resolve(4)
    >>> topology.ranks("node", 1), topology.is_member("heads", 1)
    ((0, 1, 2), False)
    """

    listed_axes: tuple[tuple[str, RankGroups], ...] = stands_as(
        "rank_groups",
        lambda axes: write_pairs(axes, lambda groups: groups.to_dict()["groups"]),
        read_named("rank_groups"),
        argument="axes",
    )
    parts: tuple[tuple[str, tuple[str, ...]], ...] = stands_as("roles", write_roles, left_out=())

    base: ClassVar[tuple[()]] = ()
    combinations: ClassVar[tuple[()]] = ()
    named_views: ClassVar[tuple[tuple[str, View], ...]] = ()
    rank_offset: ClassVar[int] = 0

    def __init__(
        self,
        axes: Mapping[str, "RankGroups | Iterable[Iterable[int]]"] | Iterable[tuple[str, Any]],
        roles: Mapping[str, Iterable[str] | str] | None = None,
    ) -> None:
        groups = (
            (name, value if isinstance(value, RankGroups) else RankGroups(value))
            for name, value in pairs_in("Topology", "axes of rank groups", axes)
        )
        object.__setattr__(self, "listed_axes", tuple(groups))
        object.__setattr__(self, "parts", parts_of(roles or None))

    @classmethod
    def of(cls, groups: "RankGroups | Iterable[Iterable[int]]") -> "GroupSpec":
        """Return the spec whose one axis, "group", has these groups. *Pure.*"""
        return cls({AXIS: groups})

    @property
    def axes(self) -> dict[str, RankGroups]:
        """Rank groups by axis name."""
        return dict(self.listed_axes)

    @property
    def combined(self) -> dict[str, tuple[str, ...]]:
        """None: lists do not combine."""
        return {}

    @property
    def views(self) -> dict[str, View]:
        """None: lists are not factored."""
        return {}

    @property
    def roles(self) -> dict[str, tuple[str, ...]]:
        """Axes by the part they play."""
        return dict(self.parts)

    def resolve(self, world_size: int) -> "GroupTopology":
        """Validate for a world. *Pure.*

        Raises:
            SpecError: The lists do not fit the world; the message lists every problem.
        """
        world_size = positive("GroupSpec.resolve", "world_size", world_size)
        problems = [] if self.listed_axes else ["no axes are declared. Name at least one."]
        for name, groups in self.listed_axes:
            if not isinstance(name, str) or not name or name == "world":
                problems.append(f"axis {name!r}: names are non-empty strings, and 'world' is kept for all ranks.")
            beyond = [rank for rank in groups.members if rank >= world_size]
            if beyond:
                problems.append(
                    f"axis {name!r} names {counted(len(beyond), 'rank')} outside the world: {listed(beyond)}. Ranks: "
                    f"0..{world_size - 1}."
                )
        for part, members in self.parts:
            if part not in ROLES:
                problems.append(f"role {part!r} is unknown. Roles: {listed(ROLES)}.{did_you_mean(part, ROLES)}")
            if len(members) != 1 or members[0] not in self.axes:
                problems.append(f"role {part!r} is {members!r}. It must be one of the axes: {listed(self.axes)}.")
        refuse("Topology", problems or self._staged())
        return GroupTopology(self, world_size)

    def _staged(self) -> list[str]:
        """Return what is wrong with the role "stages": lists of another role that two of its ranks share."""
        stages = {
            rank: number for name in self.roles.get("stages", ()) for number, rank in _number_ranks(self.axes[name])
        }
        return [
            STAGED.format(stage=self.roles["stages"][0], axis=axis, role=f"role {part!r}")
            for part in (*TOKEN_ROLES, *SUMMED_ROLES)
            for axis in self.roles.get(part, ())
            for group in self.axes[axis]
            if len(found := [stages[rank] for rank in group if rank in stages]) > len(set(found))
        ][:1]

    def to_dict(self) -> dict[str, Any]:
        """Return the spec as plain data, keys in any order. *Pure.*"""
        return write_fields(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "GroupSpec":
        """Build a spec from what `to_dict` gives. *Pure.*

        Raises:
            SpecError: As `TopologySpec.from_dict`.
        """
        return read_fields("GroupSpec.from_dict", cls, data)

    def __repr__(self) -> str:
        roles = f", roles={self.roles!r}" if self.parts else ""
        return f"GroupSpec({self.axes!r}{roles})"


def _number_ranks(groups: RankGroups) -> Iterator[tuple[int, int]]:
    """Yield (number of its list, rank) of every rank."""
    return ((number, rank) for number, group in enumerate(groups) for rank in group)


class GroupTopology(Topology):
    """Axes that are rank groups, in a world of known size. Answers what `Topology` does, but from lists.

    Its one grid axis is "world": the ranks that are in some group, rising. Specs and meshes exist for that; what else
    only a grid can answer (layouts, coordinates, combined axes) is refused by name.
    """

    spec: GroupSpec  # type: ignore[assignment]  # both kinds answer what is asked of a spec
    _positions: Mapping[int, int]

    def __init__(self, spec: GroupSpec, world_size: int) -> None:
        members = sorted({rank for _, groups in spec.listed_axes for rank in groups.members})
        super().__init__(spec, world_size, {"world": Layout.of([Digit(len(members), 1)])})  # type: ignore[arg-type]
        self.__dict__.update(
            base_axes=("world",),
            axis_names=(*spec.axes, "world"),
            _positions={rank: position for position, rank in enumerate(members)},
        )

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that are in a group of some axis, rising."""
        return tuple(self._positions)

    @cached_property
    def _axes(self) -> Mapping[Axis, RankGroups]:
        none = RankGroups([rank] for rank in self.members)
        axes: dict[Axis, RankGroups] = {"world": RankGroups([self.members]), (): none}
        axes.update(self.spec.axes)
        return axes

    def groups(self, axis: Axis) -> RankGroups:
        """Return the rank groups of an axis; of no axis, (), every rank alone. *Pure.*

        Raises:
            UnknownAxisError: The topology has no such axis.
            SpecError: A tuple names several axes; lists do not combine.
        """
        return self._axes[self._name(axis)]

    def _name(self, axis: Axis) -> Axis:
        if isinstance(axis, tuple) and axis:
            if len(axis) != 1:
                self._no_grid(axis, "a combination of axes")
            axis = axis[0]
        try:
            if axis in self._axes:
                return axis
        except TypeError:
            pass
        names = self.axis_names
        raise UnknownAxisError(
            f"Topology has no axis {axis!r}. Axes: {listed(names)}.{did_you_mean(axis, names)}", axis=axis, axes=names
        )

    def size(self, axis: Axis, rank: int | None = None) -> int:
        """Return the size of a rank's group; without a rank, the size that all groups of the axis have. *Pure.*"""
        return self.groups(axis).size() if rank is None else self._around(axis, rank).size(rank)

    def group_sizes(self, axis: Axis, ranks: Iterable[int] | None = None) -> tuple[int, ...]:
        """Return the different sizes that the groups of some ranks (None: all groups) have, rising. *Pure.*"""
        groups = self.groups(axis)
        sizes = groups.sizes if ranks is None else [self._around(axis, rank).size(rank) for rank in ranks]
        return tuple(sorted(set(sizes)))

    def rank_groups(self, axis: Axis) -> RankGroups | None:
        """Return the lists of ranks that an axis without digits is, or None. *Pure.*"""
        return None if self._name(axis) in ("world", ()) else self.groups(axis)

    def index(self, axis: Axis, rank: int) -> int:
        """Return the place of a rank in its group's list. *Pure.*"""
        return self._around(axis, rank).index(rank)

    def ranks(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """Return the group of a rank, in the listed order. *Pure.*"""
        return self._around(axis, rank).ranks(rank)

    def member(self, axis: Axis, rank: int, index: int) -> int:
        """Return the rank at `index` in the group of `rank`. *Pure.*"""
        return self._around(axis, rank).member(rank, index)

    def partition(self, axis: Axis) -> list[tuple[int, ...]]:  # type: ignore[override]  # groups may differ in size
        """Return all groups of an axis, in the listed order. *Pure.*"""
        return self.groups(axis).partition()

    def is_member(self, axis: Axis, rank: int) -> bool:
        """Tell whether a rank is in a group of an axis. *Pure.*"""
        return self.groups(axis).is_member(rank)

    def has_rank(self, rank: int) -> bool:
        """Tell whether a rank is in a group of any axis. *Pure.*"""
        return rank in self._positions

    def position(self, rank: int) -> int:
        """Return the place of a rank among the members. *Pure.*

        Raises:
            RankError: The rank is not in this world.
            MembershipError: The rank is in no group of any axis.
        """
        return self._around("world", rank).index(rank)

    def _around(self, axis: Axis, rank: int) -> RankGroups:
        """Return the groups of an axis that a rank is in, or refuse the rank."""
        groups, number = self.groups(axis), whole(rank)
        if number is None or not 0 <= number < self.world_size:
            raise RankError(
                f"Topology: rank {rank!r} is not in its world. Ranks: 0..{self.world_size - 1}.",
                rank=rank,
                world_size=self.world_size,
            )
        if not groups.is_member(number):
            raise MembershipError(
                f"Topology: rank {rank} is in no group of axis {axis!r}. Its groups: {listed(groups)}. Ask is_member "
                f"first.",
                rank=rank,
                axis=axis,
                groups=groups,
            )
        return groups

    def layout(self, axis: Axis) -> Layout:
        """Return the digits of "world" or of no axis, (); refuse the others: they have none. *Pure.*"""
        name = self._name(axis)
        if name == "world":
            return self.layouts["world"]
        return Layout(()) if name == () else self._no_grid(name, "its layout (specs, meshes)")

    def coords(self, rank: int) -> NoReturn:
        """Refuse: there is no grid. *Pure.*"""
        self._no_grid(self.axis_names, f"the coordinates of rank {rank}")

    def _no_grid(self, axis: Axis, what: str) -> NoReturn:
        raise SpecError(NO_GRID.format(axis=axis, what=what), axis=axis)

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={counted(len(groups), 'group')}" for name, groups in self.spec.listed_axes)
        return f"GroupTopology({axes}, world_size={self.world_size})"

    __str__ = __repr__
