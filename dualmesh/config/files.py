"""YAML and TOML as plain data, with the line of every key, so that errors can name it.

What the data mean is in `named_states`.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dualmesh._support.optional_imports import import_optional
from dualmesh.errors import ArgumentError, SpecError, listed

SUFFIXES = (".yaml", ".yml", ".toml")
_DEEPEST = 20

Keys = tuple[str, ...]


@dataclass(frozen=True)
class Places:
    """Where settings stand: a source, and lines by path where it has lines."""

    source: str
    lines: Mapping[Keys, int] = field(default_factory=dict)

    def of(self, path: Keys) -> str:
        """Return "source:line" of a key or of the nearest one around it. *Pure.*"""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.source}:{self.lines[path]}" if path else self.source


def read_file(path: str | Path) -> tuple[Any, Places]:
    """Read a file; return its plain data and where each key stands. *Local.*

    Raises:
        ArgumentError: The file cannot be read, or its ending is unknown.
        SpecError: It is not well formed; the message has the line.
        MissingPackageError: A YAML file without PyYAML.
    """
    file = Path(path)
    if file.suffix.lower() not in SUFFIXES:
        raise ArgumentError(f"{str(file)!r}: the ending is {file.suffix!r}. Endings: {listed(SUFFIXES)}.", path=path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ArgumentError(f"{file}: cannot be read: {reason}.", path=path) from None
    return _toml(str(file), text) if file.suffix.lower() == ".toml" else _yaml(str(file), text)


# -- YAML --------------------------------------------------------------------------------------------------------------


def _yaml(source: str, text: str) -> tuple[Any, Places]:
    yaml = import_optional("yaml", "PyYAML", source)
    lines: dict[Keys, int] = {}
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        _note(source, root, (), lines, (yaml.MappingNode, yaml.SequenceNode, yaml.ScalarNode))
        data = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise SpecError(f"{source}{line}: no YAML: {error.problem or error.context}.", source=source) from None
    except yaml.YAMLError as error:
        raise SpecError(f"{source}: no YAML: {' '.join(str(error).split())}.", source=source) from None
    return data, Places(source, lines)


def _note(source: str, node: Any, path: Keys, lines: dict[Keys, int], kinds: tuple[type, type, type]) -> None:
    """Note the line of every key; refuse one that is given twice, of which YAML would keep the last."""
    if len(path) > _DEEPEST:
        return
    for key, value in _pairs(node, *kinds):
        here, line = (*path, str(key.value)), key.start_mark.line + 1
        if here in lines and isinstance(node, kinds[0]):  # a list may say a name twice: rules do
            raise SpecError(f"{source}:{line}: {here[-1]!r} is given twice, first in line {lines[here]}.", key=here[-1])
        lines.setdefault(here, line)
        _note(source, value, here, lines, kinds)


def _pairs(node: Any, mapping: type, sequence: type, scalar: type) -> list[tuple[Any, Any]]:
    """Return the keys and values of a mapping, or of a list of mappings of one key and of pairs."""
    if isinstance(node, mapping):
        pairs: list[tuple[Any, Any]] = list(node.value)  # type: ignore[attr-defined]  # PyYAML is optional: no types
        return pairs
    found: list[tuple[Any, Any]] = []
    for item in node.value if isinstance(node, sequence) else ():  # type: ignore[attr-defined]
        if isinstance(item, mapping) and len(item.value) == 1:  # type: ignore[attr-defined]
            found += item.value  # type: ignore[attr-defined]
        elif isinstance(item, sequence) and len(item.value) == 2:  # type: ignore[attr-defined]
            first, second = item.value  # type: ignore[attr-defined]
            if isinstance(first, scalar) and first.tag == "tag:yaml.org,2002:str":  # type: ignore[attr-defined]
                found.append((first, second))
    return found


# -- TOML --------------------------------------------------------------------------------------------------------------

_TABLE = re.compile(r"\s*\[(?P<name>[^\[\]]+)\]\s*(#.*)?$")
_KEY = re.compile(r"\s*(?P<name>(?:[\w-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[\w-]+|\"[^\"]*\"|'[^']*'))*)\s*=")
_PART = re.compile(r"[\w-]+|\"[^\"]*\"|'[^']*'")
_AT_LINE = re.compile(r"\s*\(at line (\d+), column \d+\)")


def _toml(source: str, text: str) -> tuple[Any, Places]:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = _AT_LINE.search(str(error))
        line = f":{found[1]}" if found else ""
        raise SpecError(f"{source}{line}: no TOML: {_AT_LINE.sub('', str(error))}.", source=source) from None
    lines: dict[Keys, int] = {}
    table: Keys = ()
    for number, content in enumerate(text.splitlines(), 1):
        if (match := _TABLE.match(content)) is not None:
            table = _keys(match["name"])
            lines.setdefault(table, number)
        elif (match := _KEY.match(content)) is not None:
            lines.setdefault((*table, *_keys(match["name"])), number)
    return data, Places(source, lines)


def _keys(name: str) -> Keys:
    return tuple(part.strip("\"'") for part in _PART.findall(name))
