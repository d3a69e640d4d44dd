"""A topology as text for people: the rank grid and the groups of every axis, or a summary of a large one.

What a topology answers to code is in `topology`; the compact text that can be read back is in `spec_string`.
"""

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

from dualmesh.errors import counted
from dualmesh.topology.layout import Layout

if TYPE_CHECKING:
    from dualmesh.topology.topology import Topology

DRAWN_RANKS = 64
"""Ranks up to which the grid is drawn; a larger world gets a summary."""

_AXES = 40
_MEMBERS = 4


def draw_text(topology: "Topology") -> str:
    """Draw a topology: the grid and every group up to 64 ranks, sizes and first groups above. *Pure.*

    >>> import dualmesh as dm
    >>> print(dm.TopologySpec({"dp": 2, "pp": 1, "tp": 2}).resolve(4))
    Topology(dp=2, pp=1, tp=2, world_size=4)
    <BLANKLINE>
    dp | tp 0 1
     0 |    0 1
     1 |    2 3
    <BLANKLINE>
    dp     0 2 | 1 3
    tp     0 1 | 2 3
    world  0 1 2 3
    size 1: pp
    """
    small = topology.world_size <= DRAWN_RANKS
    names = [name for name in topology.axis_names if topology.size(name) > 1]
    ones = [name for name in topology.axis_names if topology.size(name) == 1]
    width = max(map(len, names[:_AXES]), default=0)
    groups = _all_groups if small else _first_group
    lines = [f"{name:<{width}}  {groups(topology, topology.layouts[name])}" for name in names[:_AXES]]
    lines += [f"and {counted(len(names) - _AXES, 'more axis', 'more axes')}"] if names[_AXES:] else []
    lines += [f"size 1: {_cut_names(ones, _AXES, ', ')}"] if ones else []
    grid = [_grid(topology)] if small and topology.world_size > 1 else []
    return "\n\n".join([repr(topology), *grid, "\n".join(lines)])


def _grid(topology: "Topology") -> str:
    """One line per index of all axes but the last, one column per index of the last."""
    *outer, inner = (name for name in topology.base_axes if topology.size(name) > 1)
    sizes = [topology.size(name) for name in outer]
    width = len(str(topology.rank_offset + topology.world_size - 1))
    columns = topology.size(inner)
    head = [*outer, "|", inner, *(f"{place:>{width}}" for place in range(columns))]
    lines = [" ".join(head)]
    for row, places in enumerate(product(*map(range, sizes))):
        marks = [f"{place:>{len(name)}}" for name, place in zip(outer, places, strict=True)]
        ranks = range(row * columns, (row + 1) * columns)
        cells = [f"{rank + topology.rank_offset:>{width}}" for rank in ranks]
        lines.append(" ".join([*marks, "|", " " * len(inner), *cells]))
    return "\n".join(lines)


def _all_groups(topology: "Topology", layout: Layout) -> str:
    firsts = layout.complement(topology.world_size).ranks(0)
    groups = [[rank + topology.rank_offset for rank in layout.ranks(first)] for first in firsts]
    return " | ".join(" ".join(map(str, group)) for group in groups)


def _first_group(topology: "Topology", layout: Layout) -> str:
    count = topology.world_size // layout.size
    members = [layout.member(0, index) + topology.rank_offset for index in range(min(layout.size, _MEMBERS))]
    text = " ".join(map(str, members))
    if layout.size > _MEMBERS:
        text += f" .. {layout.member(0, layout.size - 1) + topology.rank_offset}"
    return f"{counted(count, 'group')} of {layout.size}: {text}{' | ..' if count > 1 else ''}"


def _cut_names(names: Sequence[str], limit: int, separator: str) -> str:
    return separator.join([*names[:limit], ".."] if names[limit:] else names)
