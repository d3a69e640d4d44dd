"""What a function captured from around it, which compiling bakes in.

Compiling anew where it changed is in `lifted`.
"""

import functools
from types import FunctionType, MethodType
from typing import Any

_EMPTY = object()
_DEEPEST = 4


def captured(fn: Any, depth: int = _DEEPEST) -> tuple[Any, ...]:
    """Return the contents of the variables that a function, and the functions it captured, closed over. *Local.*

    Globals, attributes of captured objects and the insides of arrays and containers are not looked at.

    >>> def scaled(factor):
    ...     return lambda x: factor * x
    >>> captured(scaled(3))
    (3,)
    """
    if isinstance(fn, functools.partial):
        return captured(fn.func, depth) + fn.args + tuple(fn.keywords.values())
    if isinstance(fn, MethodType):
        return captured(fn.__func__, depth)
    if not isinstance(fn, FunctionType):
        return ()
    wrapped = getattr(fn, "__wrapped__", None)
    contents = captured(wrapped, depth - 1) if wrapped is not None and depth else ()
    for cell in fn.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # a variable that has no value yet
            value = _EMPTY
        contents += (value, *captured(value, depth - 1)) if depth else (value,)
    return contents


def is_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Tell whether all contents are the same objects. *Pure.*"""
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
