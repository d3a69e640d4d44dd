"""Nested containers (dicts, lists, tuples, named tuples) without a framework, for backends that have no trees.

JAX brings its own trees, with registered classes; its backend uses those.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dualmesh.errors import ShardingError
from dualmesh.sharding.partition_spec import P, is_spec


def leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves in order: values of mappings by insertion, items of lists and tuples. *Pure.*"""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from leaves(item)
    elif tree is not None:
        yield tree


def mapped(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Return the tree with `fn` applied to its leaves, and to what the rest trees hold there. *Pure.*"""
    if isinstance(tree, Mapping):
        return type(tree)({key: mapped(fn, value, *(other[key] for other in rest)) for key, value in tree.items()})  # type: ignore[call-arg]
    if isinstance(tree, list | tuple):
        items = [mapped(fn, *group) for group in zip(tree, *rest, strict=True)]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return None if tree is None else fn(tree, *rest)


def spec_tree(specs: Any, tree: Any, *, what: str) -> Any:
    """Return a tree like `tree` whose leaves are the `P` of each leaf, from a prefix tree of specs. *Pure.*

    Raises:
        ShardingError: The specs are no prefix of the tree.
    """
    if is_spec(specs):
        spec = P.of(specs)
        return mapped(lambda _leaf: spec, tree)
    if tree is None and specs is None:
        return None
    if isinstance(tree, Mapping) and isinstance(specs, Mapping) and set(tree) == set(specs):
        pairs = {key: spec_tree(specs[key], value, what=f"{what}[{key!r}]") for key, value in tree.items()}
        return type(tree)(pairs)  # type: ignore[call-arg]
    sequences = isinstance(tree, list | tuple) and isinstance(specs, list | tuple)
    if sequences and len(tree) == len(specs):
        items = [spec_tree(s, item, what=f"{what}[{i}]") for i, (s, item) in enumerate(zip(specs, tree, strict=True))]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    raise ShardingError(
        f"{what}: the specs {specs!r} do not fit a {type(tree).__name__}"
        f"{_shape_of(tree)}. Give one dm.P for all of it, or the same containers with one dm.P per leaf.",
        specs=specs,
    )


def _shape_of(tree: Any) -> str:
    if isinstance(tree, Mapping):
        return f" with keys {list(tree)}"
    return f" of length {len(tree)}" if isinstance(tree, list | tuple) else ""
