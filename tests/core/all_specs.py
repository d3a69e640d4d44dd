"""Every partition spec of two dims over small topologies, with order, combined axes, views and sums."""

import itertools

import dualmesh as dm
from dualmesh.sharding.partition_spec import P
from dualmesh.topology.layout import overlap, refinement

TOPOLOGIES = {
    "2x2x2": dm.TopologySpec({"a": 2, "b": 2, "c": 2}, combined={"ab": ("a", "b")}).resolve(8),
    "2x3": dm.TopologySpec({"a": 2, "b": 3}, combined={"ba": ("b", "a")}).resolve(6),
    "1x4x1": dm.TopologySpec({"a": 1, "b": 4, "c": 1}).resolve(4),
    "view": dm.TopologySpec({"a": 4, "b": 2}, views={"v": dm.View(("a", "b"), {"x": 2, "y": 4})}).resolve(8),
    "inner view": dm.TopologySpec(
        {"a": 2, "b": 2, "c": 2}, views={"v": dm.View(("a", "c"), {"x": 2, "y": 2})}, rank_offset=0
    ).resolve(8),
}


def grid(topology):
    """Return the coarsest mesh that tells all axes of a topology apart."""
    return refinement(topology.layouts.values(), topology.world_size)


def all_specs(topology):
    """Return every spec whose axes cross: each axis left out, in one of two dims in any order, or partial."""
    names = [name for name in topology.axis_names if name != "world"]
    chosen = []
    for count in range(len(names) + 1):
        for axes in itertools.combinations(names, count):
            layouts = [topology.layout(name) for name in axes]
            if not any(overlap(one, two) for one, two in itertools.combinations(layouts, 2)):
                chosen.append(axes)
    return [spec for axes in chosen for spec in _placed(axes)]


def separate_specs(topology):
    """Return every spec that torch takes: it refuses by name to mix a view's axes with those that it spans."""
    mixed = [(set(view.axes), set(view.over)) for view in topology.spec.views.values()]
    return [
        spec
        for spec in all_specs(topology)
        if not any(own & {*spec.axes} and over & {*spec.axes} for own, over in mixed)
    ]


def whole_specs(topology):
    """Return those of them without sums."""
    return [spec for spec in separate_specs(topology) if not spec.partial]


def _placed(axes):
    for order in itertools.permutations(axes):
        for first, second in itertools.combinations_with_replacement(range(len(order) + 1), 2):
            if list(order[second:]) == sorted(order[second:]):
                yield P(order[:first], order[first:second], partial=order[second:])
