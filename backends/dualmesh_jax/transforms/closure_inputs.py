"""What a function captured from around it, which compiling bakes in.

Compiling anew where it changed is in `shard_map`.
"""

import functools
import operator
from types import FunctionType, MethodType
from typing import Any

Contents = dict[int, tuple[Any, ...]]
_EMPTY = object()
_CONTAINERS = (dict, list, tuple)
_FUNCTIONS = {FunctionType, MethodType, functools.partial}
_DEEPEST = 4


def find_captured(fn: Any, depth: int = _DEEPEST) -> Contents:
    """Return what is in each variable that a function, and the functions it captured, closed over. *Local.*

    Of dicts, lists and tuples these are the keys and what is inside. Globals, attributes of captured objects and the
    insides of arrays are not looked at.

    >>> def scaled(factor):
    ...     return lambda x: factor * x
    >>> list(find_captured(scaled([3, 4])).values())
    [(3, 4)]
    """
    if isinstance(fn, functools.partial):
        given = [leaf for value in (*fn.args, *fn.keywords.values()) for leaf in _leaves(value)]
        return {id(fn): tuple(given)} | find_captured(fn.func, depth)
    if isinstance(fn, MethodType):
        return find_captured(fn.__func__, depth)
    if not isinstance(fn, FunctionType):
        return {}
    wrapped = getattr(fn, "__wrapped__", None)
    contents = find_captured(wrapped, depth - 1) if wrapped is not None and depth else {}
    for cell in fn.__closure__ or ():
        try:
            leaves = tuple(_leaves(cell.cell_contents))
        except ValueError:  # a variable that has no value yet
            leaves = (_EMPTY,)
        contents[id(cell)] = leaves
        for leaf in leaves if depth else ():
            if type(leaf) in _FUNCTIONS:
                contents |= find_captured(leaf, depth - 1)
    return contents


def find_changed(before: Contents, after: Contents) -> set[int]:
    """Return the variables that hold other objects, or are there only before or after. *Pure.*"""
    both = before.keys() & after.keys()
    return (before.keys() ^ after.keys()) | {name for name in both if not _is_same(before[name], after[name])}


def _leaves(value: Any, around: tuple[int, ...] = ()) -> list[Any]:
    """Return what is in dicts, lists and tuples, at any depth; of anything else, the value itself."""
    if not isinstance(value, _CONTAINERS) or id(value) in around:
        return [value]
    found = list(value) if isinstance(value, dict) else []
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, _CONTAINERS):
            found += _leaves(part, (*around, id(value)))
        else:
            found.append(part)
    return found


def _is_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))
