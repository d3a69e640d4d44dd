"""Writing what arrived into one's own tree, by path.

What arrives is in `link`; paths are in `param_paths`.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from dualmesh.errors import ArgumentError
from dualmesh.sharding.param_paths import keyed_items, path_of


def put_all(tree: Any, values: Mapping[str, Any]) -> None:
    """Put values where their paths lead in nested dicts and lists: all of them, or none. *Local.*

    A value that is there already stays: torch tensors are written to.

    Raises:
        ArgumentError: What holds one cannot be written to.
    """
    places = {path: (holder, key, old) for path, holder, key, old in _places(tree, ())}
    for path, value in values.items():
        holder, _, old = places[path]
        if old is not value and not isinstance(holder, MutableMapping | list):
            raise ArgumentError(
                f"TransferLink.receive: {path!r} lies in a {type(holder).__qualname__}, which cannot be written to. "
                f"Give nested dicts and lists.",
                path=path,
            )
    for path, value in values.items():
        holder, key, old = places[path]
        if old is not value:
            holder[key] = value


def _places(tree: Any, prefix: tuple[object, ...]) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield (path, what holds it, under which key, leaf), as `param_paths.with_paths` walks."""
    named = keyed_items(tree) or ()
    keys = tree if isinstance(tree, Mapping) else range(len(named))
    for key, (name, item) in zip(keys, named, strict=True):
        path = (*prefix, name)
        if keyed_items(item) is not None:
            yield from _places(item, path)
        elif item is not None:
            yield path_of(path), tree, key, item
