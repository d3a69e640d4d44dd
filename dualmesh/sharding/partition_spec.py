"""`P`: which axes split which dims of an array, and which slice of it a rank therefore holds.

What a framework makes of a `P` (NamedSharding, DTensor placements) is in the backends.
"""

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

from dualmesh._support.checks import check_strings, items_in
from dualmesh.errors import ShapeError, ShardingError, UnknownAxisError, counted
from dualmesh.topology.layout import Digit, Layout
from dualmesh.topology.topology import Axis, Topology

Entry = str | tuple[str, ...] | None


class P:
    """A partition spec: one entry per dim, an axis name, a tuple of names (first = slowest), or None.

    Trailing dims may be left out. `partial` names axes over which the value is still to be summed.

    >>> P("dp", ("tp", "cp"), None)
    P('dp', ('tp', 'cp'), None)
    >>> P("dp", partial="tp").axes
    ('dp', 'tp')
    """

    __slots__ = ("entries", "partial")

    entries: tuple[Entry, ...]
    partial: tuple[str, ...]

    def __init__(self, *entries: Entry | Iterable[str], partial: str | Iterable[str] = ()) -> None:
        set_field = object.__setattr__
        set_field(self, "entries", tuple(_entry(entry) for entry in entries))
        set_field(self, "partial", check_strings("P", "partial", partial))
        used = self.axes
        repeated = [name for name in used if used.count(name) > 1]
        if repeated:
            raise ShardingError(f"{self!r}: axis {repeated[0]!r} is named twice. Each axis can split once.", spec=self)

    @classmethod
    def of(cls, spec: Any) -> "P":
        """Return a `P` for a `P` or a JAX PartitionSpec. *Pure.*

        Raises:
            ShardingError: The value is neither, or says what a `P` cannot.
        """
        if isinstance(spec, cls):
            return spec
        if is_spec(spec):
            if getattr(spec, "reduced", None):
                raise ShardingError(
                    f"{spec!r}: dm.P has no word for `reduced`, which says how a gradient lies. Leave it out.",
                    spec=spec,
                )
            return cls(*getattr(spec, "partitions", spec), partial=sorted(getattr(spec, "unreduced", None) or ()))
        raise ShardingError(f"A partition spec was expected, found {spec!r}. Write dm.P('axis', None, ...).", spec=spec)

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis named, dims first, then partial ones."""
        names = [name for entry in self.entries for name in split_axes(entry)]
        return (*names, *self.partial)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"P is frozen: {name} cannot be set.")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"P is frozen: {name} cannot be deleted.")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, P):
            return NotImplemented
        return self._trimmed() == other._trimmed() and set(self.partial) == set(other.partial)

    def __hash__(self) -> int:
        return hash((self._trimmed(), frozenset(self.partial)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self.entries, self.partial)

    def __repr__(self) -> str:
        parts = [repr(entry) for entry in self.entries]
        parts += [f"partial={self.partial!r}"] if self.partial else []
        return f"P({', '.join(parts)})"

    def _trimmed(self) -> tuple[Entry, ...]:
        entries = self.entries
        while entries and entries[-1] is None:
            entries = entries[:-1]
        return entries


def is_spec(value: Any) -> bool:
    """Tell whether a value is a `P` or a JAX PartitionSpec, whose class some JAX releases call `jax.P`. *Pure.*"""
    if isinstance(value, P):
        return True
    kind = type(value)
    return kind.__module__.split(".")[0] in ("jax", "jaxlib") and kind.__name__ in ("P", "PartitionSpec")


def _rebuilt(entries: tuple[Entry, ...], partial: tuple[str, ...]) -> P:
    return P(*entries, partial=partial)


def _entry(entry: Any) -> Entry:
    if entry is None or isinstance(entry, str):
        return entry
    names = items_in(entry)
    if names is not None and all(isinstance(name, str) for name in names):
        return names[0] if len(names) == 1 else names or None
    raise ShardingError(
        f"P: {entry!r} is no entry. Entries are an axis name, a tuple of names, or None. What a framework has beside "
        f"that (a dim that JAX may choose) is said to it in its own names: state.axes(axis).",
        entry=entry,
    )


def split_axes(entry: Entry) -> tuple[str, ...]:
    """Return the axes that an entry names, slowest first. *Pure.*"""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else entry


def dim_layouts(topology: Topology, spec: P, shape: Sequence[int], *, what: str = "array") -> list[Layout | None]:
    """Return the layout that splits each dim, or None, after checking the spec against a shape. *Pure.*

    Raises:
        ShardingError: More entries than dims.
        UnknownAxisError: An axis that the topology does not have.
        ShapeError: A dim that its axes do not divide.
    """
    check_entries(spec, shape, what)
    check_axes(topology, spec, what=what)
    layouts: list[Layout | None] = [None] * len(shape)
    for dim, entry in enumerate(spec.entries):
        layout = topology.layout(split_axes(entry))
        if layout.size == 1:
            continue
        if shape[dim] % layout.size:
            raise ShapeError(
                f"{what} of shape {tuple(shape)}: dim {dim} has size {shape[dim]}, which {entry!r} of size "
                f"{layout.size} does not divide. Pad dim {dim} to a multiple of {layout.size} (distribute: pad=True), "
                f"or split it over fewer ranks.",
                spec=spec,
                shape=tuple(shape),
                dim=dim,
                axis=entry,
                size=layout.size,
            )
        layouts[dim] = layout
    return layouts


def check_entries(spec: P, shape: Sequence[int], what: str) -> None:
    """Refuse a spec with more entries than an array has dims. *Pure.*"""
    if len(spec.entries) > len(shape):
        raise ShardingError(
            f"{what} of shape {tuple(shape)} has {counted(len(shape), 'dim')}, but {spec!r} has "
            f"{counted(len(spec.entries), 'entry', 'entries')}. Give at most one entry per dim.",
            spec=spec,
            shape=tuple(shape),
        )


def check_axes(topology: Topology, spec: P, *, what: str = "array") -> None:
    """Refuse a spec whose axes are unknown or share ranks. *Pure.*"""
    try:
        topology.layout(spec.axes)
    except UnknownAxisError as error:
        raise UnknownAxisError(f"{what}: {spec!r}. {error}", axis=error.axis, spec=spec) from None


def slices_of(topology: Topology, spec: P, shape: Sequence[int], rank: int) -> tuple[slice, ...]:
    """Return the slice of a global array of `shape` that a rank holds, one slice per dim. *Pure.*

    Raises: as `dim_layouts`.

    >>> import dualmesh as dm
    >>> topology = dm.TopologySpec({"dp": 2, "tp": 2}).resolve(4)
    >>> slices_of(topology, P(("tp", "dp")), (8,), 1)
    (slice(4, 6, None),)
    """
    position = topology.position(rank)
    slices = []
    for size, layout in zip(shape, dim_layouts(topology, spec, shape), strict=True):
        block = size // layout.size if layout else size
        start = layout.index(position) * block if layout else 0
        slices.append(slice(start, start + block))
    return tuple(slices)


def local_shape(topology: Topology, spec: P, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of one rank's block of a global array. *Pure.*"""
    layouts = dim_layouts(topology, spec, shape)
    return tuple(size // layout.size if layout else size for size, layout in zip(shape, layouts, strict=True))


def global_shape(topology: Topology, spec: P, block_shape: Sequence[int], *, what: str = "array") -> tuple[int, ...]:
    """Return the shape of the global array whose blocks have `block_shape`. *Pure.*

    Raises:
        ShardingError: More entries than dims.
    """
    check_entries(spec, block_shape, what)
    sizes = [topology.size(split_axes(entry)) for entry in spec.entries]
    sizes += [1] * (len(block_shape) - len(sizes))
    return tuple(block * size for block, size in zip(block_shape, sizes, strict=True))


def canonical(topology: Topology, spec: P) -> P:
    """Return the spec in the names that every equal split has: the fewest, then those declared first. *Pure.*

    Axes of size 1 are left out.

    >>> import dualmesh as dm
    >>> topology = dm.parallel_spec(dp_shard_size=2, ulysses_size=2).resolve(4)
    >>> canonical(topology, P(("dp_shard", "ulysses", "cp"), "tp"))
    P('dp_shard_sp', None)
    """
    check_axes(topology, spec)
    entries = [named_axes(topology, topology.layout(split_axes(entry))) or () for entry in spec.entries]
    summed = Layout.of(reversed(topology.layout(spec.partial).ascending))
    return P(*entries, partial=named_set(topology, summed) or ())


def named_axes(topology: Topology, layout: Layout) -> tuple[str, ...] | None:
    """Return the fewest axes that spell a layout, slowest first, or None; ties go to those declared first. *Pure.*"""
    axes = _axes_that_split(topology)
    waiting: list[tuple[tuple[str, ...], tuple[Digit, ...]]] = [((), layout.digits)]
    seen = {layout.digits}
    for names, digits in waiting:
        if not digits:
            return names
        for name, axis in axes.items():
            rest = _after(axis.digits, digits)
            if rest is not None and rest not in seen:
                seen.add(rest)
                waiting.append(((*names, name), rest))
    return None


def named_set(topology: Topology, layout: Layout) -> tuple[str, ...] | None:
    """Return the fewest axes that together have the digits of a layout, in any order, or None. *Pure.*"""
    axes = {name: axis for name, axis in _axes_that_split(topology).items() if layout.size % axis.size == 0}
    for count in range(len(axes) + 1):
        for names in combinations(axes, count):
            digits = [digit for name in names for digit in axes[name].digits]
            if Layout.of(sorted(digits, key=lambda digit: -digit.stride)) == layout:
                return names
    return None


def _axes_that_split(topology: Topology) -> dict[str, Layout]:
    return {name: axis for name, axis in topology.layouts.items() if axis.size > 1}


def _after(first: Sequence[Digit], digits: Sequence[Digit]) -> tuple[Digit, ...] | None:
    """Return what follows `first` in the number that `digits` spell, or None if they do not start with it."""
    rest = list(digits)
    for size, stride in first:
        if not rest:
            return None
        whole, low = rest.pop(0)
        if whole % size or stride * size != low * whole:
            return None
        if whole > size:
            rest.insert(0, Digit(whole // size, low))
    return tuple(rest)


__all__ = [
    "Axis",
    "Entry",
    "P",
    "canonical",
    "dim_layouts",
    "global_shape",
    "is_spec",
    "local_shape",
    "named_axes",
    "named_set",
    "slices_of",
    "split_axes",
]
