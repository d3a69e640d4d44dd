"""Refusing DTensors that a per-rank function captured instead of taking them as arguments.

What a captured array would get is no gradient, or a wrong one; as an argument it gets the right one.
"""

import functools
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dualmesh.errors import ArrayTypeError
from dualmesh.sharding.tree import leaves

Found = Iterator[tuple[str, Any]]
Seen = set[tuple[int, ...]]


def refuse_captured(fn: Callable[..., Any]) -> None:
    """Refuse a function that captured a DTensor. *Local.*

    Looked at are closures, defaults, bound arguments, and what the code names: globals, functions of the same module,
    attributes of the object that a method is bound to. Modules that FSDP wraps look after their parameters themselves.

    Raises:
        ArrayTypeError: One of these holds one that needs a gradient.
    """
    for name, value in _walk_captured(fn, set()):
        if isinstance(value, DTensor) and value.requires_grad:
            raise ArrayTypeError(
                f"shard_map: {getattr(fn, '__name__', fn)!r} captures {name!r}, a DTensor of shape "
                f"{tuple(value.shape)} that needs a gradient. Pass it as an argument, with its spec in in_specs.",
                name=name,
            )


def _walk_captured(fn: Any, seen: Seen) -> Found:
    """Yield what a callable reaches without its arguments, by name."""
    key = (id(fn.__self__), id(fn.__func__)) if isinstance(fn, MethodType) else (id(fn),)
    if key in seen:
        return
    seen.add(key)
    if isinstance(fn, functools.partial):
        for place, value in enumerate(fn.args):
            yield from _walk_value(f"argument {place}", value, fn, seen)
        for name, value in fn.keywords.items():
            yield from _walk_value(name, value, fn, seen)
        yield from _walk_captured(fn.func, seen)
    elif isinstance(fn, MethodType):
        yield from _of_object(fn.__self__, fn.__func__, seen)
        yield from _walk_captured(fn.__func__, seen)
    elif isinstance(fn, FunctionType):
        yield from _of_function(fn, seen)
    elif isinstance(fn, torch.nn.Module):
        yield from _of_module(fn)
    elif callable(fn) and not isinstance(fn, type) and isinstance(type(fn).__call__, FunctionType):
        yield from _walk_captured(MethodType(type(fn).__call__, fn), seen)


def _of_function(fn: FunctionType, seen: Seen) -> Found:
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield from _walk_value(name, cell.cell_contents, fn, seen)
        except ValueError:  # not assigned yet
            continue
    for place, value in enumerate(fn.__defaults__ or ()):
        yield from _walk_value(f"default {place}", value, fn, seen)
    for name, value in (fn.__kwdefaults__ or {}).items():
        yield from _walk_value(f"default {name}", value, fn, seen)
    for name in _names(fn.__code__) & fn.__globals__.keys():
        yield from _walk_value(name, fn.__globals__[name], fn, seen)


def _walk_value(name: str, value: Any, fn: Any, seen: Seen) -> Found:
    """Yield what a captured value holds; functions of other modules are their own business."""
    if isinstance(value, FunctionType):
        if value.__module__ == getattr(fn, "__module__", None):
            yield from _walk_captured(value, seen)
    elif isinstance(value, torch.nn.Module | MethodType | functools.partial):
        yield from ((f"{name}.{inner}", held) for inner, held in _walk_captured(value, seen))
    else:
        yield from ((name, leaf) for leaf in leaves(value))
        yield from _of_object(value, fn, seen, name)


def _of_object(owner: Any, fn: Any, seen: Seen, name: str = "self") -> Found:
    """Yield the attributes of an object that a function names."""
    if isinstance(owner, torch.nn.Module):
        yield from _of_module(owner)
    elif isinstance(fn, FunctionType) and not isinstance(owner, type | ModuleType | torch.Tensor):
        key = (id(owner), id(fn), id(fn.__code__))
        held = {} if key in seen else getattr(owner, "__dict__", {})
        seen.add(key)
        for attribute in _names(fn.__code__) & held.keys():
            yield from _walk_value(f"{name}.{attribute}", held[attribute], fn, seen)


def _of_module(module: torch.nn.Module) -> Found:
    if not any(isinstance(one, FSDPModule) for one in module.modules()):
        yield from module.named_parameters()


def _names(code: CodeType) -> set[str]:
    """Return the globals and attributes that code names, that of functions defined in it included."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names(constant)
    return found
