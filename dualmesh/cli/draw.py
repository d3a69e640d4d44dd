"""`dualmesh draw`: a picture of the topologies meant, in one file.

What a picture shows is in `pictures`.
"""

from collections.abc import Sequence
from typing import Any

from dualmesh.cli.command_flags import NODES, WORLD, Flag
from dualmesh.cli.report import Report
from dualmesh.cli.selection import select_states
from dualmesh.errors import listed
from dualmesh.pictures import draw as drawn

SUMMARY = "a picture of one state or of several: rank grid, nodes, groups of every axis"
FLAGS = (
    WORLD,
    NODES,
    Flag("output", "string", "the file: .svg, .png (needs matplotlib) or .html", "topology.svg", "o"),
    Flag("rank", "integer", "whose groups get a ring; else the first rank's"),
    Flag("theme", "string", "auto (the reader's preference), light or dark", "auto"),
)


def draw(values: Any, arguments: Sequence[str]) -> Report:
    """Answer `dualmesh draw`. *Local.*"""
    selection = select_states(values)
    picture = drawn(
        dict(selection.topologies),
        gpus_per_node=selection.gpus_per_node,
        rank=values["rank"].value,
        theme=values["theme"].value,
    )
    path = picture.save(values["output"].value)
    states = list(selection.topologies)
    return Report({"output": str(path), "states": states}, [f"Drew {listed(states)}: {path}"])
