"""Paths of parameters: where a leaf sits in a tree, as keys joined by dots, and patterns over such paths.

What a matching parameter then gets is in `plan`; trees without paths are in `tree`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dualmesh.errors import ArgumentError
from dualmesh.sharding.tree import mapped


@dataclass(frozen=True)
class Pattern:
    """A dotted path in which `*` is any one segment (or, inside a segment, any part of it) and `**` any number.

    >>> pattern = Pattern("layers.*.attn.w*")
    >>> pattern.matches("layers.3.attn.wq"), pattern.matches("layers.3.mlp.wq")
    (True, False)
    >>> Pattern("**.bias").matches("bias"), Pattern("**").matches("")
    (True, True)
    """

    text: str

    def __post_init__(self) -> None:
        segments = self.text.split(".") if isinstance(self.text, str) else [""]
        bad = [segment for segment in segments if not segment or ("**" in segment and segment != "**")]
        if bad and self.text != "":
            raise ArgumentError(
                f"Pattern {self.text!r}: {bad[0]!r} is no segment. Segments are separated by single dots; '*' stands "
                f"for one segment or a part of one, '**' alone for any number of segments.",
                pattern=self.text,
            )

    def matches(self, path: str) -> bool:
        """Tell whether the whole path fits. *Pure.*"""
        return self._expression.match(f".{path}" if path else "") is not None

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        parts = [_expression_of(segment) for segment in self.text.split(".")] if self.text else []
        return re.compile("".join(parts) + r"\Z")


def _expression_of(segment: str) -> str:
    if segment == "**":
        return r"(?:\.[^.]+)*"
    if segment == "*":
        return r"\.[^.]+"
    return r"\." + r"[^.]*".join(re.escape(part) for part in segment.split("*"))


def path_of(keys: str | Iterable[object]) -> str:
    """Return a path from its keys, outermost first; a path stays as it is. *Pure.*

    >>> path_of(["layers", 0, "wq"])
    'layers.0.wq'
    """
    return keys if isinstance(keys, str) else ".".join(str(key) for key in keys)


def with_paths(tree: Any, prefix: tuple[object, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) of nested dicts, lists, tuples and named tuples, in the order of `tree.leaves`. *Pure.*

    >>> list(with_paths({"layers": [{"w": 1}, {"w": 2}], "bias": None}))
    [('layers.0.w', 1), ('layers.1.w', 2)]
    """
    items = keyed_items(tree)
    for key, value in items or ():
        yield from with_paths(value, (*prefix, key))
    if items is None and tree is not None:
        yield path_of(prefix), tree


def keyed_items(tree: Any) -> list[tuple[object, Any]] | None:
    """Return the (key, item) pairs of a container, fields by name; None of what is a leaf or nothing. *Pure.*"""
    if isinstance(tree, Mapping):
        return list(tree.items())
    if isinstance(tree, list | tuple):
        return list(zip(getattr(tree, "_fields", range(len(tree))), tree, strict=True))
    return None


def leaves_by_path(where: str, tree: Any) -> dict[str, Any]:
    """Return {path: leaf}, in the order of `with_paths`. *Pure.*

    Raises:
        ArgumentError: Two leaves have one path: {"a.b": 1, "a": {"b": 2}}, or the keys 1 and "1".

    >>> leaves_by_path("example", {"layers": [{"w": 1}, {"w": 2}]})
    {'layers.0.w': 1, 'layers.1.w': 2}
    """
    found: dict[str, Any] = {}
    for path, leaf in with_paths(tree):
        if path in found:
            raise ArgumentError(
                f"{where}: two arrays of the tree have the path {path!r}, as keys are joined by dots and read as text. "
                f"Rename one of the keys.",
                path=path,
            )
        found[path] = leaf
    return found


def path_tree(tree: Any) -> Any:
    """Return a tree with the path of every leaf in its place. *Pure.*

    >>> path_tree({"layers": [{"w": 1}, {"w": 2}], "bias": None})
    {'layers': [{'w': 'layers.0.w'}, {'w': 'layers.1.w'}], 'bias': None}
    """
    paths = iter([path for path, _ in with_paths(tree)])
    return mapped(lambda _leaf: next(paths), tree)
