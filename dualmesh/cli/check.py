"""`dualmesh check`: is a configuration file right, and does it fit a world.

Files are read in `config`.
"""

from collections.abc import Sequence
from typing import Any

from dualmesh.cli.command_flags import NODES, WORLD
from dualmesh.cli.report import PROBLEM, Report, Table
from dualmesh.cli.show import text_of
from dualmesh.config import Configuration
from dualmesh.errors import ArgumentError, SpecError, counted
from dualmesh.topology.resolve import positive

SUMMARY = "read a YAML or TOML file of named states; every problem with its line"
FLAGS = (WORLD, NODES)


def check(values: Any, arguments: Sequence[str]) -> Report:
    """Answer `dualmesh check FILE`. *Local.*"""
    if len(arguments) != 1:
        raise ArgumentError(f"dualmesh check: {counted(len(arguments), 'file')} given. Name one: check config.yaml.")
    path = arguments[0]
    try:
        config = Configuration.from_file(path)
        given = values["world_size"].value
        size = config.world_size if given is None else positive("dualmesh check", "world_size", given)
        topologies = config.topologies(size) if size is not None else {}
    except SpecError as error:
        problems = list(getattr(error, "problems", ()) or [str(error)])
        return Report({"file": path, "problems": problems}, problems, PROBLEM)
    texts = {name: text_of(topology) for name, topology in topologies.items()}
    texts = texts or {name: repr(state.topology_spec()) for name, state in config.states.items()}
    fits = (
        f"fits a world of {size} ranks" if size is not None else "is well formed; give --world-size to see if it fits"
    )
    default = config.default or (next(iter(texts)) if config.ordered else None)
    rows = [(name, "default" if name == default else "", text) for name, text in texts.items()]
    states = {name: state.to_dict() for name, state in config.states.items()}
    data: dict[str, Any] = {"file": path, "problems": [], "world_size": size, "default": default, "states": states}
    return Report(data, [f"{path}: {fits}.", Table(("state", "", "axes"), rows)])
