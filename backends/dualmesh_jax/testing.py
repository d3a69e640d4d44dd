"""What tests look into in JAX: shards of arrays, blocks and their cotangents as they pass, contexts left behind.

The kit that uses it is `dualmesh.testing`.
"""

# mypy: allow-untyped-calls
# jax leaves some of its public functions unannotated.

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import get_abstract_mesh

from dualmesh.backend.state import ParallelState
from dualmesh.errors import ShardingError
from dualmesh.testing import instruments
from dualmesh_jax.cache_keys import user_context
from dualmesh_jax.devices import ordered_devices

# Beside the ambient state's (`cache_keys`): what is recorded or broken on purpose is part of every jit cache key too.
_watch: Any = jax.make_user_context(default_value=None)


class Instruments(instruments.Instruments):
    """Addressable shards, debug callbacks and user contexts."""

    def held(self, state: ParallelState, x: Any) -> list[instruments.Held]:
        if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
            raise ShardingError(f"found a {type(x).__qualname__}. Give a jax.Array, outside jit.", found=type(x))
        ranks = {device: rank for rank, device in enumerate(ordered_devices())}
        return [
            instruments.Held(
                ranks[shard.device],
                tuple(tuple(range(*cut.indices(size))) for cut, size in zip(shard.index, x.shape, strict=True)),
                np.asarray(shard.data),
            )
            for shard in sorted(x.addressable_shards, key=lambda shard: ranks[shard.device])
        ]

    def watched(
        self,
        state: ParallelState,
        x: Any,
        value: Callable[[int, Any], None],
        gradient: Callable[[], Callable[[int, Any], None]] | None,
    ) -> Any:
        members = state.members
        place = jnp.asarray(state.index("world"))

        def passed(seen: Callable[[int, Any], None], place: Any, block: Any) -> None:
            jax.debug.callback(lambda place, block: seen(members[int(place)], np.asarray(block)), place, block)

        if gradient is None or not jnp.issubdtype(x.dtype, jnp.inexact):
            passed(value, place, x)
            return x
        ready = gradient

        def forward(x: Any, place: Any) -> tuple[Any, Any]:
            passed(value, place, x)
            return x, place

        def backward(place: Any, cotangent: Any) -> tuple[Any, Any]:
            passed(ready(), place, cotangent)
            return cotangent, np.zeros((), jax.dtypes.float0)

        passing = jax.custom_vjp(lambda x, place: forward(x, place)[0])
        passing.defvjp(forward, backward)
        return passing(x, place)

    def finished(self) -> None:
        jax.effects_barrier()

    @contextmanager
    def retraced(self, key: tuple[Any, ...]) -> Iterator[None]:
        with _watch((*(_watch.value or ()), *key)):
            yield

    def compiled(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(fn)

    def leftovers(self) -> dict[str, object]:
        return {
            "JAX mesh": get_abstract_mesh().shape_tuple,
            "JAX ambient state": user_context().value,
            "JAX watch": _watch.value,
        }

    def untouched(self) -> dict[str, object]:
        return {"JAX mesh": (), "JAX ambient state": None, "JAX watch": None}
