"""`dualmesh show`: every axis of the topologies meant, and one rank's place in them.

The facts come from `pictures.axis_facts`; a picture of the same is `draw`.
"""

from collections.abc import Sequence
from typing import Any

from dualmesh.cli.command_flags import NODES, WORLD, Flag
from dualmesh.cli.report import Report, Table
from dualmesh.cli.selection import chosen_rank, select_states
from dualmesh.errors import counted, listed
from dualmesh.pictures.axis_facts import AxisFacts, axis_facts, facts, neighbours, views
from dualmesh.topology.spec import TopologySpec
from dualmesh.topology.topology import Topology

SUMMARY = "axes, sizes, strides, groups, which axes cross nodes; one rank's neighbours"
FLAGS = (WORLD, NODES, Flag("rank", "integer", "a rank whose indices and neighbours are shown"))
_SHOWN = 8


def show(values: Any, arguments: Sequence[str]) -> Report:
    """Answer `dualmesh show`. *Local.*"""
    selection = select_states(values)
    rank = chosen_rank(selection, values["rank"].value, "show")
    data: dict[str, Any] = {}
    parts: list[str | Table] = []
    for name, topology in selection.topologies.items():
        found = facts(topology, selection.gpus_per_node)
        data[name] = {"spec": text_of(topology), "ranks": len(topology.members), "axes": [*map(_axis_data, found)]}
        parts += [heading(name, topology), _axes_table(found, selection.gpus_per_node)]
        if rank is not None and topology.has_rank(rank):
            data[name]["rank"] = _rank_data(topology, rank)
            parts.append(_rank_table(topology, rank, selection.gpus_per_node))
    common = {"world_size": selection.world_size, "gpus_per_node": selection.gpus_per_node}
    return Report({**common, "states": data}, parts)


def text_of(topology: Topology) -> str:
    """Return a topology's spec in one line, where it has that form. *Pure.*"""
    return topology.spec.to_text() if isinstance(topology.spec, TopologySpec) else repr(topology.spec)


def heading(name: str, topology: Topology) -> str:
    """Return what a topology is in short: its name, ranks and axes of more than one position. *Pure.*"""
    _, axes = next(views(topology))
    found = {axis: axis_facts(topology, axis) for axis in axes}
    sizes = [f"{axis}={fact.size_text.replace(', ', '/')}" for axis, fact in found.items() if fact.size > 1]
    return f"{name}: {counted(len(topology.members), 'rank')}: {listed(sizes)}"


def _axis_data(fact: AxisFacts) -> dict[str, Any]:
    return {
        "name": fact.name,
        "kind": fact.kind,
        "sizes": list(fact.sizes),
        "digits": [{"size": digit.size, "stride": digit.stride} for digit in fact.digits],
        "groups": fact.group_count,
        "first_group": list(fact.first_group),
        "crosses_nodes": fact.crosses_nodes,
    }


def _axes_table(found: Sequence[AxisFacts], per_node: int) -> Table:
    rows = [
        (
            fact.name,
            fact.kind,
            fact.size_text,
            fact.stride_text,
            f"{fact.group_count:,}",
            fact.first_text,
            "cross" if fact.crosses_nodes else "inside",
        )
        for fact in found
    ]
    return Table(("axis", "kind", "size", "stride", "groups", "first group", f"nodes of {per_node}"), rows)


def _rank_data(topology: Topology, rank: int) -> dict[str, Any]:
    return {"rank": rank, "axes": {axis: _place(topology, axis, rank) for axis in _axes_of(topology, rank)}}


def _axes_of(topology: Topology, rank: int) -> list[str]:
    return [axis for axis in topology.axis_names if topology.is_member(axis, rank) and topology.size(axis, rank) > 1]


def _place(topology: Topology, axis: str, rank: int) -> dict[str, Any]:
    before, after = neighbours(topology, axis, rank)
    size = topology.size(axis, rank)
    first = [topology.member(axis, rank, index) for index in range(min(size, _SHOWN))]
    return {
        "index": topology.index(axis, rank),
        "size": size,
        "before": before,
        "after": after,
        "group": first,
        "is_whole_group": size <= _SHOWN,
    }


def _rank_table(topology: Topology, rank: int, per_node: int) -> Table:
    rows = []
    for axis in _axes_of(topology, rank):
        place = _place(topology, axis, rank)
        group = " ".join(map(str, place["group"])) + ("" if place["is_whole_group"] else " ..")
        crosses = axis_facts(topology, axis, per_node).crosses_nodes
        away = [str(near) for near in (place["before"], place["after"]) if near // per_node != rank // per_node]
        far = f"on another node: {', '.join(dict.fromkeys(away))}" if away and crosses else ""
        index = f"{place['index']} of {place['size']}"
        rows.append((axis, index, str(place["before"]), str(place["after"]), group, far))
    return Table(("axis", "index", "before", "after", "group", "neighbours"), rows, f"rank {rank}")
