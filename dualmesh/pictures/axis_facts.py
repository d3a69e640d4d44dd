"""What people ask about every axis of a topology: kind, size, stride, groups, and whether it leaves a node.

Tables, pictures and the command line show these; one rank's answers for code are in `topology`.
"""

from collections.abc import Iterator
from typing import NamedTuple

from dualmesh.topology.layout import Digit, Layout
from dualmesh.topology.topology import Axis, Topology

GPUS_PER_NODE = 8
_FIRST = 8


class AxisFacts(NamedTuple):
    """One axis of a topology. Sizes differ only where axes are rank groups, which also have no digits."""

    name: str
    kind: str
    """"base", "combined", "rank groups", or "view NAME"."""
    sizes: tuple[int, ...]
    digits: tuple[Digit, ...]
    group_count: int
    first_group: tuple[int, ...]
    """The first ranks of the first group, at most 8."""
    crosses_nodes: bool

    @property
    def size(self) -> int:
        """The size of the largest group."""
        return max(self.sizes, default=0)

    @property
    def stride_text(self) -> str:
        """The stride; for an axis of several digits each size and stride, slowest first."""
        if len(self.digits) == 1:
            return str(self.digits[0].stride)
        return ", ".join(f"{size} at {stride}" for size, stride in self.digits) or "-"

    @property
    def size_text(self) -> str:
        """The size, or all that occur."""
        return ", ".join(map(str, self.sizes))

    @property
    def first_text(self) -> str:
        """The first ranks of the first group."""
        return " ".join(map(str, self.first_group)) + (" .." if self.size > len(self.first_group) else "")


def facts(topology: Topology, gpus_per_node: int = GPUS_PER_NODE) -> list[AxisFacts]:
    """Return what is known about every axis, in the topology's order. *Pure*, closed form for a grid.

    >>> import dualmesh as dm
    >>> [fact[:3] for fact in facts(dm.TopologySpec({"dp": -1, "tp": 2}).resolve(1 << 20))]
    [('dp', 'base', (524288,)), ('tp', 'base', (2,)), ('world', 'combined', (1048576,))]
    """
    return [axis_facts(topology, name, gpus_per_node) for name in topology.axis_names]


def axis_facts(topology: Topology, name: str, gpus_per_node: int = GPUS_PER_NODE) -> AxisFacts:
    """Return what is known about one axis. *Pure.*"""
    lists = topology.rank_groups(name)
    kind = _kind(topology, name)
    if lists is not None:
        crosses = any(len({rank // gpus_per_node for rank in group}) > 1 for group in lists)
        sizes = tuple(sorted(set(lists.sizes)))
        return AxisFacts(name, kind, sizes, (), len(lists), next(iter(lists), ())[:_FIRST], crosses)
    layout = topology.layouts[name]
    members = topology.members
    first = tuple(members[layout.member(0, index)] for index in range(min(layout.size, _FIRST)))
    count = len(members) // layout.size
    crosses = (
        leaves_node(layout, len(members), gpus_per_node, members[0])
        if isinstance(members, range)
        else len({rank // gpus_per_node for rank in members}) > 1
    )
    return AxisFacts(name, kind, (layout.size,), layout.digits, count, first, crosses)


def leaves_node(layout: Layout, world_size: int, per_node: int, first_rank: int = 0) -> bool:
    """Tell whether some group of an axis has ranks on two nodes, each of `per_node` consecutive ranks. *Pure*, O(1).

    A group lies in an aligned block of as many ranks as the axis' slowest digit spans; wherever a node ends inside
    such a block, some group of the block is on both sides.

    >>> leaves_node(Layout.of([Digit(4, 2)]), 64, 8), leaves_node(Layout.of([Digit(3, 2)]), 48, 8)
    (False, True)
    """
    if not layout.digits:
        return False
    slowest = layout.ascending[-1]
    span = slowest.size * slowest.stride
    end = per_node - first_rank % per_node
    return end < world_size and (end % span != 0 or (end + per_node < world_size and per_node % span != 0))


def neighbours(topology: Topology, axis: Axis, rank: int) -> tuple[int, int]:
    """Return the ranks before and after a rank along an axis, which wraps around. *Pure.*"""
    size, index = topology.size(axis, rank), topology.index(axis, rank)
    before, after = ((index + step) % size for step in (-1, 1))
    return topology.member(axis, rank, before), topology.member(axis, rank, after)


def views(topology: Topology) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield ("dense", base axes) and (view, its axes) for each view; of rank groups, one by their name. *Pure.*"""
    lists = tuple(name for name in topology.axis_names if topology.rank_groups(name) is not None)
    if lists:
        yield "rank groups", lists
        return
    yield "dense", topology.base_axes
    for name, view in topology.spec.named_views:
        yield name, tuple(axis for axis, _ in view.sizes)


def _kind(topology: Topology, name: str) -> str:
    for view, axes in views(topology):
        if name in axes:
            return {"dense": "base", "rank groups": "rank groups"}.get(view, f"view {view}")
    return "combined"
