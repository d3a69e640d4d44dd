"""What a user declares: axes with sizes, combined axes, views, roles, as plain frozen data.

Whether it fits a world is decided in `resolve`; the usual specs are written in `parallel_spec`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dualmesh._support.checks import items_in
from dualmesh._support.plain_data import (
    check_fields,
    pairs_in,
    read_fields,
    read_pairs,
    stands_as,
    write_fields,
    write_pairs,
)
from dualmesh._support.provided import provided
from dualmesh.errors import SpecError
from dualmesh.topology import spec_string
from dualmesh.topology.resolve import ROLES, VIEW_ROLES, fit, whole
from dualmesh.topology.topology import Topology


def read_sizes(where: str, data: Any) -> tuple[tuple[str, Any], ...]:
    """Return axes and sizes from plain data, outermost first. *Pure.*"""
    return read_pairs(where, "axes", data)


def read_named(key: str) -> Callable[[str, Any], tuple[tuple[str, Any], ...]]:
    """Return what reads names and what each stands for from the plain data under a key. *Pure.*"""
    return lambda where, data: read_pairs(where, key, data)


def write_members(pairs: tuple[tuple[str, tuple[str, ...]], ...]) -> list[Any]:
    """Return names, and the names each stands for, as plain data. *Pure.*"""
    return write_pairs(pairs, list)


def write_roles(pairs: tuple[tuple[str, tuple[str, ...]], ...]) -> dict[str, Any]:
    """Return roles as plain data: a mapping, since there are a few known ones, kept in one order. *Pure.*"""
    return {name: list(members) for name, members in pairs}


@dataclass(frozen=True, init=False)
class View:
    """A second factorisation of the ranks that some axes span.

    Args:
        over: The axes that are read as one number, first = slowest.
        axes: Names and sizes of the axes that this number is factored into, outermost first; one may be -1.
        roles: Which axes play which part for the parameters that lie on the view: "experts" (each index holds other
            ones), "params" (they are sharded), "replicate" (they have copies; also axes that the view does not span).

    >>> View(over=("dp_shard", "ulysses"), axes={"ep_fsdp": -1, "ep": 4}, roles={"params": "ep_fsdp"})
    View(over=('dp_shard', 'ulysses'), axes={'ep_fsdp': -1, 'ep': 4}, roles={'params': ('ep_fsdp',)})
    """

    over: tuple[str, ...] = stands_as("over", list)
    sizes: tuple[tuple[str, int], ...] = stands_as("axes", write_pairs, read_sizes)
    parts: tuple[tuple[str, tuple[str, ...]], ...] = stands_as("roles", write_roles, left_out=())

    def __init__(
        self,
        over: Iterable[str] | str,
        axes: Mapping[str, int] | Iterable[tuple[str, int]],
        roles: Mapping[str, Iterable[str] | str] | None = None,
    ) -> None:
        object.__setattr__(self, "over", names_of(over))
        object.__setattr__(self, "sizes", sizes_of("View axes", axes))
        object.__setattr__(self, "parts", parts_of(roles, VIEW_ROLES))

    @classmethod
    def of(cls, name: str, view: Any) -> "View":
        """Return a view, or plain data with the keys `over`, `axes` and `roles` as one. *Pure.*"""
        if isinstance(view, cls):
            return view
        where = f"Topology: view {name!r}"
        check_fields(where, cls, view)
        return cls(**view)

    @property
    def axes(self) -> dict[str, int]:
        """Names and sizes of the view's axes, outermost first."""
        return dict(self.sizes)

    @property
    def roles(self) -> dict[str, tuple[str, ...]]:
        """Axes by the part they play for the parameters that lie on the view."""
        return dict(self.parts)

    def __repr__(self) -> str:
        roles = f", roles={self.roles!r}" if self.parts else ""
        return f"View(over={self.over!r}, axes={self.axes!r}{roles})"


@dataclass(frozen=True, init=False)
class TopologySpec:
    """Named axes of a grid of ranks, before the size of the world is known. Frozen and hashable.

    Args:
        axes: Base axes and their sizes, outermost first (the last varies fastest); one may be -1.
        combined: Names for several axes read as one, first = slowest; of axes declared before, or of views.
        views: Second factorisations of the ranks of some axes.
        roles: Which axes play which part: "data" (data loading), "params" (parameter sharding), "loss" (loss and
            gradient reduction), "sequence" (sequence parallelism), "replicate" (parameter replication), "stages"
            (pipeline stages: each index holds other layers, for the same tokens).
        rank_offset: The first rank of the grid.

    >>> spec = TopologySpec({"dp": -1, "tp": 2})
    >>> spec.resolve(8).size("dp")
    4
    """

    base: tuple[tuple[str, int], ...] = stands_as("axes", write_pairs, read_sizes)
    combinations: tuple[tuple[str, tuple[str, ...]], ...] = stands_as(
        "combined", write_members, read_named("combined"), left_out=()
    )
    named_views: tuple[tuple[str, View], ...] = stands_as(
        "views",
        lambda views: write_pairs(views, write_fields),
        lambda where, data: read_views(where, data),
        left_out=(),
    )
    parts: tuple[tuple[str, tuple[str, ...]], ...] = stands_as("roles", write_roles, left_out=())
    rank_offset: int = stands_as("rank_offset", left_out=0)

    def __init__(
        self,
        axes: Mapping[str, int] | Iterable[tuple[str, int]],
        combined: Mapping[str, Iterable[str] | str] | Iterable[tuple[str, Iterable[str] | str]] | None = None,
        views: Mapping[str, "View | Mapping[str, Any]"] | Iterable[tuple[str, "View"]] | None = None,
        roles: Mapping[str, Iterable[str] | str] | None = None,
        *,
        rank_offset: int = 0,
    ) -> None:
        set_field = object.__setattr__
        set_field(self, "base", sizes_of("axes", axes))
        set_field(self, "combinations", tuple((n, names_of(m)) for n, m in _read_pairs("combined", combined)))
        set_field(self, "named_views", tuple((n, View.of(n, view)) for n, view in _read_pairs("views", views)))
        set_field(self, "parts", parts_of(roles))
        set_field(self, "rank_offset", plain(rank_offset))

    @property
    def axes(self) -> dict[str, int]:
        """Base axes and sizes as declared, outermost first."""
        return dict(self.base)

    @property
    def combined(self) -> dict[str, tuple[str, ...]]:
        """Combined axes and the axes they are made of, first = slowest."""
        return dict(self.combinations)

    @property
    def views(self) -> dict[str, View]:
        """Views by name."""
        return dict(self.named_views)

    @property
    def roles(self) -> dict[str, tuple[str, ...]]:
        """Axes by the part they play."""
        return dict(self.parts)

    def resolve(self, world_size: int) -> Topology:
        """Fill in -1 and validate for a world. *Pure.*

        Raises:
            SpecError: The spec does not fit the world; the message lists every problem.
        """
        fitted = fit(self, world_size)
        views = {name: View(view.over, dict(fitted.views[name]), view.roles) for name, view in self.named_views}
        spec = TopologySpec(dict(fitted.base), self.combined, views, self.roles, rank_offset=fitted.rank_offset)
        return Topology(spec, world_size, fitted.layouts)

    def to_dict(self) -> dict[str, Any]:
        """Return the spec as plain data (dicts, lists, strings, ints); keys may be put in any order. *Pure.*

        >>> TopologySpec({"pp": 2, "dp": -1}).to_dict()
        {'axes': [['pp', 2], ['dp', -1]]}
        """
        return write_fields(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "TopologySpec":
        """Build a spec from what `to_dict` gives. *Pure.*

        Where order is meaning, lists of pairs are read, lists of mappings of one key, and a mapping unless its keys
        are sorted, which is what tools make of any order.

        Raises:
            SpecError: The data is no mapping, has no axes, has a key that a spec does not know, or an order that
                cannot be known.
        """
        return read_fields("TopologySpec.from_dict", cls, data)

    def to_text(self) -> str:
        """Return the spec in one line that `from_text` reads back; the form is described in `spec_string`. *Pure.*

        >>> TopologySpec({"dp": -1, "tp": 2}, roles={"data": "dp"}).to_text()
        'dp* tp2 | @data = dp'
        """
        return spec_string.write_spec(self.to_dict())

    @classmethod
    def from_text(cls, text: str) -> "TopologySpec":
        """Build a spec from its compact text. *Pure.*

        Raises:
            SpecError: The text does not follow the notation; the message shows where.

        >>> TopologySpec.from_text("pp2 dp4 tp2 | expert: ep_fsdp2 ep4").resolve(16).partition("ep").tolist()[0]
        [0, 1, 2, 3]
        """
        return cls.from_dict(spec_string.read_spec(text))

    def __repr__(self) -> str:
        parts = [repr(self.axes)]
        parts += [f"combined={self.combined!r}"] if self.combinations else []
        parts += [f"views={self.views!r}"] if self.named_views else []
        parts += [f"roles={self.roles!r}"] if self.parts else []
        parts += [f"rank_offset={self.rank_offset}"] if self.rank_offset else []
        return f"TopologySpec({', '.join(parts)})"

    def _repr_html_(self) -> str:
        html: str = provided("notebooks").spec_html(self)
        return html


def read_views(where: str, data: Any) -> tuple[tuple[str, View], ...]:
    """Return views by name from plain data. *Pure.*"""
    pairs = read_pairs(where, "views", data)
    return tuple((name, read_fields(f"Topology: view {name!r}", View, view)) for name, view in pairs)


def parts_of(roles: Any, order: Sequence[str] = ROLES) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return roles and their axes in one order, since theirs is no meaning. *Pure.*"""
    pairs = [] if roles is None else pairs_in("Topology", "roles", roles)
    known = {name: place for place, name in enumerate(order)}
    parts = ((name, names_of(members)) for name, members in pairs)
    return tuple(sorted(parts, key=lambda part: (known.get(part[0], len(known)), str(part[0]))))


def plain(number: Any) -> Any:
    """Return any integer type as an int, everything else as it is. *Pure.*"""
    found = whole(number)
    return number if found is None else found


def sizes_of(what: str, axes: Any) -> tuple[tuple[str, Any], ...]:
    """Return names with sizes, integers of any type as ints; others are refused when resolved. *Pure.*"""
    return tuple((name, plain(size)) for name, size in pairs_in("Topology", what, axes))


def _read_pairs(what: str, data: Any) -> list[tuple[str, Any]]:
    return [] if data is None else list(pairs_in("Topology", what, data))


def names_of(names: Any) -> tuple[str, ...]:
    """Return one name or several as a tuple. *Pure.*"""
    if isinstance(names, str):
        return (names,)
    items = items_in(names)
    if items is None:
        raise SpecError(f"Topology: axis names must be a name or a list of names, found {names!r}.", found=names)
    return items
