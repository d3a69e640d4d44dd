"""A resolved spec: every size known for a world, every question about ranks answered in closed form.

How a spec is checked and resolved is in `resolve`; states, groups and meshes are in `state` and the backends.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dualmesh._support.checks import is_one_of
from dualmesh._support.provided import provided
from dualmesh.errors import RankError, SpecError, UnknownAxisError, did_you_mean, listed
from dualmesh.topology.diff import differences
from dualmesh.topology.layout import Layout, clash
from dualmesh.topology.resolve import ROLES, whole

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from dualmesh.topology.rank_groups import RankGroups
    from dualmesh.topology.spec import TopologySpec

Axis = str | tuple[str, ...]


class Topology:
    """Axes of known size over ranks `rank_offset .. rank_offset + world_size - 1`. Frozen and hashable; a value.

    Wherever an axis is asked for, a tuple of names is a combined axis, first = slowest.

    >>> import dualmesh as dm
    >>> topology = dm.TopologySpec({"dp": -1, "tp": 2}).resolve(8)
    >>> topology.ranks("dp", 3)
    (1, 3, 5, 7)
    >>> topology.partition("tp").tolist()
    [[0, 1], [2, 3], [4, 5], [6, 7]]
    """

    def __init__(self, spec: "TopologySpec", world_size: int, layouts: Mapping[str, Layout]) -> None:
        self.spec = spec
        self.world_size = world_size
        self.rank_offset = spec.rank_offset
        self.base_axes = tuple(name for name, _ in spec.base)
        self.axis_names = tuple(layouts)
        self.layouts = MappingProxyType(dict(layouts))
        self.joined: dict[tuple[str, ...], Layout] = {}
        self._hash = hash((spec, world_size))

    def __setattr__(self, name: str, value: object) -> None:
        if "_hash" in self.__dict__:
            raise AttributeError(f"Topology is frozen: {name} cannot be set. Build another spec and resolve it.")
        object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Topology):
            return NotImplemented
        return self is other or (self.world_size == other.world_size and self.spec == other.spec)

    def __hash__(self) -> int:
        return self._hash

    def __copy__(self) -> "Topology":
        return self

    def __deepcopy__(self, memo: object) -> "Topology":
        return self

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"Topology is frozen: {name} cannot be deleted.")

    def __reduce__(self) -> tuple[object, ...]:
        return _resolved_again, (self.spec, self.world_size)

    def __repr__(self) -> str:
        parts = [listed(f"{name}={size}" for name, size in self.sizes.items())]
        for name, view in self.spec.named_views:
            parts.append(f"{name}=({', '.join(f'{axis}={size}' for axis, size in view.sizes)})")
        parts.append(f"world_size={self.world_size}")
        parts += [f"rank_offset={self.rank_offset}"] if self.rank_offset else []
        return f"Topology({', '.join(parts)})"

    def __str__(self) -> str:
        text: str = provided("pictures").draw_text(self)
        return text

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """The size of every base axis, outermost first."""
        return MappingProxyType({name: self.layouts[name].size for name in self.base_axes})

    def layout(self, axis: Axis) -> Layout:
        """Return the digits of an axis. *Pure.*

        Raises:
            UnknownAxisError: The topology has no such axis.
            SpecError: A tuple names axes that share ranks.
        """
        try:
            if isinstance(axis, tuple):
                found = self.joined.get(axis)
                return found if found is not None else combined_layout(self, axis)
            return self.layouts[axis]
        except UnknownAxisError:  # of one name in a tuple, which it says
            raise
        except (KeyError, TypeError):
            raise self._unknown(axis) from None

    def _unknown(self, axis: object) -> UnknownAxisError:
        names = listed(self.axis_names)
        return UnknownAxisError(
            f"Topology has no axis {axis!r}. Axes: {names}.{did_you_mean(axis, self.axis_names)}",
            axis=axis,
            axes=self.axis_names,
        )

    def size(self, axis: Axis, rank: int | None = None) -> int:
        """Return the number of positions along an axis, the same for every rank. *Pure.*"""
        return self.layout(axis).size

    def group_sizes(self, axis: Axis, ranks: Iterable[int] | None = None) -> tuple[int, ...]:
        """Return the different sizes that the groups of some ranks (None: all) have: one, in a grid. *Pure.*"""
        return (self.layout(axis).size,)

    def rank_groups(self, axis: Axis) -> "RankGroups | None":
        """Return the lists of ranks that an axis without digits is, or None: in a grid every axis has some. *Pure.*"""
        return None

    def index(self, axis: Axis, rank: int) -> int:
        """Return the position of a rank along an axis. *Pure.*"""
        return self.layout(axis).index(self.position(rank))

    def ranks(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """Return the ranks of the group of `rank`, in index order. *Pure.*"""
        group = self.layout(axis).ranks(self.position(rank))
        return tuple(member + self.rank_offset for member in group) if self.rank_offset else group

    def coords(self, rank: int) -> dict[str, int]:
        """Return the index of a rank along every base axis. *Pure.*"""
        position = self.position(rank)
        return {name: self.layouts[name].index(position) for name in self.base_axes}

    def member(self, axis: Axis, rank: int, index: int) -> int:
        """Return the rank at `index` in the group of `rank`. *Pure.*

        Raises:
            RankError: The index is outside the axis.
        """
        layout = self.layout(axis)
        if not 0 <= index < layout.size:
            raise RankError(
                f"Topology: axis {axis!r} has no index {index!r}. Indices: 0..{layout.size - 1}.",
                axis=axis,
                index=index,
            )
        return layout.member(self.position(rank), index) + self.rank_offset

    def partition(self, axis: Axis) -> "NDArray[np.int64]":
        """Return all groups of an axis, shape (n_groups, size), ordered by their first rank. *Pure.*"""
        return self.layout(axis).partition(self.world_size, self.rank_offset)

    @property
    def members(self) -> Sequence[int]:
        """The ranks of this world, rising."""
        return range(self.rank_offset, self.rank_offset + self.world_size)

    def has_rank(self, rank: int) -> bool:
        """Tell whether a rank is in this world. *Pure.*"""
        return 0 <= rank - self.rank_offset < self.world_size

    def is_member(self, axis: Axis, rank: int) -> bool:
        """Tell whether a rank is in a group of an axis: in a grid every rank of the world. *Pure.*"""
        return self.layout(axis).size > 0 and self.has_rank(rank)

    def position(self, rank: int) -> int:
        """Return a rank's place in the grid, `rank - rank_offset`. *Pure.*

        Raises:
            RankError: The rank is not in this world.
        """
        number = rank if type(rank) is int else whole(rank)
        if number is not None and 0 <= number - self.rank_offset < self.world_size:
            return number - self.rank_offset
        last = self.rank_offset + self.world_size - 1
        raise RankError(
            f"Topology: rank {rank!r} is not in its world. Ranks: {self.rank_offset}..{last}.",
            rank=rank,
            world_size=self.world_size,
        )

    def draw(
        self,
        path: "str | Path | None" = None,
        *,
        gpus_per_node: int = 8,
        rank: int | None = None,
        theme: str = "auto",
    ) -> Any:
        """Draw the topology as a `Picture`, and save it where a path is given; see `dualmesh.draw`. *Local.*"""
        return provided("pictures").draw(self, path, gpus_per_node=gpus_per_node, rank=rank, theme=theme)

    def _repr_html_(self) -> str:
        html: str = provided("notebooks").topology_html(self)
        return html

    def diff(self, other: "Topology") -> str:
        """Say what differs between this topology and another, line by line, or that nothing does. *Pure.*

        >>> import dualmesh as dm
        >>> small = dm.TopologySpec({"dp": 4, "tp": 2}).resolve(8)
        >>> print(small.diff(dm.TopologySpec({"dp": 8, "tp": 2}).resolve(16)))
        world_size: 8 -> 16
        dp: size 4 -> 8
        """
        return differences(self, other)

    def role(self, part: str) -> tuple[str, ...]:
        """Return the axes that play a part (data, params, loss, sequence, replicate, stages). *Pure.*

        Raises:
            SpecError: The part is unknown, or the spec does not say which axes play it.
        """
        roles = self.spec.roles
        if is_one_of(part, roles):
            return roles[part]
        if not is_one_of(part, ROLES):
            raise SpecError(
                f"Topology: no role {part!r}. Roles: {listed(ROLES)}.{did_you_mean(part, ROLES)}", role=part
            )
        raise SpecError(
            f"Topology: the spec does not say which axes play the role {part!r}. Roles given: {listed(roles)}. "
            f"Declare it: TopologySpec(..., roles={{{part!r}: (...)}}).",
            role=part,
        )


def combined_layout(topology: Topology, axes: tuple[str, ...]) -> Layout:
    """Return the digits of several axes read as one, and keep them for the next time. *Pure.*

    Raises:
        SpecError: They share ranks.
    """
    layouts = [topology.layout(name) for name in axes]
    clashing = clash(layouts)
    if clashing is not None:
        first, second = (axes[place] for place in clashing)
        raise SpecError(
            f"Topology: axes {first!r} and {second!r} of {axes!r} share ranks, so they do not combine. Name axes that "
            f"cross.",
            axes=axes,
        )
    return topology.joined.setdefault(axes, Layout.joined(layouts))


def _resolved_again(spec: "TopologySpec", world_size: int) -> Topology:
    return spec.resolve(world_size)
