"""A context manager around functions, coroutines and generators, entered anew around every step.

A `with` block held across an `await` or a `yield` would leak into whoever runs in between. What is entered is not
known here; see `scope`.
"""

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar, cast

Params = ParamSpec("Params")
Result = TypeVar("Result")
Entered = Callable[[], AbstractContextManager[Any]]


def wrap_callable(fn: Callable[Params, Result], enter: Entered) -> Callable[Params, Result]:
    """Return `fn` with `enter()` around its call, or around each step of what it returns. *Pure.*"""
    if inspect.isasyncgenfunction(fn):
        return cast("Callable[Params, Result]", _async_generator(fn, enter))
    if inspect.iscoroutinefunction(fn):
        return cast("Callable[Params, Result]", _coroutine(fn, enter))
    if inspect.isgeneratorfunction(fn):
        return cast("Callable[Params, Result]", _generator(fn, enter))

    @functools.wraps(fn)
    def wrapper(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        with enter():
            return fn(*args, **kwargs)

    return wrapper


def _generator(fn: Callable[..., Generator[Any, Any, Any]], enter: Entered) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        return (yield from _steps(fn(*args, **kwargs), enter))

    return wrapper


def _coroutine(fn: Callable[..., Any], enter: Entered) -> Callable[..., Any]:
    @functools.wraps(fn)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        return await _Steps(fn(*args, **kwargs), enter)

    return wrapper


def _async_generator(fn: Callable[..., AsyncGenerator[Any, Any]], enter: Entered) -> Callable[..., Any]:
    @functools.wraps(fn)
    async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        source = fn(*args, **kwargs)
        step = source.asend(None)
        try:
            while True:
                try:
                    item = await _Steps(step.__await__(), enter)
                except StopAsyncIteration:
                    return
                try:
                    sent = yield item
                except GeneratorExit:
                    raise
                except BaseException as error:
                    step = source.athrow(error)
                else:
                    step = source.asend(sent)
        finally:
            await _Steps(source.aclose().__await__(), enter)

    return wrapper


class _Steps:
    """An awaitable whose every step runs inside the context."""

    __slots__ = ("_enter", "_steppable")

    def __init__(self, steppable: Any, enter: Entered) -> None:
        self._steppable = steppable
        self._enter = enter

    def __await__(self) -> Generator[Any, Any, Any]:
        return _steps(self._steppable, self._enter)


def _steps(steppable: Any, enter: Entered) -> Generator[Any, Any, Any]:
    """Drive a generator or coroutine, entering the context around each step."""
    step: Callable[[], Any] = functools.partial(steppable.send, None)
    while True:
        try:
            with enter():
                yielded = step()
        except StopIteration as stop:
            return stop.value
        try:
            sent = yield yielded
        except GeneratorExit:
            with enter():
                steppable.close()
            raise
        except BaseException as error:
            step = functools.partial(steppable.throw, error)
        else:
            step = functools.partial(steppable.send, sent)
