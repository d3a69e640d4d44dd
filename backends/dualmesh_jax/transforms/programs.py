"""Functions of global arrays: gradients, recomputation, norms.

Per-rank functions are lifted in `shard_map`; their collectives are in `collectives`, layouts of arrays in `arrays`.
"""

# mypy: allow-untyped-calls
# jax leaves some of its public functions unannotated.

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from dualmesh.backend.transforms import Programs
from dualmesh.errors import ShapeError
from dualmesh.topology.averaging import AveragingPlan
from dualmesh.topology.topology import Axis
from dualmesh_jax import federated, private
from dualmesh_jax.arrays.arrays import is_tracing, refuse_keys
from dualmesh_jax.transforms.shard_map import Lifted
from dualmesh_jax.watch import run_named, run_together

if TYPE_CHECKING:
    from dualmesh_jax.state import JaxState


class JaxPrograms(Programs):
    """Functions over the devices of one state."""

    def __init__(self, state: "JaxState") -> None:
        self._state = state

    def shard_map(
        self,
        fn: Callable[..., Any],
        in_specs: Any,
        out_specs: Any,
        axes: tuple[str, ...] | None,
        check_replicated: bool,
    ) -> Callable[..., Any]:
        return Lifted(self._state, fn, in_specs, out_specs, axes, check_replicated)

    def value_and_grad(self, fn: Callable[..., Any], argnums: tuple[int, ...]) -> Callable[..., tuple[Any, Any]]:
        @functools.wraps(fn)
        def scalar(*args: Any) -> Any:
            value = fn(*args)
            if np.shape(value) != ():
                raise ShapeError(
                    f"value_and_grad: the function returned shape {np.shape(value)}. It must return one global scalar, "
                    f"shape ().",
                    shape=np.shape(value),
                )
            return value

        differentiated = jax.value_and_grad(scalar, argnums)

        def program(*args: Any) -> tuple[Any, Any]:
            # Run eagerly, the backward pass is a program of JAX's own, which waits for the other processes.
            value, gradients = run_named(self._state, "value_and_grad", differentiated, args)
            inputs = tuple(args[number] for number in argnums)
            return value, jax.tree.map(_laid_out_like, gradients, inputs)

        return program

    def remat(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def program(*args: Any, **kwargs: Any) -> Any:
            leaves, structure = jax.tree.flatten((args, kwargs))
            varying = [place for place, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]

            def restored(*arrays: Any) -> Any:
                filled = list(leaves)
                for place, array in zip(varying, arrays, strict=True):
                    filled[place] = array
                own_args, own_kwargs = jax.tree.unflatten(structure, filled)
                return fn(*own_args, **own_kwargs)

            return jax.checkpoint(restored)(*(leaves[place] for place in varying))

        return program

    def sum_gradients(self, model: Any, **_: Any) -> None:
        """Nothing to do: JAX has no wrappers that reduce gradients."""

    def sync_gradients(self, params: Any, axis: Axis) -> Any:
        collectives = self._state.collectives

        def summed(gradient: Any) -> Any:
            collectives.admit("sync_gradients", gradient, axis)
            return collectives.all_reduce(gradient, axis, op="sum")

        return jax.tree.map(summed, params)

    def global_norm(self, tree: Any, order: float, axis: Axis | None) -> Any:
        arrays = [jnp.asarray(x) for x in jax.tree.leaves(tree)]
        for x in arrays:
            refuse_keys("global_norm", x)
        if not arrays:
            return jnp.zeros(())
        if axis is None:
            if is_tracing():
                return _norm(arrays, order=order)
            return run_together(self._state, "global_norm", lambda *xs: _whole_norm(xs, order), arrays)
        collectives, op = self._state.collectives, "max" if order == float("inf") else "sum"
        collectives.admit("global_norm", arrays[0], axis)
        return _norm(arrays, order=order, over=lambda x: collectives.all_reduce(x, axis, op=op))

    def federated_mean(self, tree: Any, plan: AveragingPlan) -> Any:
        state = self._state
        if not state.is_manual("world"):
            return federated.mean_of_trees(tree, plan, federated.Federations(state.mesh, self._gathered))
        for x in jax.tree.leaves(tree):
            federated.check_dtype(x)
        names = state.axes("world")
        return jax.tree.map(lambda x: federated.mean_of_block(x, plan, names), tree)

    def _gathered(self, said: str) -> list[str]:
        return self._state.host.all_gather(said, "world")


def _norm(arrays: Sequence[Any], *, order: float, over: Callable[[Any], Any] = lambda x: x) -> Any:
    """Return the norm of all elements; `over` sums powers, or takes the largest, over what other ranks hold.

    Every promotion is written out, since JAX may be set to make none.
    """
    sizes = [jnp.abs(x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)) for x in arrays]
    sizes = [x.astype(jnp.float32) if x.dtype.itemsize < 4 else x for x in sizes]
    wide = max((x.dtype for x in sizes), key=lambda kind: kind.itemsize)
    if order == float("inf"):
        return over(jnp.max(jnp.stack([jnp.max(x, initial=0).astype(wide) for x in sizes])))
    return over(sum(jnp.sum(x**order).astype(wide) for x in sizes)) ** (1 / order)


@functools.partial(jax.jit, static_argnums=1)
def _whole_norm(arrays: Sequence[Any], order: float) -> Any:
    return _norm(arrays, order=order)


def _laid_out_like(gradient: Any, x: Any) -> Any:
    """Return a gradient in the sharding of its input, where both are concrete."""
    if isinstance(gradient, jax.core.Tracer) or not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
        return gradient
    if not x.committed or gradient.sharding.is_equivalent_to(x.sharding, x.ndim):
        return gradient
    return private.device_put(gradient, x.sharding)
