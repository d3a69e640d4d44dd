"""Writing what arrived into one's own tree, by path.

What arrives is in `transfer_links`; paths are in `paths`.
"""

from collections.abc import Mapping
from typing import Any

from dualmesh.errors import ArgumentError
from dualmesh.paths import with_paths


def put(tree: Any, path: str, value: Any) -> None:
    """Put a value where a path leads in nested dicts and lists. *Local.*

    Raises:
        ArgumentError: What holds it cannot be written to.
    """
    for key, item in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        name = str(key)
        if path == name:
            if item is value:
                return
            try:
                tree[key] = value
            except TypeError as error:
                raise ArgumentError(
                    f"TransferLink.receive: {path!r} lies in a {type(tree).__qualname__}, which cannot be written to. "
                    f"Give nested dicts and lists.",
                    path=path,
                ) from error
            return
        if path.startswith(f"{name}.") and not _is_leaf(item):
            rest = path[len(name) + 1 :]
            if any(rest == inner for inner, _ in with_paths(item)):
                put(item, rest, value)
                return


def _is_leaf(item: Any) -> bool:
    return not isinstance(item, Mapping | list | tuple)
