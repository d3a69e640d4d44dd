"""The collectives on `jax.lax`, per rank inside `shard_map`.

What `shard_map` is, is in `programs`; what of the mesh an axis is, in `line`.
"""

# mypy: allow-untyped-calls
# jax leaves some of its public functions unannotated.

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import get_abstract_mesh

from dualmesh.backend.collectives import Collectives, Kind
from dualmesh.backend.transpose_rules import call, transpose
from dualmesh.errors import ArrayTypeError, OutsideShardMapError
from dualmesh.topology.topology import Axis
from dualmesh_jax.arrays.arrays import is_tracing
from dualmesh_jax.collectives.line import Line
from dualmesh_jax.collectives.ragged import exchange_rows
from dualmesh_jax.mesh.ambient_mesh import describe_mesh, note_traced

if TYPE_CHECKING:
    from dualmesh_jax.state import JaxState

_KINDS: tuple[tuple[Any, Kind], ...] = (
    (np.bool_, "bool"),
    (jnp.integer, "integer"),
    (jnp.floating, "float"),
    (jnp.complexfloating, "complex"),
)
_PLAIN = (bool, int, float, complex, np.number, np.bool_)
_METRICS: Mapping[str, Callable[[Any], Any]] = {
    "sum": sum,
    "mean": lambda values: sum(values) / len(values),
    "max": max,
    "min": min,
}
OUTSIDE = (
    "{where}: axis {axis!r} of {label} is not split here{elsewhere}. In JAX a collective runs per rank, inside a "
    "function that is given to dm.shard_map{cure}."
)


class JaxCollectives(Collectives):
    """The collectives of `transpose_rules`, `reduce` and `place_block` included; JAX differentiates them."""

    def __init__(self, state: "JaxState") -> None:
        self._state = state
        self._line = state.line

    def admit(self, where: str, x: Any, axis: Axis) -> Kind:
        if self._is_metric(x):
            return kind_of(where, np.result_type(x))
        if not isinstance(x, jax.Array | np.ndarray | np.generic):
            raise ArrayTypeError(
                f"{where}: found a {type(x).__module__}.{type(x).__qualname__}. Blocks of the jax backend are JAX or "
                f"numpy arrays.",
                found=type(x),
            )
        self._require_inside(where, axis)
        note_traced(self._state)  # a state given by hand is in no scope
        return kind_of(where, x.dtype)

    def all_reduce(self, x: Any, axis: Axis, *, op: str) -> Any:
        if self._is_metric(x):
            return _METRICS[op](self._state.host.all_gather(x, axis))
        line = self._line(axis)
        if op in ("max", "min"):
            return _extreme(x, line, axis, op)
        return line.sum(x) if op == "sum" else line.mean(x)

    def all_gather(self, x: Any, axis: Axis, *, dim: int) -> Any:
        if x.size == 0:
            return _empty(x, {dim: self._state.size(axis)}, {})
        return self._line(axis).gather(x, dim)

    def reduce_scatter(self, x: Any, axis: Axis, *, dim: int, op: str) -> Any:
        if x.size == 0:
            return _empty(x, {}, {dim: self._state.size(axis)})
        block = self._line(axis).scatter_sum(x, dim)
        return block / self._state.size(axis) if op == "mean" else block

    def all_to_all(self, x: Any, axis: Axis, *, split_dim: int, concat_dim: int) -> Any:
        if x.size == 0:
            size = self._state.size(axis)
            return _empty(x, {concat_dim: size}, {split_dim: size})
        line = self._line(axis)
        return lax.all_to_all(x, line.names, split_dim, concat_dim, axis_index_groups=line.groups, tiled=True)

    def broadcast(self, x: Any, axis: Axis, *, src: int) -> Any:
        if self._is_metric(x):
            return self._state.host.broadcast(x, axis, src=src)
        return _broadcast(x, self._line(axis), src)

    def permute(self, x: Any, axis: Axis, *, pairs: tuple[tuple[int, int], ...]) -> Any:
        line = self._line(axis)
        names, pairs = line.names, line.pairs(pairs)
        if not names:
            return jnp.zeros_like(x)
        # lax.ppermute counts a tuple of axes in the order of the mesh, whatever the order of the tuple.
        sizes = dict(self._state.shared.mesh.shape)
        ordered = tuple(name for name in sizes if name in names)
        if ordered != names:
            places = _places([sizes[name] for name in names], [names.index(name) for name in ordered])
            pairs = tuple((places[src], places[dst]) for src, dst in pairs)
        return lax.ppermute(x, ordered, pairs)

    def ragged_all_to_all(
        self, x: Any, axis: Axis, *, send_counts: Any, recv_counts: Any, rows: int, sent_rows: int
    ) -> Any:
        send, received = jnp.asarray(send_counts), jnp.asarray(recv_counts)
        for name, counts in (("send_counts", send), ("recv_counts", received)):
            if not jnp.issubdtype(counts.dtype, jnp.integer):
                raise ArrayTypeError(
                    f"ops.ragged_all_to_all: {name} are {counts.dtype}. Counts are integers: convert them first."
                )
        return exchange_rows(x, self._line(axis), send, received, rows)

    def enter(self, x: Any, axis: Axis) -> Any:
        return _enter(x, self._line(axis))

    def leave(self, x: Any, axis: Axis) -> Any:
        return _leave(x, self._line(axis))

    def take_block(self, x: Any, axis: Axis, *, dim: int) -> Any:
        size = self._state.size(axis)
        if size == 1:
            return x
        width = x.shape[dim] // size
        return lax.dynamic_slice_in_dim(x, self.axis_index(axis) * width, width, dim)

    def axis_index(self, axis: Axis) -> Any:
        if self._state.group_sizes(axis) == (1,):
            return 0
        self._require_inside("ops.axis_index", axis)
        return self._line(axis).index()

    def stop_gradient(self, x: Any) -> Any:
        return lax.stop_gradient(x)

    def known_number(self, x: Any) -> float | None:
        return None if isinstance(x, jax.core.Tracer) else float(jax.device_get(x))

    def reduce(self, x: Any, axis: Axis, *, src: int) -> Any:
        """Sum the blocks to index `src`; zeros elsewhere. The transpose of `broadcast`."""
        total = self._line(axis).sum(x)
        return jnp.where(self.axis_index(axis) == src, total, jnp.zeros_like(total))

    def place_block(self, x: Any, axis: Axis, *, dim: int) -> Any:
        """Put the block at block `index` of `dim`, zeros around it. The transpose of `take_block`."""
        size, width = self._state.size(axis), x.shape[dim]
        whole = jnp.zeros((*x.shape[:dim], size * width, *x.shape[dim + 1 :]), x.dtype)
        return lax.dynamic_update_slice_in_dim(whole, x, self.axis_index(axis) * width, dim)

    def _is_metric(self, x: Any) -> bool:
        """Tell whether `x` is a plain number outside tracing, which processes exchange as an object."""
        return isinstance(x, _PLAIN) and not is_tracing()

    def _require_inside(self, where: str, axis: Axis) -> None:
        if not self._state.is_manual(axis):
            mesh, around = self._state.mesh, get_abstract_mesh()
            elsewhere = cure = ""
            if around.manual_axes and around.shape_tuple != mesh.shape_tuple:
                elsewhere = f", on {describe_mesh(mesh)}: this code runs per rank of {describe_mesh(around)}"
                cure = f" in the scope of {self._state.label}"
            message = OUTSIDE.format(where=where, axis=axis, label=self._state.label, elsewhere=elsewhere, cure=cure)
            raise OutsideShardMapError(message, where=where, axis=axis)


def _places(sizes: Sequence[int], order: Sequence[int]) -> list[int]:
    """Return, for each index of axes of these sizes, first = slowest, the index with the axes in another order."""
    indices = np.arange(prod(sizes)).reshape(sizes).transpose(order)
    return [int(place) for place in np.argsort(indices.reshape(-1))]


def _empty(x: Any, grown: Mapping[int, int], cut: Mapping[int, int]) -> Any:
    """Return an array without elements, some dims of `x` grown or cut by a factor; XLA refuses to gather nothing."""
    return jnp.zeros([size * grown.get(dim, 1) // cut.get(dim, 1) for dim, size in enumerate(x.shape)], x.dtype)


def kind_of(where: str, dtype: Any) -> Kind:
    """Return the kind of a dtype, JAX's narrow ones included. *Pure.*

    Raises:
        ArrayTypeError: The dtype is no number.
    """
    for category, kind in _KINDS:
        if jnp.issubdtype(dtype, category):
            return kind
    raise ArrayTypeError(f"{where}: dtype {dtype} is no number. Give a bool, integer, float or complex array.")


@partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _extreme(x: Any, line: Line, axis: Axis, op: str) -> Any:
    return line.max(x) if op == "max" else line.min(x)


@_extreme.defjvp
def _extreme_jvp(line: Line, axis: Axis, op: str, primals: Any, tangents: Any) -> Any:
    transpose(call("all_reduce", axis, 0, op=op))  # raises: the op table knows no gradient, and says so


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _enter(x: Any, line: Line) -> Any:
    return x


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _leave(x: Any, line: Line) -> Any:
    return line.sum(x)


def _sum_cotangent(line: Line, _: None, cotangent: Any) -> tuple[Any]:
    return (line.sum(cotangent),)


def _pass_cotangent(line: Line, _: None, cotangent: Any) -> tuple[Any]:
    return (cotangent,)


_enter.defvjp(lambda x, line: (x, None), _sum_cotangent)
_leave.defvjp(lambda x, line: (line.sum(x), None), _pass_cotangent)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _broadcast(x: Any, line: Line, src: int) -> Any:
    """Sum the bits, zero everywhere but at `src`: a sum of floats would turn -0.0 into 0.0."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(_broadcast(jnp.real(x), line, src), _broadcast(jnp.imag(x), line, src))
    bits = _bits_of(x)
    sent = line.sum(jnp.where(line.index() == src, bits, jnp.zeros_like(bits)))
    if jnp.issubdtype(x.dtype, jnp.floating):
        return lax.bitcast_convert_type(sent, x.dtype)
    return sent.astype(x.dtype)


@_broadcast.defjvp
def _broadcast_jvp(line: Line, src: int, primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    masked = jnp.where(line.index() == src, dx, jnp.zeros_like(dx))
    return _broadcast(x, line, src), line.sum(masked)


def _bits_of(x: Any) -> Any:
    """Return an array of integers that sum exactly and hold the same bits."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return jnp.asarray(x, jnp.uint8) if x.dtype == np.bool_ else jnp.asarray(x)
