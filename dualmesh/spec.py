"""What a user declares: axes with sizes, combined axes, views, roles, as plain frozen data.

Whether it fits a world is decided in `resolution`; the usual specs are written in `usual`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dualmesh import notation
from dualmesh.arguments import items_in
from dualmesh.errors import SpecError, did_you_mean, listed
from dualmesh.lazy import notebooks
from dualmesh.resolution import fit, whole
from dualmesh.topology import Topology


@dataclass(frozen=True, init=False)
class View:
    """A second factorisation of the ranks that some axes span.

    Args:
        over: The axes that are read as one number, first = slowest.
        axes: Names and sizes of the axes that this number is factored into, outermost first; one may be -1.

    >>> View(over=("dp_shard", "ulysses"), axes={"ep_fsdp": -1, "ep": 4})
    View(over=('dp_shard', 'ulysses'), axes={'ep_fsdp': -1, 'ep': 4})
    """

    over: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...]

    def __init__(self, over: Iterable[str] | str, axes: Mapping[str, int]) -> None:
        object.__setattr__(self, "over", names_of(over))
        object.__setattr__(self, "sizes", sizes_of("View axes", axes))

    @classmethod
    def of(cls, name: str, view: Any) -> "View":
        """Return a view, or plain data with the keys `over` and `axes` as one. *Pure.*"""
        if isinstance(view, cls):
            return view
        check_keys(f"Topology: view {name!r}", view, ("over", "axes"), required=True)
        return cls(view["over"], view["axes"])

    @property
    def axes(self) -> dict[str, int]:
        """Names and sizes of the view's axes, outermost first."""
        return dict(self.sizes)

    def __repr__(self) -> str:
        return f"View(over={self.over!r}, axes={self.axes!r})"


@dataclass(frozen=True, init=False)
class TopologySpec:
    """Named axes of a grid of ranks, before the size of the world is known. Frozen and hashable.

    Args:
        axes: Base axes and their sizes, outermost first (the last varies fastest); one may be -1.
        combined: Names for several axes read as one, first = slowest; of axes declared before, or of views.
        views: Second factorisations of the ranks of some axes.
        roles: Which axes play which part: "data" (data loading), "params" (parameter sharding), "loss" (loss and
            gradient reduction), "sequence" (sequence parallelism), "replicate" (parameter replication).
        rank_offset: The first rank of the grid.

    >>> spec = TopologySpec({"dp": -1, "tp": 2})
    >>> spec.resolve(8).size("dp")
    4
    """

    base: tuple[tuple[str, int], ...]
    combinations: tuple[tuple[str, tuple[str, ...]], ...]
    named_views: tuple[tuple[str, View], ...]
    parts: tuple[tuple[str, tuple[str, ...]], ...]
    rank_offset: int

    def __init__(
        self,
        axes: Mapping[str, int],
        combined: Mapping[str, Iterable[str] | str] | None = None,
        views: Mapping[str, "View | Mapping[str, Any]"] | None = None,
        roles: Mapping[str, Iterable[str] | str] | None = None,
        *,
        rank_offset: int = 0,
    ) -> None:
        set_field = object.__setattr__
        set_field(self, "base", sizes_of("axes", axes))
        set_field(self, "combinations", tuple((n, names_of(m)) for n, m in _declared("combined", combined)))
        set_field(self, "named_views", tuple((n, View.of(n, view)) for n, view in _declared("views", views)))
        set_field(self, "parts", tuple((n, names_of(m)) for n, m in _declared("roles", roles)))
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
        views = {name: View(view.over, dict(fitted.views[name])) for name, view in self.named_views}
        spec = TopologySpec(dict(fitted.base), self.combined, views, self.roles, rank_offset=fitted.rank_offset)
        return Topology(spec, world_size, fitted.layouts)

    def to_dict(self) -> dict[str, Any]:
        """Return the spec as plain data (dicts, lists, strings, ints) for YAML, TOML or JSON. *Pure.*"""
        data: dict[str, Any] = {"axes": self.axes}
        if self.combinations:
            data["combined"] = {name: list(members) for name, members in self.combinations}
        if self.named_views:
            data["views"] = {n: {"over": list(view.over), "axes": view.axes} for n, view in self.named_views}
        if self.parts:
            data["roles"] = {name: list(members) for name, members in self.parts}
        if self.rank_offset:
            data["rank_offset"] = self.rank_offset
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "TopologySpec":
        """Build a spec from what `to_dict` gives. *Pure.*

        Raises:
            SpecError: The data is no mapping, has no axes, or has a key that a spec does not know.
        """
        known = ("axes", "combined", "views", "roles", "rank_offset")
        check_keys("TopologySpec.from_dict", data, known)
        if "axes" not in data:
            raise SpecError(f"TopologySpec.from_dict: 'axes' is missing. Keys found: {listed(data)}.", keys=tuple(data))
        return cls(
            data["axes"],
            data.get("combined"),
            data.get("views"),
            data.get("roles"),
            rank_offset=data.get("rank_offset", 0),
        )

    def to_text(self) -> str:
        """Return the spec in one line that `from_text` reads back; the form is described in `notation`. *Pure.*

        >>> TopologySpec({"dp": -1, "tp": 2}, roles={"data": "dp"}).to_text()
        'dp* tp2 | @data = dp'
        """
        return notation.written(self.to_dict())

    @classmethod
    def from_text(cls, text: str) -> "TopologySpec":
        """Build a spec from its compact text. *Pure.*

        Raises:
            SpecError: The text does not follow the notation; the message shows where.

        >>> TopologySpec.from_text("pp2 dp4 tp2 | expert: ep_fsdp2 ep4").resolve(16).partition("ep").tolist()[0]
        [0, 1, 2, 3]
        """
        return cls.from_dict(notation.read(text))

    def __repr__(self) -> str:
        parts = [repr(self.axes)]
        parts += [f"combined={self.combined!r}"] if self.combinations else []
        parts += [f"views={self.views!r}"] if self.named_views else []
        parts += [f"roles={self.roles!r}"] if self.parts else []
        parts += [f"rank_offset={self.rank_offset}"] if self.rank_offset else []
        return f"TopologySpec({', '.join(parts)})"

    def _repr_html_(self) -> str:
        return notebooks.spec_html(self)


def pairs_of(what: str, mapping: Any) -> tuple[tuple[str, Any], ...]:
    """Return the items of a mapping with string keys, or refuse it. *Pure.*"""
    if not isinstance(mapping, Mapping):
        found = type(mapping).__name__
        raise SpecError(f"Topology: {what} must map names to values, found {found} {mapping!r}.", found=mapping)
    return tuple(mapping.items())


def plain(number: Any) -> Any:
    """Return any integer type as an int, everything else as it is. *Pure.*"""
    found = whole(number)
    return number if found is None else found


def sizes_of(what: str, axes: Any) -> tuple[tuple[str, Any], ...]:
    """Return names with sizes, integers of any type as ints; others are refused when resolved. *Pure.*"""
    return tuple((name, plain(size)) for name, size in pairs_of(what, axes))


def _declared(what: str, data: Any) -> list[tuple[str, Any]]:
    return [] if data is None else list(pairs_of(what, data))


def names_of(names: Any) -> tuple[str, ...]:
    """Return one name or several as a tuple. *Pure.*"""
    if isinstance(names, str):
        return (names,)
    items = items_in(names)
    if items is None:
        raise SpecError(f"Topology: axis names must be a name or a list of names, found {names!r}.", found=names)
    return items


def check_keys(where: str, data: Any, known: tuple[str, ...], *, required: bool = False) -> None:
    """Refuse data that is no mapping, has unknown keys or (when required) lacks some. *Pure.*"""
    keys = [name for name, _ in pairs_of(where, data)]
    for key in keys:
        if key not in known:
            raise SpecError(
                f"{where}: unknown key {key!r}. Keys: {listed(known)}.{did_you_mean(key, known)}", key=key, known=known
            )
    if required and len(keys) < len(known):
        missing = listed(key for key in known if key not in keys)
        raise SpecError(f"{where}: {missing} is missing. Keys: {listed(known)}.", missing=missing)
