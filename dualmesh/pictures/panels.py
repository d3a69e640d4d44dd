"""The arrangement of a picture: states one below the other, dense and expert views side by side, a panel per axis.

Cells and their groups are in `grid`, colours in `shapes`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import ceil

from dualmesh.errors import counted
from dualmesh.pictures.axis_facts import AxisFacts, axis_facts, views
from dualmesh.pictures.grid import Grid
from dualmesh.pictures.shapes import GROUP_COLOURS, Box, Canvas, Words, text_width, wrap_text
from dualmesh.topology.topology import Topology

_MARGIN = 24.0
_GAP = 18.0
_TITLE = 44.0
_HEADING = 26.0
_LEAST_WIDTH = 236.0
_WIDE = 860.0


def picture(topologies: Mapping[str, Topology], gpus_per_node: int, rank: int | None = None) -> Canvas:
    """Draw named topologies. *Pure.*

    Args:
        topologies: What to draw, by name, in order.
        gpus_per_node: Consecutive ranks on each node.
        rank: Whose groups get a ring; None: the first rank's.
    """
    bands = [_band(name, topology, gpus_per_node, rank) for name, topology in topologies.items()]
    canvas = Canvas("Parallel topology: " + ", ".join(topologies))
    canvas.width = max(band.width for band in bands) + 2 * _MARGIN
    canvas.height = _MARGIN + sum(band.height + _GAP for band in bands) + 12
    canvas.draw(Box(0, 0, canvas.width, canvas.height, fill="paper"))
    y = _MARGIN
    for place, band in enumerate(bands):
        if place:
            canvas.draw(Box(_MARGIN, y - _GAP / 2, canvas.width - 2 * _MARGIN, 1, fill="rule"))
        canvas.place(band, _MARGIN, y)
        y += band.height + _GAP
    return canvas


def _band(name: str, topology: Topology, gpus_per_node: int, rank: int | None) -> Canvas:
    """Draw one state: its name, then a column of panels for each view of its ranks."""
    grid = Grid(topology, gpus_per_node)
    ring = topology.members[0] if rank is None or not topology.has_rank(rank) else rank
    draw = partial(_panel, topology, grid, ring)
    sections = []
    for view, axes in views(topology):
        shown = [fact for fact in (axis_facts(topology, axis, gpus_per_node) for axis in axes) if fact.size > 1]
        if shown:
            sections.append(_section(view, [draw(fact) for fact in shown]))
    band = Canvas(name)
    band.width = max(sum(section.width for section in sections) + 2 * _GAP * (len(sections) - 1), _WIDE)
    lines = [part for line in _lines(topology, grid, gpus_per_node, ring) for part in wrap_text(line, 12, band.width)]
    band.draw(Words(0, 18, name, 20, is_bold=True))
    size = counted(len(topology.members), "rank")
    band.draw(Words(text_width(name, 20) + 16, 18, f"{size}, {_nodes(topology, gpus_per_node)}", 13, "muted"))
    for place, line in enumerate(lines):
        band.draw(Words(0, 38 + 17 * place, line, 12, "muted"))
    top = 38 + 17 * len(lines) + 4
    x = 0.0
    for place, section in enumerate(sections):
        if place:
            band.draw(Box(x - _GAP, top, 1, max(part.height for part in sections), fill="rule"))
        band.place(section, x, top)
        x += section.width + 2 * _GAP
    band.height = top + max((section.height for section in sections), default=0)
    return band


def _section(view: str, panels: Sequence[Canvas]) -> Canvas:
    """Draw a heading and panels of equal size below it, in one, two or three columns."""
    width, height = max(panel.width for panel in panels), max(panel.height for panel in panels)
    columns = 1 if len(panels) == 1 else 2 if len(panels) < 5 or 3 * width > 2 * _WIDE else 3
    section = Canvas(view)
    heading = view if view in ("dense", "rank groups") else f"view {view}"
    section.draw(Words(0, 15, heading, 14, is_bold=True))
    for place, panel in enumerate(panels):
        row, column = divmod(place, columns)
        section.place(panel, column * (width + _GAP), _HEADING + row * (height + _GAP))
    section.width = columns * (width + _GAP) - _GAP
    section.height = _HEADING + ceil(len(panels) / columns) * (height + _GAP) - _GAP
    return section


def _panel(topology: Topology, grid: Grid, ring: int, fact: AxisFacts) -> Canvas:
    """Draw one axis: the grid of ranks, cells coloured by group, a ring around the group of one rank."""
    panel = Canvas(fact.name)
    panel.width, panel.height = max(grid.width + 24, _LEAST_WIDTH), grid.height + _TITLE + 22
    panel.draw(Box(0, 0, panel.width, panel.height, fill="panel", radius=8))
    left = text_width(fact.name, 14) * 1.08
    panel.draw(Words(12, 20, fact.name, 14, is_bold=True))
    panel.draw(Words(12 + left + 8, 20, f"size {fact.size_text}, {counted(fact.group_count, 'group')}", 12, "muted"))
    found = grid.colouring(fact.name)
    where = "crosses nodes" if fact.crosses_nodes else "inside a node"
    inside = f", {found.inside} in each cell" if found.inside > 1 else ""
    panel.draw(Words(12, 37, where + inside, 11.5, "alarm" if fact.crosses_nodes else "muted"))
    panel.place(_cells(topology, grid, ring, fact.name, found.groups), (panel.width - grid.width) / 2, _TITLE + 8)
    return panel


def _cells(topology: Topology, grid: Grid, ring: int, axis: str, groups: Sequence[int | None]) -> Canvas:
    cells = Canvas(axis)
    side = grid.cell_size
    if grid.has_nodes:
        for node in range(grid.node_count):
            x, y = grid.node_corner(node)
            cells.draw(Box(x - 1, y - 1, grid.node_width + 2, grid.node_height + 2, stroke="node", radius=4))
    in_ring = (ring - grid.first_rank) // grid.block
    ringed = groups[in_ring] if topology.is_member(axis, ring) and len(set(groups)) > 1 else None
    for cell, group in enumerate(groups):
        x, y = grid.cell_corner(cell)
        fill = "empty" if group is None else f"group{group % GROUP_COLOURS}"
        is_ringed = group is not None and group == ringed
        edge = 1.8 if is_ringed else 0.0
        inset = 1 + edge / 2
        box = Box(x + inset, y + inset, side - 2 * inset, side - 2 * inset, fill, "ink" if edge else None, edge)
        label = str(cell if grid.block > 1 else cell + grid.first_rank)
        size = min(side * 0.44, (side - 4 - 2 * edge) / (len(label) * 0.6))
        words = Words(x + side / 2, y + side / 2 + size * 0.36, label, size, anchor="middle", is_bold=is_ringed)
        cells.draw(box, words)
    return cells


def _lines(topology: Topology, grid: Grid, gpus_per_node: int, ring: int) -> list[str]:
    """Say what the state is, and how to read its panels."""
    sizes = [f"{name} {size}" for name, size in topology.sizes.items() if size > 1 and name != "world"]
    combined = [f"{name} = {' x '.join(axes)}" for name, axes in topology.spec.combinations if axes]
    lines = [" x ".join(sizes)] if sizes else []
    lines += [";  ".join(combined)] if combined else []
    cell = "A cell is a rank"
    if grid.block > 1:
        nodes = f", {grid.block // gpus_per_node} nodes" if grid.block % gpus_per_node == 0 else ""
        cell = f"Cell n is the {grid.block:,} ranks from {grid.block:,} n on{nodes}"
        cell += f" (and {grid.first_rank})" if grid.first_rank else ""
    outline = f"an outline is a node of {gpus_per_node}; " if grid.has_nodes else ""
    lines.append(
        f"{cell}; {outline}cells of one colour are one group (colours repeat after {GROUP_COLOURS}); "
        f"rings mark the groups of rank {ring}."
    )
    return lines


def _nodes(topology: Topology, gpus_per_node: int) -> str:
    return f"{counted(len({rank // gpus_per_node for rank in _edges(topology, gpus_per_node)}), 'node')}"


def _edges(topology: Topology, gpus_per_node: int) -> Sequence[int]:
    """Return one rank of every node at least."""
    members = topology.members
    if not isinstance(members, range):
        return members
    return [*members[::gpus_per_node], members[-1]]
