"""Where each rank is drawn and which group it is in: nodes as outlines, cells of one rank or of a block of ranks.

Colours, words and the arrangement of panels are in `panels`.
"""

from collections.abc import Sequence
from functools import cached_property
from math import ceil
from typing import NamedTuple

from dualmesh.topology.layout import Digit, Layout, divisors
from dualmesh.topology.topology import Topology

MAX_CELLS = 512
"""Ranks that get a cell of their own; of a larger world a cell is a block of consecutive ranks."""

_WIDE_NODE = 12
_ASPECT = 1.35
_CELL_SIZES = ((16, 34.0), (64, 27.0), (128, 23.0))
_SMALL_CELL = 20.0


class Colouring(NamedTuple):
    """The groups of one axis over the cells of a grid."""

    groups: Sequence[int | None]
    """The number of each cell's group, in order of the groups' first ranks; None: in no group."""
    inside: int
    """How many positions of the axis lie inside each cell."""


class Grid:
    """The cells of a topology.

    Attributes:
        block: Ranks per cell.
        count: Cells.
    """

    def __init__(self, topology: Topology, gpus_per_node: int) -> None:
        self._topology = topology
        self.first_rank = topology.members[0] if isinstance(topology.members, range) else 0
        self._world = topology.world_size
        self.block = self._block()
        self.count = ceil(self._world / self.block)
        self.has_nodes = gpus_per_node % self.block == 0 and gpus_per_node > self.block
        per_node = gpus_per_node // self.block if self.has_nodes else _WIDE_NODE - 4
        self._shift = (self.first_rank % gpus_per_node) // self.block if self.has_nodes else 0
        self.per_node = min(per_node, self.count + self._shift)
        self.node_columns = max(size for size in divisors(self.per_node) if size <= _WIDE_NODE)
        if self.node_columns < min(self.per_node, _WIDE_NODE // 3):
            self.node_columns = min(self.per_node, _WIDE_NODE - 4)

    def _block(self) -> int:
        if self._world <= MAX_CELLS or not isinstance(self._topology.members, range):
            return 1  # lists of ranks have no blocks
        layouts = list(self._topology.layouts.values())
        sizes = [size for size in divisors(self._world) if self._world / size <= MAX_CELLS]
        aligned = (size for size in sizes if all(is_aligned(layout, size) for layout in layouts))
        return next(aligned, self._world)

    # -- which group -----------------------------------------------------------------------------------------------

    def colouring(self, axis: str) -> Colouring:
        """Return the group of every cell along an axis. *Pure*, O(cells)."""
        lists = self._topology.rank_groups(axis)
        if lists is not None:
            numbers = {rank: number for number, group in enumerate(lists) for rank in group}
            return Colouring([numbers.get(rank) for rank in range(0, self.count * self.block, self.block)], 1)
        layout = self._topology.layouts[axis]
        outside = outside_of(layout, self.block)
        rest = outside.complement(self.count)
        return Colouring([rest.index(cell) for cell in range(self.count)], layout.size // outside.size)

    # -- where -----------------------------------------------------------------------------------------------------

    @cached_property
    def cell_size(self) -> float:
        """The side of a cell."""
        return next((size for limit, size in _CELL_SIZES if self.count <= limit), _SMALL_CELL)

    @cached_property
    def node_count(self) -> int:
        """How many outlines the grid has."""
        return ceil((self._shift + self.count) / self.per_node)

    @cached_property
    def node_width(self) -> float:
        """The width of an outline."""
        return self.node_columns * self.cell_size + 4

    @cached_property
    def node_height(self) -> float:
        """The height of an outline."""
        return ceil(self.per_node / self.node_columns) * self.cell_size + 4

    @cached_property
    def columns(self) -> int:
        """How many nodes stand side by side."""
        columns = 1
        while columns < self.node_count:
            if columns * self.node_width >= _ASPECT * ceil(self.node_count / columns) * self.node_height:
                break
            columns *= 2
        return min(columns, self.node_count)

    @property
    def width(self) -> float:
        """The width of the whole grid."""
        return self.columns * (self.node_width + 5) - 5

    @property
    def height(self) -> float:
        """The height of the whole grid."""
        return ceil(self.node_count / self.columns) * (self.node_height + 5) - 5

    def node_corner(self, node: int) -> tuple[float, float]:
        """Return the upper left corner of an outline. *Pure.*"""
        row, column = divmod(node, self.columns)
        return column * (self.node_width + 5), row * (self.node_height + 5)

    def cell_corner(self, cell: int) -> tuple[float, float]:
        """Return the upper left corner of a cell. *Pure.*"""
        node, place = divmod(cell + self._shift, self.per_node)
        row, column = divmod(place, self.node_columns)
        x, y = self.node_corner(node)
        return x + 2 + column * self.cell_size, y + 2 + row * self.cell_size


def is_aligned(layout: Layout, block: int) -> bool:
    """Tell whether blocks of consecutive ranks cut an axis only between its positions. *Pure.*

    >>> is_aligned(Layout.of([Digit(4, 2)]), 4), is_aligned(Layout.of([Digit(4, 2)]), 3)
    (True, False)
    """
    return all(
        stride % block == 0 or block % (size * stride) == 0 or (block % stride == 0 and size * stride % block == 0)
        for size, stride in layout.digits
    )


def outside_of(layout: Layout, block: int) -> Layout:
    """Return how an axis runs over blocks of consecutive ranks, to which it is aligned. *Pure.*

    >>> outside_of(Layout.of([Digit(8, 2)]), 4)
    Layout(digits=(Digit(size=4, stride=1),))
    """
    digits = []
    for size, stride in layout.digits:
        if stride >= block:
            digits.append(Digit(size, stride // block))
        elif size * stride > block:
            digits.append(Digit(size * stride // block, 1))
    return Layout.of(digits)
