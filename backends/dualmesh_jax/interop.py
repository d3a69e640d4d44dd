"""JAX arrays at the border to another framework, and JAX functions that another framework computes.

What may pass is in `dualmesh.interop`.
"""

# mypy: allow-untyped-calls
# jax leaves some of its public functions unannotated.

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import dlpack
from jax.sharding import NamedSharding, SingleDeviceSharding, get_abstract_mesh

from dualmesh.arrays.transforms import shard_map
from dualmesh.backend.array_bridge import Border, Linear, Piece, require_state
from dualmesh.backend.state import ParallelState
from dualmesh.errors import ArrayTypeError, OutsideShardMapError, ShardingError
from dualmesh.sharding.partition_spec import P

TRACED = (
    "{where}: found a traced array of shape {shape}, which has no values yet. Compute with another framework inside a "
    "JAX program by dm.interop.call_torch(fn)."
)
GLOBAL = (
    "{where}: called on global arrays, of which this process holds a part. Call it inside dm.shard_map, where each "
    "process computes on its own blocks."
)
NARROWED = (
    "{where}: JAX would keep {dtype} as {kept} while x64 is off. Convert the array first, or set "
    "jax.config.update('jax_enable_x64', True) before JAX is first used."
)


class JaxBorder(Border):
    """JAX's side of `dm.interop`."""

    def owns(self, x: Any) -> bool:
        return isinstance(x, jax.Array)

    def piece(self, where: str, x: Any, state: ParallelState | None, *, copy: bool) -> Piece:
        if isinstance(x, jax.core.Tracer):
            raise ArrayTypeError(TRACED.format(where=where, shape=x.shape), found=x.aval)
        spec = None
        if not isinstance(x.sharding, SingleDeviceSharding):
            known: Any = require_state(where, state, f"an array of shape {x.shape}")
            spec = known.spec_of(x)
            if len(x.addressable_shards) != 1:
                raise ShardingError(
                    f"{where}: this process holds {len(x.addressable_shards)} ranks of the array of shape {x.shape}, "
                    f"and the other framework one. Start both together: dm.init_distributed(backend=('torch', 'jax')).",
                    found=x.sharding,
                )
        block = x if spec is None else x.addressable_data(0)
        # DLPack tells a CPU consumer nothing about work that is still under way.
        block.block_until_ready()
        return Piece(block, x.shape, x.dtype.name, spec)

    def array(self, where: str, piece: Piece, state: ParallelState | None, *, copy: bool) -> Any:
        dtype = jnp.dtype(piece.dtype)
        kept = jax.dtypes.canonicalize_dtype(dtype)
        if kept != dtype:
            raise ArrayTypeError(NARROWED.format(where=where, dtype=dtype, kept=kept), found=dtype)
        wants_copy = copy and not piece.is_fresh
        try:
            block = dlpack.from_dlpack(piece.block, copy=None if copy else False)
        except (ValueError, RuntimeError, TypeError, BufferError) as error:
            raise ArrayTypeError(
                f"{where}: JAX cannot take the {dtype} block of shape {tuple(piece.block.shape)}"
                f"{'' if copy else ' without a copy'}: {error} Give copy=True, or a contiguous array.",
                found=dtype,
            ) from error
        if wants_copy:
            # from_dlpack(copy=True) shares memory all the same; the owner may write to it as soon as this returns.
            block = jnp.copy(block).block_until_ready()
        if piece.spec is None:
            return block
        sharding = require_state(where, state, f"an array of shape {piece.shape}").sharding(piece.spec)
        return jax.make_array_from_single_device_arrays(piece.shape, sharding, [block])

    def linearized(self, fn: Callable[..., Any], state: ParallelState | None) -> Callable[[Sequence[Any]], Linear]:
        forward = jax.jit(lambda *arrays: _with_pullback(fn, arrays))
        lifted = jax.jit(lambda *arrays: _with_pullback(_as_one_rank(fn, state), arrays))
        backward = jax.jit(lambda pull, cotangents: pull(cotangents))

        def call(arrays: Sequence[jax.Array]) -> Linear:
            blocks = state is not None and state.world_size > 1 and not any(_is_global(x) for x in arrays)
            given = [_stack(x, state) for x in arrays] if blocks and state is not None else list(arrays)
            returned, pull = (lifted if blocks else forward)(*given)
            outputs, containers = jax.tree.flatten(returned)

            def pullback(cotangents: Sequence[Any]) -> list[Any]:
                full = [_cotangent(y, g, state if blocks else None) for y, g in zip(outputs, cotangents, strict=True)]
                found = backward(pull, jax.tree.unflatten(containers, full))
                return [None if g.dtype == jax.dtypes.float0 else _own(g) if blocks else g for g in found]

            results = [_own(y) if blocks else y for y in outputs]
            return Linear(results, lambda values: jax.tree.unflatten(containers, list(values)), pullback)

        return call

    def function(self, where: str, call: Callable[[Sequence[Any]], Linear]) -> Callable[..., Any]:
        def results_of(arrays: Sequence[Any]) -> Any:
            shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
            if shapes not in probed:
                probed[shapes] = _probe_shapes(call, shapes)
            return probed[shapes]

        def run(*arrays: Any) -> Any:
            if jax.process_count() > 1 and not get_abstract_mesh().manual_axes:
                raise OutsideShardMapError(GLOBAL.format(where=where))
            results, rebuild = results_of(arrays)
            return rebuild(_callback(lambda blocks: call(blocks).results, results, arrays))

        def forward(*arrays: Any) -> Any:
            return run(*arrays), arrays

        def backward(arrays: Any, cotangents: Any) -> Any:
            given = jax.tree.leaves(cotangents)
            wanted = [jax.ShapeDtypeStruct(x.shape, x.dtype) if _is_differentiable(x) else None for x in arrays]

            def pulled(blocks: Any, coming: Any) -> Any:
                found = call(blocks).pullback([g if _is_differentiable(g) else None for g in coming])
                return [g for g, want in zip(found, wanted, strict=True) if want is not None]

            found = iter(_callback(pulled, [want for want in wanted if want is not None], arrays, given))
            return tuple(None if want is None else next(found) for want in wanted)

        probed: dict[tuple[jax.ShapeDtypeStruct, ...], Any] = {}
        differentiable = jax.custom_vjp(run)
        differentiable.defvjp(forward, backward)
        return differentiable


def _callback(fn: Callable[..., Any], results: Sequence[jax.ShapeDtypeStruct], *args: Any) -> Any:
    return jax.pure_callback(fn, list(results), *args, vmap_method="sequential")


def _probe_shapes(call: Callable[[Sequence[Any]], Linear], shapes: Sequence[jax.ShapeDtypeStruct]) -> Any:
    """Return what a function returns for zeros of some shapes: the only way to know its shapes before it runs.

    In a thread of its own, where no trace and no mesh is under way.
    """
    with ThreadPoolExecutor(1) as elsewhere:
        linear = elsewhere.submit(lambda: call([jnp.zeros(s.shape, s.dtype) for s in shapes])).result()
    return [jax.ShapeDtypeStruct(y.shape, y.dtype) for y in linear.results], linear.rebuild


def _with_pullback(fn: Callable[..., Any], arrays: Sequence[Any]) -> Any:
    return jax.vjp(fn, *arrays)


def _as_one_rank(fn: Callable[..., Any], state: ParallelState | None) -> Callable[..., Any]:
    """Return `fn` as each rank of a state runs it, on blocks stacked along a first dim, one a rank."""

    def one(*blocks: Any) -> Any:
        return jax.tree.map(lambda y: y[None], fn(*(block[0] for block in blocks)))

    def all_ranks(*stacks: Any) -> Any:
        return shard_map(one, tuple(P("world") for _ in stacks), P("world"), state)(*stacks)

    return all_ranks


def _is_global(x: jax.Array) -> bool:
    return isinstance(x.sharding, NamedSharding)


def _stack(x: jax.Array, state: ParallelState) -> jax.Array:
    """Return this rank's block as its part of a global array: rank i's block is row i. *Local.*"""
    shape, sharding = (state.world_size, *x.shape), state.sharding(P("world"))
    return jax.make_array_from_single_device_arrays(shape, sharding, [x[None]])


def _own(x: jax.Array) -> jax.Array:
    return x.addressable_data(0)[0]


def _cotangent(y: jax.Array, given: Any, state: ParallelState | None) -> Any:
    if not _is_differentiable(y):
        return np.zeros(y.shape, jax.dtypes.float0)
    if given is None:
        return jnp.zeros_like(y)
    return given if state is None else _stack(given, state)


def _is_differentiable(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))
