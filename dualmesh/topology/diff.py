"""What differs between two topologies, for people.

Whether they are equal is asked with `==`; how one looks is in `pictures.text`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dualmesh.topology.layout import Layout

if TYPE_CHECKING:
    from dualmesh.topology.topology import Topology

SAME = "no difference"


def differences(old: "Topology", new: "Topology") -> str:
    """Write one line per difference, old -> new, or that there is none. *Pure.*

    Settings first (world, offset, order of the base axes), then axes that are gone or new, then axes of another size
    or of other ranks, then what axes are made of, then roles.
    """
    lines = [*_settings(old, new), *_axes(old, new), *_members(old, new)]
    return "\n".join(lines) if lines else SAME


def _settings(old: "Topology", new: "Topology") -> Iterator[str]:
    for name in ("world_size", "rank_offset"):
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            yield f"{name}: {before} -> {after}"
    shared = [[name for name in one.base_axes if name in other.base_axes] for one, other in ((old, new), (new, old))]
    if shared[0] != shared[1]:
        yield f"order: {' '.join(shared[0])} -> {' '.join(shared[1])}"


def _axes(old: "Topology", new: "Topology") -> Iterator[str]:
    for name in old.axis_names:
        if name not in new.layouts:
            yield f"{name}: only in the first, {_kind(old, name)} of size {old.size(name)}"
    for name in new.axis_names:
        if name not in old.layouts:
            yield f"{name}: only in the second, {_kind(new, name)} of size {new.size(name)}"
    for name in old.axis_names:
        if name == "world" or name not in new.layouts:
            continue
        before, after = old.layouts[name], new.layouts[name]
        if _kind(old, name) != _kind(new, name):
            yield f"{name}: {_kind(old, name)} -> {_kind(new, name)}"
        if before.size != after.size:
            yield f"{name}: size {before.size} -> {after.size}"
        elif before != after:
            yield f"{name}: first group {_group(old, before)} -> {_group(new, after)}"


def _members(old: "Topology", new: "Topology") -> Iterator[str]:
    pairs = [("", old.spec.combined, new.spec.combined), ("role ", old.spec.roles, new.spec.roles)]
    pairs.append(
        (
            "view ",
            {name: view.over for name, view in old.spec.views.items()},
            {name: view.over for name, view in new.spec.views.items()},
        )
    )
    for what, before, after in pairs:
        for name in dict.fromkeys([*before, *after]):
            first, second = before.get(name), after.get(name)
            if first != second and (what or None not in (first, second)):
                yield f"{what}{name}: {_named(first)} -> {_named(second)}"


def _named(members: tuple[str, ...] | None) -> str:
    return "none" if members is None else f"({', '.join(members)})"


def _kind(topology: "Topology", name: str) -> str:
    if name in topology.base_axes:
        return "base axis"
    for view, axes in topology.spec.named_views:
        if name in axes.axes:
            return f"axis of view {view!r}"
    return "combined axis"


def _group(topology: "Topology", layout: Layout) -> str:
    ranks = [layout.member(0, index) + topology.rank_offset for index in range(min(layout.size, 4))]
    return "[" + ", ".join(map(str, ranks)) + (", ..]" if layout.size > 4 else "]")
