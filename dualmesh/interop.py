"""Arrays from one framework to the other, shard by shard, and gradients across the border.

What each framework does there is in the backends (`array_bridge`); starting both in the same processes is in `launch`.
Public as `dualmesh.interop`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from dualmesh._support.checks import check_flag, function_of
from dualmesh.backend import discovery
from dualmesh.backend.array_bridge import Border, Linear, Piece
from dualmesh.backend.state import ParallelState
from dualmesh.errors import ArrayTypeError
from dualmesh.runtime.scope import get_parallel_state, use_parallel_state
from dualmesh.sharding import tree

PASSED = (bool, int, float, complex, str)
"""What is no array and stays as it is."""


def to_jax(x: Any, state: ParallelState | None = None, *, copy: bool = True) -> Any:
    """Return JAX arrays for tensors and DTensors, one or nested containers of them. *Local.*

    A tensor becomes an array of this process alone, on its first device; a DTensor the global array that is split in
    the same way over the state in JAX (`state.on("jax")`), each process handing over its own block by DLPack.

    Args:
        x: Tensors, DTensors; numbers, strings, None and JAX arrays stay as they are.
        state: The state over which DTensors are split; None: the ambient one.
        copy: False: the JAX array shares the tensor's memory, so that writing to the tensor later changes it.

    Raises:
        ArrayTypeError: A tensor requires a gradient; 64-bit numbers while JAX keeps 32; `copy=False` and JAX would
            have to copy (gaps between elements, memory that is not aligned to 64 bytes).
        ShardingError: A DTensor on another mesh than the state's, or a partial one.
    """
    return handed_over("to_jax", x, "torch", "jax", state, copy=copy)


def to_torch(x: Any, state: ParallelState | None = None, *, copy: bool = True) -> Any:
    """Return tensors and DTensors for JAX arrays, one or nested containers of them: `to_jax` backwards. *Local.*

    Args:
        x: JAX arrays; numbers, strings, None and tensors stay as they are.
        state: The state over whose mesh arrays are split; None: the ambient one.
        copy: False: the tensor shares the array's memory. JAX takes its arrays for constant: do not write to it.

    Raises:
        ArrayTypeError: A traced array; a dtype that torch lacks.
        ShardingError: An array on another mesh than the state's, or one of several ranks of this process.
    """
    return handed_over("to_torch", x, "jax", "torch", state, copy=copy)


def call_jax(fn: Callable[..., Any], state: ParallelState | None = None) -> Callable[..., Any]:
    """Return a differentiable torch function that JAX computes, compiled, values and gradients (its VJP).

    *Collective over the state* when called, where it has several ranks. On DTensors `fn` is a function of global
    arrays; on tensors (inside `dm.shard_map`, or in code that runs as one rank) one of this rank's blocks, in which
    `dm.ops` are those of the state in JAX. Differentiable once.

    Args:
        fn: From JAX arrays to JAX arrays in nested containers; traced, so it sees shapes and not values. What needs a
            gradient is an argument.
        state: The state in either framework; None: the ambient one at the call.
    """
    return _calling("call_jax", fn, "torch", "jax", state)


def call_torch(fn: Callable[..., Any], state: ParallelState | None = None) -> Callable[..., Any]:
    """Return a differentiable JAX function that torch computes, values and gradients.

    Works under `jit`, `grad` and inside `dm.shard_map`, as a callback on this rank's blocks. The backward pass runs
    `fn` once more: nothing of torch's graph is kept between the two.

    Args:
        fn: From tensors to tensors in nested containers; a function of its arguments alone.
        state: The state in either framework; None: the ambient one at the call.
    """
    return _calling("call_torch", fn, "jax", "torch", state)


def handed_over(where: str, x: Any, source: str, target: str, state: ParallelState | None, *, copy: bool) -> Any:
    """Return arrays of one framework as those of another; see `to_jax`. *Local.*"""
    copy = check_flag(where, "copy", copy)
    giver, taker = discovery.load(source).border(), discovery.load(target).border()
    twins = functools.cache(functools.partial(_counterparts, _resolve_state(state), source, target))

    def one(leaf: Any) -> Any:
        if isinstance(leaf, PASSED) or taker.owns(leaf):
            return leaf
        if not giver.owns(leaf):
            raise ArrayTypeError(
                f"{where}: found a {type(leaf).__qualname__}. Give {source} arrays, in nested dicts, lists and tuples.",
                found=type(leaf),
            )
        return _cross(where, leaf, giver, taker, twins(), copy)

    return tree.mapped(one, x)


def _cross(where: str, x: Any, giver: Border, taker: Border, twins: "_Twins", copy: bool) -> Any:
    piece: Piece = giver.piece(where, x, twins[0], copy=copy)
    return taker.array(where, piece, twins[1], copy=copy)


_Twins = tuple[ParallelState | None, ParallelState | None]


def _resolve_state(state: ParallelState | None) -> ParallelState | None:
    """Return the state given, or the ambient one where some state is registered."""
    found = get_parallel_state() if state is None else state
    return found if isinstance(found, ParallelState) and found.backend != "none" else None


def _counterparts(state: ParallelState | None, source: str, target: str) -> _Twins:
    """Return the state in both frameworks; none where the other framework has no world here."""
    if state is None or any(discovery.load(name).world() is None for name in (source, target)):
        return None, None
    return state.on(source), state.on(target)


def _calling(where: str, fn: Any, outside: str, inside: str, state: ParallelState | None) -> Callable[..., Any]:
    function_of(where, fn)
    built: dict[ParallelState | None, Callable[..., Any]] = {}

    @functools.wraps(fn)
    def called(*args: Any) -> Any:
        meant = _resolve_state(state)
        if meant not in built:
            built[meant] = _build(where, fn, outside, inside, meant)
        return built[meant](*args)

    return called


def _within(fn: Callable[..., Any], state: ParallelState | None) -> Callable[..., Any]:
    """Return `fn` in the scope of the state that is meant, in the framework that computes it."""
    if state is None:
        return fn

    @functools.wraps(fn)
    def scoped(*args: Any) -> Any:
        with use_parallel_state(state):
            return fn(*args)

    return scoped


def _build(where: str, fn: Any, outside: str, inside: str, state: ParallelState | None) -> Callable[..., Any]:
    outer, inner = discovery.load(outside).border(), discovery.load(inside).border()
    twins = _counterparts(state, outside, inside)
    linearized = inner.linearized(_within(fn, twins[1]), twins[1])

    def entering(x: Any) -> Any:
        return None if x is None else _cross(where, x, outer, inner, twins, True)

    def leaving(x: Any) -> Any:
        return None if x is None else _cross(where, x, inner, outer, (twins[1], twins[0]), True)

    def call(arrays: Sequence[Any]) -> Linear:
        linear = linearized([entering(x) for x in arrays])

        def pullback(cotangents: Sequence[Any]) -> list[Any]:
            return [leaving(g) for g in linear.pullback([entering(g) for g in cotangents])]

        return Linear([leaving(y) for y in linear.results], linear.rebuild, pullback)

    return outer.function(where, call)
