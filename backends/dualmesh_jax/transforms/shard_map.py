"""Per-rank functions lifted to global arrays by `jax.shard_map`, compiled and kept where they are called eagerly.

Gradients and recomputation are in `programs`, containers of specs in `specs`, what a function captured in
`closure_inputs`.
"""

# mypy: allow-untyped-calls
# jax leaves some of its public functions unannotated.

import functools
from collections import ChainMap
from collections.abc import Callable
from contextlib import nullcontext
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, get_abstract_mesh, reshard

from dualmesh._support.warn import caution
from dualmesh.backend.transforms import warn_of_forgotten
from dualmesh.errors import ArgumentError, ShardingError, listed
from dualmesh.runtime.registry import registry
from dualmesh.runtime.scope import current_scope
from dualmesh.sharding.partition_spec import P, is_spec
from dualmesh_jax.arrays.arrays import is_keys, is_staging, is_tracing, laid_out, on_host
from dualmesh_jax.arrays.specs import check_specs, map_by_spec
from dualmesh_jax.mesh.ambient_mesh import ambient_mesh, check_one_place, has_no_mesh
from dualmesh_jax.private import is_transforming
from dualmesh_jax.regions import region_of
from dualmesh_jax.transforms.closure_inputs import Contents, find_captured, find_changed
from dualmesh_jax.transforms.retraced import Retraced
from dualmesh_jax.watch import run_together

if TYPE_CHECKING:
    from dualmesh_jax.state import JaxState

NESTED = (
    "shard_map: called inside a shard_map over the same axes ({axes}), where arrays are already this rank's blocks. "
    "Call the function itself, or lift the outer function only."
)
TRACED_CHECK = (
    "shard_map: check_replicated=True compares the shards of a finished result, so it works only in a call outside "
    "jit, grad and other transformations. Check once eagerly, and leave it out in the transformed function."
)
CHANGED = (
    "shard_map: a variable that {fn} captured has another value than when it was compiled, so it is compiled anew, "
    "which is slow. Give what changes from call to call as an argument."
)


class Lifted:
    """A per-rank function as a function of global arrays on one state's mesh; keeps its own compiled programs."""

    def __init__(
        self,
        state: "JaxState",
        fn: Callable[..., Any],
        in_specs: Any,
        out_specs: Any,
        axes: tuple[str, ...] | None,
        check_replicated: bool,
    ) -> None:
        self._state = state
        self._fitted = state.arrays.fitted
        self._fn = fn
        self._in_specs = check_specs(state.topology, "shard_map in_specs", in_specs, axes)
        self._out_specs = check_specs(state.topology, "shard_map out_specs", out_specs, axes)
        self._axes = axes
        self._check_replicated = check_replicated
        self._has_partial = any(spec.partial for spec in jax.tree.leaves(self._out_specs, is_leaf=is_spec))
        self._was_called = False
        self._was_compiled = False
        self._own: set[int] = set()  # variables that tracing itself changes (a counter, a log), which say nothing new
        self._words = f"shard_map of {getattr(fn, '__qualname__', type(fn).__qualname__)}"
        self._retraced = Retraced()
        self._compile(find_captured(fn))

    def _compile(self, contents: Contents) -> None:
        """Forget what was compiled; the contents of captured variables are baked into what is compiled next."""
        self._captured = contents
        self._compiled = jax.jit(self._fresh_program())

    def _fresh_program(self) -> Callable[..., Any]:
        """Return a function of its own each time, for JAX's caches know functions by identity.

        Jaxprs and profiles show it by the name of what was lifted.
        """

        def program(*args: Any) -> Any:
            return self._traced(*args)

        program.__name__ = getattr(self._fn, "__name__", program.__name__)
        return program

    def _look_at_captured(self) -> None:
        contents = find_captured(self._fn)
        if find_changed(self._captured, contents) - self._own:
            if self._was_compiled:
                caution(CHANGED.format(fn=getattr(self._fn, "__qualname__", repr(self._fn))))
            self._compile(contents)
        self._was_compiled = True

    def __call__(self, *args: Any) -> Any:
        current_scope()  # refuses where the thread is in another scope, for which the results would be kept
        staging, transforming = is_staging(), is_transforming()
        if not transforming:
            self._look_at_captured()
        if any(isinstance(leaf, np.ndarray | np.generic) for leaf in jax.tree.leaves(args)):
            args = map_by_spec("shard_map in_specs", self._placed, self._in_specs, args)
        if not self._was_called:
            self._was_called = True
            forgotten: list[tuple[P, Any, list[str]]] = []
            map_by_spec("shard_map in_specs", self._note_forgotten(forgotten), self._in_specs, args)
            for one in forgotten:
                warn_of_forgotten(*one)
        brings_mesh = False
        if is_tracing():
            check_one_place("shard_map", self._state, is_staging=staging)
            brings_mesh = staging and has_no_mesh() and not self._state.shared.is_explicit
        with nullcontext() if brings_mesh else ambient_mesh("shard_map", self._state):
            try:
                if staging:
                    # A function of its own each time, for JAX keeps what it traced: a trace sees what globals and
                    # attributes are now, and is never met by what another captured. inline: nothing but the shard_map
                    # itself appears; jit around it: nothing is computed that a gradient does not need.
                    results = jax.jit(self._fresh_program(), inline=True)(*args)
                else:
                    results = run_together(self._state, self._words, self._program(args, transforming), args)
            except ValueError as error:
                self._check_devices(args, error)
                raise
        if self._check_replicated:
            map_by_spec("shard_map out_specs", self._check_equal, self._out_specs, results)
        return results

    def _program(self, args: tuple[Any, ...], transforming: bool) -> Callable[..., Any]:
        """Return what runs eagerly: what is kept, or, where the arguments are transformed, what is traced now."""
        return self._retraced.program(self._traced, args) if transforming else self._compiled

    def _traced(self, *args: Any) -> Any:
        native = functools.partial(self._state.native_spec, "shard_map")
        around = get_abstract_mesh()
        mesh = self._state.shared.mesh
        names = mesh.axis_names if self._axes is None else self._state.axes(self._axes)
        if set(around.manual_axes) & set(names):
            raise ArgumentError(NESTED.format(axes=listed(around.manual_axes)), axes=around.manual_axes)
        args = map_by_spec("shard_map in_specs", self._entering, self._in_specs, args)
        lifted = jax.shard_map(
            self._body,
            mesh=None if around.manual_axes else mesh,  # the mesh around knows which of its axes are manual already
            in_specs=jax.tree.map(native, self._in_specs, is_leaf=is_spec),
            out_specs=jax.tree.map(lambda spec: native(P(*spec.entries)), self._out_specs, is_leaf=is_spec),
            axis_names=set(names),
            check_vma=False,
        )
        return lifted(*args)

    def _body(self, *blocks: Any) -> Any:
        before = find_captured(self._fn)
        with region_of(self._state) if registry.has_several else nullcontext():
            results = self._fn(*blocks)
        self._own |= find_changed(before, find_captured(self._fn))
        map_by_spec("shard_map out_specs", _check_dims, self._out_specs, results)
        if self._has_partial:
            results = map_by_spec("shard_map out_specs", self._summed, self._out_specs, results)
        return results

    def _summed(self, spec: P, block: Any) -> Any:
        if self._state.size(spec.partial) == 1:
            return block
        return lax.psum(block, self._state.axes(spec.partial))

    def _placed(self, spec: P, x: Any) -> Any:
        if not isinstance(x, np.ndarray | np.generic):
            return x
        return laid_out("shard_map", x, self._fitted("shard_map", x, spec))

    def _note_forgotten(self, forgotten: list[tuple[P, Any, list[str]]]) -> Callable[[P, Any], None]:
        """Return what notes each argument that is split over axes which its spec leaves out."""

        def note(spec: P, x: Any) -> None:
            sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
            if not isinstance(sharding, NamedSharding) or sharding.mesh != self._state.shared.mesh:
                return
            entries = sharding.spec.partitions
            split = {name for entry in entries for name in ([entry] if isinstance(entry, str) else entry or ())}
            gone = split - set(self._state.axes(spec.axes))
            axes = [axis for axis in self._state.topology.base_axes if gone & set(self._state.axes(axis))]
            if axes:
                forgotten.append((spec, x.shape, axes))

        return note

    def _entering(self, spec: P, x: Any) -> Any:
        """Check that an argument fits its spec; on Explicit axes its type must say so, on others JAX moves it."""
        sharding = self._fitted("shard_map", x, spec)
        return reshard(x, sharding) if self._state.shared.is_explicit else x

    def _check_equal(self, spec: P, x: Any) -> None:
        """Compare the shards that the spec declares equal, bit for bit; other processes send hashes of theirs."""
        if isinstance(x, jax.core.Tracer):
            raise ArgumentError(TRACED_CHECK)
        state = self._state
        ranks = dict(zip(state.shared.devices, state.members, strict=True))
        mine = {
            ranks[shard.device]: (repr(shard.index), sha256(_numbers(shard.data).tobytes()).digest())
            for shard in x.addressable_shards
        }
        said = mine if x.is_fully_addressable else dict(ChainMap(*state.host.all_gather(mine, "world")))
        first: dict[str, tuple[int, bytes]] = {}
        for rank, (part, digest) in sorted(said.items()):
            other, expected = first.setdefault(part, (rank, digest))
            if digest != expected:
                raise ShardingError(
                    f"shard_map: {spec!r} declares the result equal on ranks {other} and {rank}, but it differs. "
                    f"Reduce it over the axes that out_specs leaves out, or name them there.",
                    ranks=(other, rank),
                    spec=spec,
                )

    def _check_devices(self, args: Any, cause: ValueError) -> None:
        """Say it in dualmesh's words when an argument lies on other devices, or on these in another order."""
        ours = self._state.shared.devices
        for leaf in jax.tree.leaves(args):
            if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer) or not leaf.committed:
                continue
            theirs = tuple(leaf.sharding.devices_indices_map(leaf.shape))
            if theirs != ours:
                order = ", in this order" if set(theirs) == set(ours) else ""
                raise ShardingError(
                    f"shard_map: an argument of shape {leaf.shape} lies on {listed(theirs)}{order}, but "
                    f"{self._state.label} is over {listed(ours)}. Move it first, with dm.distribute(x, spec).",
                    state=self._state,
                ) from cause


def _numbers(block: Any) -> Any:
    return on_host(jax.random.key_data(block) if is_keys(block) else block)


def _check_dims(spec: P, block: Any) -> None:
    if len(spec.entries) > len(np.shape(block)):
        raise ShardingError(
            f"shard_map out_specs: {spec!r} has more entries than the result of shape {np.shape(block)} has dims. Give "
            f"at most one entry per dim.",
            spec=spec,
            shape=np.shape(block),
        )
