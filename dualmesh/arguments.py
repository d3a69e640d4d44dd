"""What public functions were given, as what they take, or refused by name; nothing here knows what it is for.

Counts and sizes are checked in `resolution`, axes and states where they are looked up.
"""

import os
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from typing import Any

from dualmesh.errors import ArgumentError


def items_in(value: Any) -> tuple[Any, ...] | None:
    """Return the items of an iterable; None for what has none, and for strings and mappings. *Pure.*"""
    if not isinstance(value, str | bytes | Mapping):
        with suppress(TypeError):  # also an array without dims says no
            return tuple(value)
    return None


def items_of(where: str, name: str, value: Any) -> tuple[Any, ...]:
    """Return the items of a sequence or another iterable. *Pure.*

    Raises:
        ArgumentError: It has no items.
    """
    items = items_in(value)
    if items is None:
        raise ArgumentError(f"{where}: {name} is {value!r}. Give a list or a tuple.", **{name: value})
    return items


def words_of(where: str, name: str, value: Any) -> tuple[str, ...]:
    """Return names as a tuple; one string is one name. *Pure.*

    Raises:
        ArgumentError: It is no string and no iterable of strings.
    """
    words = (value,) if isinstance(value, str) else items_of(where, name, value)
    if not all(isinstance(word, str) for word in words):
        raise ArgumentError(f"{where}: {name} is {value!r}. Give names: strings.", **{name: value})
    return words


def is_switched_on(variable: str) -> bool:
    """Tell whether an environment variable is set to something else than no: empty, 0, false. *Local.*"""
    return os.environ.get(variable, "0") not in ("", "0", "false", "False")


def flag_of(where: str, name: str, value: Any) -> bool:
    """Return a yes or no as a bool. *Pure.*

    Raises:
        ArgumentError: It is neither True nor False.
    """
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise ArgumentError(f"{where}: {name} is {value!r}. Give True or False.", **{name: value})


def function_of(where: str, fn: Any) -> Callable[..., Any]:
    """Return what can be called. *Pure.*

    Raises:
        ArgumentError: It cannot.
    """
    if not callable(fn):
        raise ArgumentError(f"{where}: {fn!r} cannot be called. Give a function.", fn=fn)
    found: Callable[..., Any] = fn
    return found


def is_one_of(value: Any, names: Container[str]) -> bool:
    """Tell whether a value, of any type, is one of some names. *Pure.*

    >>> is_one_of("tp", ("dp", "tp")), is_one_of(["tp"], ("dp", "tp"))
    (True, False)
    """
    return isinstance(value, str) and value in names
