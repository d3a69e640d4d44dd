"""Whole models in JAX: any registered tree, flax NNX and equinox modules included.

What one array's sharding is, is in `state`; plans are in `dualmesh.arrays.plan`.
"""

# mypy: allow-untyped-calls
# jax leaves some of its public functions unannotated.

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from dualmesh.backend.models import Models
from dualmesh.backend.plain_models import refuse_units
from dualmesh.errors import ShardingError
from dualmesh.sharding.partition_spec import P
from dualmesh_jax.arrays.arrays import unshare

if TYPE_CHECKING:
    from dualmesh_jax.state import JaxState

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


class JaxModels(Models):
    """Trees over the devices of one state. Leaves that are no arrays (functions, numbers, names) stay as they are."""

    def __init__(self, state: "JaxState") -> None:
        self._state = state

    def parameters(self, model: Any) -> list[tuple[str, Any]]:
        boxed = tree_flatten_with_path(model, is_leaf=_is_box)[0]
        named = [(keystr(path, simple=True, separator="."), jax.tree.leaves(box)) for path, box in boxed]
        return [(path, leaf) for path, leaves in named for leaf in leaves if isinstance(leaf, _ARRAYS)]

    def filled(self, model: Any, values: Sequence[Any]) -> Any:
        remaining = iter(values)
        return jax.tree.map(lambda leaf: next(remaining) if isinstance(leaf, _ARRAYS) else leaf, model)

    def abstract(self, model: Any, specs: Sequence[P]) -> Any:
        pairs = zip(self.parameters(model), map(self._state.sharding, specs), strict=True)
        return self.filled(model, [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for (_, x), s in pairs])

    def apply(self, model: Any, specs: Sequence[P], units: Mapping[str, tuple[str, ...] | None]) -> Any:
        refuse_units("apply", units)
        pairs = zip(self.parameters(model), specs, strict=True)
        return self.filled(model, [self._state.arrays.distribute(x, spec) for (_, x), spec in pairs])

    def init(self, fn: Callable[..., Any], specs_of: Callable[[Any], Sequence[P]], args: Sequence[Any]) -> Any:
        made: list[Any] = []

        def arrays(*args: Any) -> list[Any]:
            model = fn(*args)
            leaves, structure = jax.tree.flatten(model)
            # The rest of the model is no value of JAX; it is the same whenever fn is called.
            made[:] = [structure, [None if isinstance(leaf, _ARRAYS) else leaf for leaf in leaves]]
            return [leaf for leaf in leaves if isinstance(leaf, _ARRAYS)]

        shapes = jax.eval_shape(arrays, *args)
        structure, others = made
        sketch = _join(structure, others, shapes)
        shardings = [self._state.sharding(spec) for spec in specs_of(sketch)]
        if len(shardings) != len(shapes):
            raise ShardingError(f"init_sharded: {len(shapes)} arrays, {len(shardings)} specs.", found=len(shardings))
        given = jax.tree.leaves(args)
        found = [unshare(x, given) for x in jax.jit(arrays, out_shardings=shardings)(*args)]
        return _join(structure, others, found)


def _join(structure: Any, others: Sequence[Any], arrays: Sequence[Any]) -> Any:
    remaining = iter(arrays)
    leaves = [next(remaining) if other is None else other for other in others]
    return jax.tree.unflatten(structure, leaves)


def _is_box(node: Any) -> bool:
    """Tell whether a node is a flax NNX variable, whose own key, "value", is no part of a parameter's path."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.Variable)
