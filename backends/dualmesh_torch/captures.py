"""Refusing DTensors that a per-rank function captured instead of taking them as arguments.

What a captured array would get is no gradient, or a wrong one; as an argument it gets the right one.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed.tensor import DTensor

from dualmesh.errors import ArrayTypeError
from dualmesh.tree import leaves


def refuse_captured(fn: Callable[..., Any]) -> None:
    """Refuse a function that captured a DTensor. *Local.*

    Raises:
        ArrayTypeError: A closure variable, default or bound argument holds one that needs a gradient.
    """
    for name, value in _captured(fn):
        for leaf in leaves(value):
            if isinstance(leaf, DTensor) and leaf.requires_grad:
                raise ArrayTypeError(
                    f"shard_map: {getattr(fn, '__name__', fn)!r} captures {name!r}, a DTensor of shape "
                    f"{tuple(leaf.shape)} that needs a gradient. Pass it as an argument, with its spec in in_specs.",
                    name=name,
                )


def _captured(fn: Any) -> Iterator[tuple[str, Any]]:
    while isinstance(fn, functools.partial):
        yield from ((f"argument {place}", value) for place, value in enumerate(fn.args))
        yield from fn.keywords.items()
        fn = fn.func
    code = getattr(fn, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from ((f"default {place}", value) for place, value in enumerate(fn.__defaults__ or ()))
    yield from ((name, fn.__globals__[name]) for name in code.co_names if name in fn.__globals__)
