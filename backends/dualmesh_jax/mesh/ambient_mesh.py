"""What JAX code runs under: the mesh around it, whose that is, and whether a state's mesh may take its place.

JAX compiles a `shard_map` that was given no mesh for the mesh that `jax.set_mesh` set when `jit` was called, whatever
abstract mesh the traced code set: wrong numbers where the two differ. So another mesh is never set there, but none. The
meshes themselves are in `meshes`.
"""

# mypy: allow-untyped-calls
# jax leaves some of its public functions unannotated.

import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import get_opaque_trace_state
from jax.sharding import AbstractMesh, Mesh, get_abstract_mesh, use_abstract_mesh

from dualmesh.backend.state import ParallelState
from dualmesh.errors import ArgumentError, ShardingError, listed
from dualmesh.runtime.registry import registry
from dualmesh_jax.mesh.meshes import SharedMesh
from dualmesh_jax.private import mesh_outside_tracing, misses_mesh

if TYPE_CHECKING:
    from dualmesh_jax.state import JaxState

UNMESHED = (
    "{label} is on {mesh}, but jit was called under {outside}, and JAX knows one mesh per jit: in this scope there is "
    "none. Use dm.shard_map and dm.constrain, or say it to JAX: mesh=state.mesh, state.sharding(...). States that are "
    "registered before first use share one mesh where their sizes allow it."
)
OTHER_REGION = (
    "{where}: {label} is on {mesh}, but this is inside a shard_map over {around}, where arrays are blocks on that "
    "mesh. Leave that shard_map first. What {label} says of its sizes and ranks can be asked of the state itself."
)
TWO_PLACES = (
    "{where}: {label} is on {mesh}, over {devices}, but this is traced into one jit with {other}, over {others}. One "
    "jit runs over one list of devices: use a jit for each, and dm.reshard between them."
)
EAGER_GRADIENT = (
    "{where}: {label} is on {mesh}, over {devices}, but this is inside an eager gradient that was taken in a scope of "
    "{other}, over {others}, and until it ends JAX computes on that mesh. Take it outside any scope (jax.grad, or "
    "dm.value_and_grad without state=, where the default state is ambient), and name states: dm.shard_map(..., "
    "state=...), dm.reshard(x, src=..., dst=...)."
)
UNKNOWN = "a mesh that JAX does not say inside vmap with axis_name"
_NO_MESH = AbstractMesh((), ())


def describe_mesh(mesh: Mesh | AbstractMesh) -> str:
    """Return a mesh as messages show it, with the registered states that are on it. *Local.*"""
    names = [name for name, state in registry.named.items() if _is_on(getattr(state, "shared", None), mesh)]
    axes = ", ".join(f"{name!r}: {size}" for name, size in mesh.shape_tuple)
    owners = f" of {'State' if len(names) == 1 else 'States'} {listed(map(repr, names))}" if names else ""
    return f"the mesh ({axes}){owners}" if axes else "no mesh"


def _is_on(shared: Any, mesh: Mesh | AbstractMesh) -> bool:
    return isinstance(shared, SharedMesh) and shared.is_fixed and shared.mesh.shape_tuple == mesh.shape_tuple


def ambient_mesh(where: str, state: "JaxState") -> AbstractContextManager[Any]:
    """Return a context manager that makes a state's mesh JAX's ambient one, as far as JAX allows here. *Local.*

    Outside tracing that is the concrete mesh, which holds from this call on: enter at once. Inside tracing it is the
    abstract mesh, or none at all where jit was called under another.

    Raises:
        ArgumentError: Inside a `shard_map` over another mesh.
    """
    mesh = state.shared.mesh
    try:
        return jax.set_mesh(mesh)
    except ValueError:  # JAX's answer inside tracing
        around = get_abstract_mesh()
    note_traced(state)
    ours = state.shared.abstract_mesh
    if around.manual_axes:
        if around.shape_tuple != ours.shape_tuple:
            found = {"where": where, "label": state.label, "mesh": describe_mesh(ours), "around": describe_mesh(around)}
            raise ArgumentError(OTHER_REGION.format(**found), state=state, around=around)
        return nullcontext()
    if around == ours:
        return nullcontext()
    outside = mesh_outside_tracing()
    if outside is None or not (outside.empty or outside == mesh):
        return Unmeshed(state, around if outside is None else outside)
    return use_abstract_mesh(ours if around.empty or around.size == ours.size else _NO_MESH)


def note_traced(state: ParallelState) -> None:
    """Let what is being traced be traced anew once a name of the state means another one, or none. *Local.*"""
    for name in state.names:
        registry.note_compiled(name)


def has_no_mesh() -> bool:
    """Tell whether this is traced where JAX has no mesh, neither from outside nor around. *Local.*

    What brings its mesh needs none there, and `checkify` compiles a `shard_map` only where there is none.
    """
    outside = mesh_outside_tracing()
    return outside is not None and outside.empty and get_abstract_mesh().empty


class Unmeshed:
    """Sets no mesh, and says why where JAX misses one."""

    def __init__(self, state: "JaxState", outside: Mesh | AbstractMesh) -> None:
        self._state = state
        self._outside = outside
        self._inside = use_abstract_mesh(_NO_MESH)
        self._handled = sys.exception()

    def __enter__(self) -> None:
        self._inside.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._inside.__exit__(kind, error, traceback)
        said = error.args[0] if error is not None and error.args else None
        if error is None or error is self._handled or not isinstance(said, str):
            return
        if not misses_mesh(said) or "knows one mesh per jit" in said:
            return
        found = {
            "label": self._state.label,
            "mesh": describe_mesh(self._state.shared.mesh),
            "outside": UNKNOWN if self._outside.empty else describe_mesh(self._outside),
        }
        error.args = (f"{said.rstrip('.')}. {UNMESHED.format(**found)}", *error.args[1:])


class _LastPlace(threading.local):
    """Where the trace that was seen last runs."""

    def __init__(self) -> None:
        self.trace: object = None
        self.shared: SharedMesh | None = None


_last = _LastPlace()


def check_one_place(where: str, state: "JaxState", *, is_staging: bool) -> None:
    """Refuse to be traced into one jit with what is over other devices, or over these in another order. *Local.*

    Seen where the other is the mesh that jit was called under, or was used before in the same traced function; JAX
    refuses the rest when it compiles.

    Raises:
        ShardingError: That is so.
    """
    note_traced(state)
    outside, shared = mesh_outside_tracing(), state.shared
    if outside is None:
        return
    if not outside.empty:
        _compare(where, state, outside, tuple(outside.devices.flat), TWO_PLACES if is_staging else EAGER_GRADIENT)
    elif is_staging:
        trace = get_opaque_trace_state()
        if _last.shared is not None and trace == _last.trace:
            _compare(where, state, _last.shared.mesh, _last.shared.devices)
        _last.trace, _last.shared = trace, shared


def _compare(
    where: str, state: "JaxState", other: Mesh, others: tuple[jax.Device, ...], text: str = TWO_PLACES
) -> None:
    ours = state.shared
    if others != ours.devices:
        found = {
            "where": where,
            "label": state.label,
            "mesh": describe_mesh(ours.mesh),
            "devices": listed(ours.devices),
        }
        message = text.format(**found, other=describe_mesh(other), others=listed(others))
        raise ShardingError(message, state=state, mesh=ours.mesh, other=other)
