"""The order of the packages, what each imports, and the map of them in `docs/design.md`.

`python -m tests.layers` writes the map anew from the docstrings of packages and modules; `tests/core/test_layers.py`
holds the imports to the order.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "design.md"
MARKS = ("<!-- packages: written by `python -m tests.layers` -->\n", "<!-- end of packages -->\n")

ORDER = (
    *("errors", "_support", "topology", "presets", "sharding", "backend", "runtime", "ops", "arrays", "sequence"),
    *("interop", "weights", "initializers", "federated", "config", "pictures", "", "cli", "testing"),
)
"""A package of `dualmesh` imports only those before it; "" is the root, whose public names the last ones use."""


class Edge(NamedTuple):
    """A module that imports another one."""

    importer: str
    imported: str

    def __str__(self) -> str:
        return f"{self.importer} -> {self.imported}"


def modules_of(package: str, base: Path) -> dict[str, Path]:
    """Return the modules of a package by their dotted names."""
    found = {}
    for path in sorted((base / package).rglob("*.py")):
        parts = path.relative_to(base).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Yield the known modules that a file imports: for types only, inside functions, and by a string that names one."""
    tree = ast.parse(path.read_text())
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                if module in known:
                    yield module
                elif alias.name != "__version__":
                    yield node.module
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield from ((node.value,) if "." in node.value and node.value in known else ())


def room_of(module: str) -> str:
    """Return the package that a module of `dualmesh` is in; "" for the root."""
    parts = module.split(".")
    return "" if len(parts) == 1 else "cli" if parts[1] == "__main__" else parts[1]


def place_of(module: str) -> int:
    """Return where in the order a module of `dualmesh` stands."""
    return ORDER.index(room_of(module))


def upward_edges(base: Path) -> set[str]:
    """Return what the core under `base` imports against the order."""
    known = modules_of("dualmesh", base)
    edges = {Edge(module, found) for module, path in known.items() for found in imports_of(path, known)}
    return {str(edge) for edge in edges if place_of(edge.imported) > place_of(edge.importer)}


def summary_of(path: Path) -> str:
    """Return the first paragraph of a module's docstring on one line."""
    said = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(said.split("\n\n")[0].split())


def table() -> str:
    """Return the map of the core: its packages in order, and what each module holds."""
    known = modules_of("dualmesh", ROOT)
    lines = ["| package | holds |", "| --- | --- |"]
    rooms = [room for room in ORDER if room]
    for room in rooms:
        lines.append(f"| `{room}` | {summary_of(known[f'dualmesh.{room}'])} |")
    for room in rooms:
        inside = [module for module in known if room_of(module) == room and module.count(".") > 1]
        if inside:
            lines += ["", f"### `{room}`", "", "| module | holds |", "| --- | --- |"]
            lines += [f"| `{module.split('.', 2)[2]}` | {summary_of(known[module])} |" for module in inside]
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """Return the page with the map as it is now."""
    start, end = (re.escape(mark) for mark in MARKS)
    return re.sub(f"({start}).*({end})", lambda found: f"{found[1]}\n{table()}\n{found[2]}", text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
