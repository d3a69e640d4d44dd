"""Functions that are traced anew at every call, compiled once per program that comes of it.

What JAX runs eagerly in a gradient or a vmap must see what globals, attributes and captured variables hold now, their
tracers included, so nothing but tracing tells what to run. Two traces that say the same share what is compiled, for
JAX's caches know programs by identity. What is lifted, and when it is traced at all, is in `shard_map`.
"""

# mypy: allow-untyped-calls
# jax leaves some of its public functions unannotated.

import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from types import FunctionType, MethodType
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from dualmesh_jax import private

KEPT = 16
"""How many programs one function keeps: a train and an eval step, over a few shapes and states."""
_BY_VALUE = (bool, int, str, bytes, type(None))


class Retraced:
    """The programs that one function became so far, by what they compute."""

    def __init__(self) -> None:
        self._programs: OrderedDict[Hashable, Callable[..., Any]] = OrderedDict()

    def program(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
        """Trace a function as it is now; return what computes it, from arguments of the same shapes. *Local.*

        Arrays that the trace met in globals, attributes and captured variables are arguments of the compiled program,
        so gradients and batches flow through them, and other values compile nothing anew.
        """
        # A function of its own each time: JAX keeps what it traced.
        closed, results = jax.make_jaxpr(lambda *args: fn(*args), return_shape=True)(*args)
        jaxpr, consts = private.opened(closed)
        compiled, structure = self._compiled(jaxpr), jax.tree.structure(results)
        return lambda *args: jax.tree.unflatten(structure, compiled(consts, jax.tree.leaves(args)))

    def _compiled(self, jaxpr: Jaxpr) -> Callable[..., Any]:
        key = _Keys().of(jaxpr)
        found = self._programs.pop(key, None)
        if found is None:
            found = jax.jit(lambda consts, leaves: jaxpr_as_fun(ClosedJaxpr(jaxpr, consts))(*leaves))
        self._programs[key] = found
        while len(self._programs) > KEPT:
            self._programs.popitem(last=False)
        return found


class _Object:
    """An object that is equal to nothing but itself; kept, so that no other takes its address."""

    __slots__ = ("_kept",)

    def __init__(self, kept: object) -> None:
        self._kept = kept

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and self._kept is other._kept

    def __hash__(self) -> int:
        return id(self._kept)


class _Keys:
    """Makes keys that are equal only where two programs compute the same, bit for bit; unlike where that is unclear."""

    def __init__(self) -> None:
        self._known: dict[int, Hashable] = {}  # programs inside, which a large one has many times
        self._open: set[int] = set()  # functions that capture themselves

    def of(self, value: Any) -> Hashable:
        """Return the key of a program, or of what is in it. *Pure.*"""
        if isinstance(value, _BY_VALUE):
            return type(value), value
        if isinstance(value, Jaxpr | ClosedJaxpr):
            if id(value) not in self._known:
                self._known[id(value)] = self._of_program(value)
            return self._known[id(value)]
        if isinstance(value, float | complex):
            return type(value), repr(value)  # 0.0 and -0.0 are equal, and nan is not
        if isinstance(value, np.ndarray | np.generic):  # a copy: the owner may fill it anew
            return str(value.dtype), value.shape, value.tobytes()
        if isinstance(value, tuple | list):
            return type(value), *map(self.of, value)
        if isinstance(value, dict):
            return type(value), *((self.of(name), self.of(held)) for name, held in value.items())
        return self._of_object(value)

    def _of_program(self, program: Jaxpr | ClosedJaxpr) -> Hashable:
        program, consts = private.opened(program)
        numbers: dict[Any, int] = {}

        def number(atom: Any) -> Hashable:
            if isinstance(atom, Literal):
                return self.of(atom.val), atom.aval
            return numbers.setdefault(atom, len(numbers)), atom.aval

        heads = tuple(map(number, (*program.constvars, *program.invars)))
        steps = tuple(
            (
                _Object(step.primitive),
                _Object(step.ctx),  # JAX has one object for equal ones: the mesh, and marks of states
                tuple(map(number, step.invars)),
                tuple(map(number, step.outvars)),
                self.of(step.params),
            )
            for step in program.eqns
        )
        ends = tuple(map(number, program.outvars))
        return len(program.constvars), heads, steps, ends, tuple(map(self.of, consts))

    def _of_object(self, value: Any) -> Hashable:
        if isinstance(value, MethodType):
            return MethodType, self.of(value.__func__), _Object(value.__self__)
        if type(value) is functools.partial:
            return functools.partial, self.of(value.func), self.of(value.args), self.of(value.keywords)
        if isinstance(value, FunctionType):
            return self._of_function(value)
        try:
            hash(value)
        except TypeError:
            return _Object(value)
        return type(value), value

    def _of_function(self, fn: FunctionType) -> Hashable:
        """Return the key of a callback or a gradient rule, made anew by each trace: its code, what it holds."""
        if id(fn) in self._open:
            return _Object(fn)
        self._open.add(id(fn))
        try:
            held = tuple(self._held(cell.cell_contents) for cell in fn.__closure__ or ())
        except ValueError:  # a variable that has no value yet
            return _Object(fn)
        finally:
            self._open.discard(id(fn))
        given = tuple(map(self._held, (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values())))
        return fn.__code__, _Object(fn.__globals__), held, given

    def _held(self, value: Any) -> Hashable:
        """Return the key of what a function holds: containers and arrays it sees as they are when it runs."""
        return _Object(value) if isinstance(value, list | dict | np.ndarray) else self.of(value)
