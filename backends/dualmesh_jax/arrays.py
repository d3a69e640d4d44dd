"""Global arrays on a state's mesh: lay one out, read it back, build it from blocks, constrain it.

What a spec is in JAX's names is in `state`, functions of arrays in `programs`.
"""

# mypy: allow-untyped-calls
# jax leaves some of its public functions unannotated.

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, get_abstract_mesh, get_mesh

from dualmesh.errors import ArgumentError, ArrayTypeError
from dualmesh.partition_spec import P, dim_layouts
from dualmesh.verbs import Arrays

if TYPE_CHECKING:
    from dualmesh_jax.state import JaxState

INSIDE = (
    "{where}: called inside shard_map, where arrays are this rank's blocks. Call it on global arrays, outside the "
    "function given to shard_map."
)


class JaxArrays(Arrays):
    """Global `jax.Array`s over the devices of one state."""

    def __init__(self, state: "JaxState") -> None:
        self._state = state

    def distribute(self, array: Any, spec: P) -> Any:
        host = array if isinstance(array, jax.Array) else np.asarray(array)
        sharding = self.fitted("distribute", host, spec)
        if sharding.is_fully_addressable:
            return jax.device_put(host, sharding)
        return jax.make_array_from_callback(host.shape, sharding, host.__getitem__)

    def to_numpy(self, x: Any) -> Any:
        if not isinstance(x, jax.Array | np.ndarray | np.generic):
            raise ArrayTypeError(
                f"to_numpy: found a {type(x).__qualname__}. Give what dm.distribute or shard_map return."
            )
        if isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated:
            whole = NamedSharding(self._state.mesh, PartitionSpec())
            x = jax.jit(_unchanged, out_shardings=whole)(x)
        return np.array(x.addressable_data(0) if isinstance(x, jax.Array) and not x.is_fully_addressable else x)

    def shard_local(self, block: Any, spec: P) -> Any:
        host = np.asarray(block)
        sharding = self._state.sharding(spec)
        if sharding.is_fully_addressable:
            return jax.device_put(host, self.fitted("shard_local", host, spec))
        return jax.make_array_from_process_local_data(sharding, host)

    def constrain(self, x: Any, spec: P) -> Any:
        if get_abstract_mesh().manual_axes:
            raise ArgumentError(INSIDE.format(where="constrain"))
        sharding = self.fitted("constrain", x, spec)
        return lax.with_sharding_constraint(x, sharding) if _is_tracing() else jax.device_put(x, sharding)

    def fitted(self, where: str, x: Any, spec: P) -> NamedSharding:
        """Return the sharding of a spec after checking that it fits an array. *Local.*

        Raises:
            ShapeError: A dim that its axes do not divide.
        """
        dim_layouts(self._state.topology, spec, np.shape(x), what=f"{where}: array")
        return NamedSharding(self._state.mesh, self._state.native_spec(where, spec))


def is_staging() -> bool:
    """Tell whether operations are recorded (jit, scan) rather than run; an eager gradient runs them. *Local.*"""
    return _is_tracing() and isinstance(lax.full((), 0), jax.core.Tracer)


def _is_tracing() -> bool:
    try:
        get_mesh()
    except ValueError:  # JAX's answer inside tracing
        return True
    return False


def _unchanged(x: Any) -> Any:
    return x
