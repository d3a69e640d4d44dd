"""Functions of global arrays: `shard_map`, `value_and_grad`, `remat`.

Their per-rank collectives are in `ops`; what each framework makes of them is in the backends (`Programs`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from dualmesh._support.checks import check_flag, check_items, check_strings, function_of
from dualmesh.backend.state import ParallelState
from dualmesh.errors import ArgumentError
from dualmesh.runtime.scope import get_parallel_state, resolve_state, scope_of, use_parallel_state
from dualmesh.topology.resolve import positive, whole


class ShardMapped:
    """What `shard_map` returns: a callable that keeps one built program per state."""

    def __init__(self, fn: Callable[..., Any], state: ParallelState | None, *settings: Any) -> None:
        functools.update_wrapper(self, fn)
        # Else it would see blocks of one state and communicate over the axes of another.
        self._fn = fn if state is None else use_parallel_state(state)(fn)
        self._state = state
        self._settings = settings
        self._built: WeakKeyDictionary[ParallelState, Callable[..., Any]] = WeakKeyDictionary()

    def __call__(self, *args: Any) -> Any:
        state = resolve_state("shard_map", self._state)
        state.require_ready("shard_map")
        program = self._built.get(state)
        if program is None:
            program = self._built[state] = state.programs.shard_map(self._fn, *self._settings)
        return program(*args)


def shard_map(
    fn: Callable[..., Any],
    in_specs: Any,
    out_specs: Any,
    state: ParallelState | None = None,
    axes: Sequence[str] | None = None,
    check_replicated: bool = False,
) -> ShardMapped:
    """Lift a function of per-rank blocks to global arrays; value and gradient are those of the global function.

    *Collective over the state when called.* Everything that needs a gradient must be an argument. Warns of an argument
    that is split over an axis which its spec leaves out, where that can be seen (on JAX: in the first call, outside
    `jit`).

    Args:
        fn: Called with one block per argument, in the scope of the state.
        in_specs: One spec per argument: a `dm.P`, or nested containers of them (a prefix of the argument).
        out_specs: The same for the result; `dm.P(partial=axis)` sums a result over an axis.
        state: The state; None: the ambient one at the call.
        axes: Split over these axes only, and leave the others to the framework (JAX partial-manual).
        check_replicated: Verify that results declared replicated are.

    >>> import dualmesh as dm, numpy as np
    >>> with dm.session(backend="sim", world_size=4):
    ...     base = dm.init_parallel_state(dp_size=4)
    ...     total = dm.shard_map(lambda x: dm.ops.all_reduce(x, "dp"), dm.P("dp"), dm.P())
    ...     dm.to_numpy(total(dm.distribute(np.arange(8.0), dm.P("dp")))).tolist()
    [12.0, 16.0]
    """
    where = "shard_map"
    function_of(where, fn)
    over = None if axes is None else check_strings(where, "axes", axes)
    return ShardMapped(fn, state, in_specs, out_specs, over, check_flag(where, "check_replicated", check_replicated))


def value_and_grad(
    fn: Callable[..., Any], argnums: int | Sequence[int] = 0, *, state: ParallelState | None = None
) -> Callable[..., tuple[Any, Any]]:
    """Return a function that gives (value, gradient) of a global scalar. *Collective over the state when called.*

    Args:
        fn: Global arrays in, a global scalar out, for example what `shard_map` returns with out_specs `dm.P()`.
        argnums: Which arguments to differentiate; an int gives one gradient, a sequence a tuple of them. Arguments
            may be nested containers; gradients have their structure, shapes and shardings.
        state: The state, in whose scope `fn` runs; None: the ambient one at the call.
    """
    where = "value_and_grad"
    function_of(where, fn)
    one = whole(argnums)
    listed_numbers = (argnums,) if one is not None else check_items(where, "argnums", argnums)
    numbers = tuple(positive(where, "argnums", number, least=0) for number in listed_numbers)
    if not numbers:
        raise ArgumentError(f"{where}: argnums={argnums!r}. Give an argument's position or several, from 0.")

    @functools.wraps(fn)
    def wrapper(*args: Any) -> tuple[Any, Any]:
        owner = resolve_state("value_and_grad", state)
        owner.require_ready("value_and_grad")
        with scope_of(state):
            value, gradients = owner.programs.value_and_grad(fn, numbers)(*args)
        return value, gradients if one is None else gradients[0]

    return wrapper


def remat(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` with its activations recomputed in backward, under the scope that its forward had. *Local.*"""
    function_of("remat", fn)

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return get_parallel_state().programs.remat(fn)(*args, **kwargs)

    return wrapper
