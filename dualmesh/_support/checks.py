"""What public functions were given, as what they take, or refused by name; nothing here knows what it is for.

Counts and sizes are checked in `resolve`, axes and states where they are looked up.
"""

import os
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from dualmesh.errors import ArgumentError, closest, listed

Params = ParamSpec("Params")
Result = TypeVar("Result")

_SIZE = "_size"


def refuse_unknown_keywords(
    *, beside: Callable[..., Any] | None = None
) -> Callable[[Callable[Params, Result]], Callable[Params, Result]]:
    """Return a decorator of functions that name the keyword which was likely meant: `tp` means `tp_size`. *Pure.*

    Python's own TypeError compares letters at best, and knows one function. Type checkers and `inspect.signature` see
    the function as it is written.

    Args:
        beside: A function whose keywords users give here too; they are told where those belong.
    """

    def decorate(fn: Callable[Params, Result]) -> Callable[Params, Result]:
        own = _keywords(fn)
        others = () if beside is None else tuple(name for name in _keywords(beside) if name not in own)

        @wraps(fn)
        def wrapper(*args: Params.args, **kwargs: Params.kwargs) -> Result:
            for name in kwargs:
                if name not in own:
                    where, cure = fn.__name__, _meant(name, own, others, getattr(beside, "__name__", ""))
                    raise ArgumentError(
                        f"{where}: there is no argument {name!r}. Arguments: {listed(own, len(own))}.{cure}",
                        argument=name,
                    )
            return fn(*args, **kwargs)

        return wrapper

    return decorate


def _keywords(fn: Callable[..., Any]) -> tuple[str, ...]:
    code = getattr(fn, "__wrapped__", fn).__code__  # `inspect.signature` says the same, a hundred times slower
    names: tuple[str, ...] = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return names


def _meant(name: str, own: tuple[str, ...], others: tuple[str, ...], beside: str) -> str:
    """Return the advice for a keyword that is none: a size by its axis first, then the closest."""
    known = (*own, *others)
    found = name + _SIZE if name + _SIZE in known else closest(name, known)
    if found is None:
        return ""
    place = f" It is an argument of {beside}: give its spec here." if found in others or name in others else ""
    return f" Did you mean {found!r}?{place}" if found != name else place


def items_in(value: Any) -> tuple[Any, ...] | None:
    """Return the items of an iterable; None for what has none, and for strings and mappings. *Pure.*"""
    if not isinstance(value, str | bytes | Mapping):
        with suppress(TypeError):  # also an array without dims says no
            return tuple(value)
    return None


def check_items(where: str, name: str, value: Any) -> tuple[Any, ...]:
    """Return the items of a sequence or another iterable. *Pure.*

    Raises:
        ArgumentError: It has no items.
    """
    items = items_in(value)
    if items is None:
        raise ArgumentError(f"{where}: {name} is {value!r}. Give a list or a tuple.", **{name: value})
    return items


def check_strings(where: str, name: str, value: Any) -> tuple[str, ...]:
    """Return names as a tuple; one string is one name. *Pure.*

    Raises:
        ArgumentError: It is no string and no iterable of strings.
    """
    words = (value,) if isinstance(value, str) else check_items(where, name, value)
    if not all(isinstance(word, str) for word in words):
        raise ArgumentError(f"{where}: {name} is {value!r}. Give names: strings.", **{name: value})
    return words


def is_switched_on(variable: str) -> bool:
    """Tell whether an environment variable is set to something else than no: empty, 0, false. *Local.*"""
    return os.environ.get(variable, "0") not in ("", "0", "false", "False")


def check_flag(where: str, name: str, value: Any) -> bool:
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
