"""What a command answers: plain data for programs, and tables and lines for people.

What is in it is decided by each command.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dualmesh._support.optional_imports import import_optional

EXTRA = "absl-py rich PyYAML"
"""What to install for the command line."""
PROBLEM, USAGE, ABSENT = 1, 2, 3
"""Exit codes besides 0: something is wrong; the question is wrong; a package is missing."""


@dataclass(frozen=True)
class Table:
    """Rows of text under headings."""

    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    title: str = ""


@dataclass(frozen=True)
class Report:
    """An answer.

    Args:
        data: The answer as plain data, which `--json` prints.
        parts: The same for people: lines and tables, in order.
        code: The exit code.
    """

    data: Mapping[str, Any]
    parts: Sequence[str | Table]
    code: int = 0


def print_answer(report: Report, as_json: bool) -> None:
    """Print an answer. *Local.*

    Raises:
        MissingPackageError: Tables are asked for and rich is not installed.
    """
    if as_json:
        json.dump(report.data, sys.stdout, indent=1, default=str)
        sys.stdout.write("\n")
        return
    console = _console()
    for part in report.parts:
        if isinstance(part, str):
            console.print(part, markup=False, highlight=False, soft_wrap=True)
        else:
            if part.title:
                console.print(part.title, markup=False, highlight=False)
            console.print(_rich(part))


def _console() -> Any:
    """Return where tables go: as wide as they need to be where nobody's window is known, so that nothing is cut."""
    consoles = import_optional("rich.console", "rich", "dualmesh", EXTRA)
    width = None if sys.stdout.isatty() else 200
    return consoles.Console(file=sys.stdout, width=width)


def _rich(table: Table) -> Any:
    tables, boxes = (
        import_optional("rich.table", "rich", "dualmesh", EXTRA),
        import_optional("rich.box", "rich", "dualmesh", EXTRA),
    )
    text = import_optional("rich.text", "rich", "dualmesh", EXTRA)
    made = tables.Table(box=boxes.SIMPLE, pad_edge=False)
    for head in table.heads:
        made.add_column(head, overflow="fold")
    for row in table.rows:
        made.add_row(*(text.Text(cell) for cell in row))
    return made
