"""Global arrays on a state's mesh: lay one out, read it back, build it from blocks, constrain it.

What a spec is in JAX's names is in `state`, functions of arrays in `programs`.
"""

# mypy: allow-untyped-calls
# jax leaves some of its public functions unannotated.

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, get_abstract_mesh, get_mesh, reshard

from dualmesh.backend.arrays import Arrays
from dualmesh.backend.host_blocks import HostLeaf
from dualmesh.errors import ArgumentError, ArrayTypeError, ShardingError, listed
from dualmesh.sharding.partition_spec import P, canonical, dim_layouts
from dualmesh.sharding.slices import covering_slices, global_shape_of_cover
from dualmesh_jax import private
from dualmesh_jax.mesh.ambient_mesh import check_one_place, describe_mesh
from dualmesh_jax.store import describe_processes
from dualmesh_jax.watch import run_together

if TYPE_CHECKING:
    from dualmesh.weights.transfer import TransferJob
    from dualmesh_jax.state import JaxState

INSIDE = (
    "{where}: called inside shard_map, where arrays are this rank's blocks. Call it on global arrays, outside the "
    "function given to shard_map."
)

NARROWED = (
    "{where}: {dtype} values from {low} to {high} do not fit {kept}, which is what JAX keeps while x64 is off. Set "
    "jax.config.update('jax_enable_x64', True) before JAX is first used, or give smaller numbers."
)
TWO_PLACES = (
    "reshard: inside jit, from {} over {} to {} over {}. One jit runs over one list of devices: call dm.reshard "
    "between two jitted functions, where it moves arrays and is differentiable all the same."
)
KEYS = (
    "{where}: found random keys ({dtype}, shape {shape}), which have no numbers of their own. Give "
    "jax.random.key_data(keys), and wrap what comes back: jax.random.wrap_key_data(data)."
)
LEFT_TO_JAX = (
    "{where}: {spec!r} names {axes}, along which arrays are this rank's blocks here. Inside a shard_map over some axes "
    "(axes=...) name only those that it leaves to JAX: {left}."
)
NOTHING = (
    "{where}: found None for an array of {source}, of which this process holds ranks. In JAX every process of "
    "the source holds the array: give what dm.distribute, dm.shard_local or dm.shard_map returned here."
)
TWO_MESHES = (
    "reshard: inside jit, from {} on {} to {} on {}. On Explicit axes a sharding is part of an array's type, and JAX "
    "has no move from one mesh's types to another's: call dm.reshard between two jitted functions, or register "
    "both states before first use, so that they share a mesh where their sizes allow it."
)
TWO_SETS = (
    "{where}: {source} over {devices} (of {processes}) and {target} over {others} (of {other_processes}) are different "
    "devices of several processes, between which JAX does not move arrays here: in one program all processes compute "
    "on the same devices. Register both over the same devices, in any order and grid; or send trees through the hosts: "
    "dm.transfer_link."
)


# What XLA wants of memory that it takes over on the CPU.
_ALIGNMENT = 64


class JaxArrays(Arrays):
    """Global `jax.Array`s over the devices of one state."""

    def __init__(self, state: "JaxState") -> None:
        self._state = state

    def distribute(self, array: Any, spec: P) -> Any:
        host = array if isinstance(array, jax.Array) else np.asarray(array)
        return laid_out("distribute", host, self.fitted("distribute", host, spec))

    def grown(self, array: Any, shape: tuple[int, ...]) -> Any:
        refuse_keys("distribute with pad=True", array)
        if not isinstance(array, jax.Array):
            return super().grown(array, shape)
        return jnp.pad(array, [(0, size - own) for size, own in zip(shape, array.shape, strict=True)])

    def checked(self, array: Any) -> Any:
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            raise ArrayTypeError(f"distribute: the array lies on {listed(array.devices())} already. Use dm.constrain.")
        refuse_keys("distribute with check=True or src=", array)
        host = on_host(array)
        check_narrowing("distribute", host)
        return host

    def handed_out(self, array: Any, spec: P, src: int) -> Any:
        return self.distribute(self._state.host.broadcast(array, "world", src=src), spec)

    def to_host(self, path: str, x: Any, spec: P) -> HostLeaf:
        if not isinstance(x, jax.Array):
            raise ArrayTypeError(f"transfer_link: {path!r} is a {type(x).__qualname__}. Give JAX arrays.", path=path)
        refuse_keys(f"transfer_link: {path!r}", x)
        lies, shared = self.constrain(x, spec), self._state.shared
        rank_of = dict(zip(shared.devices, shared.order, strict=True))
        blocks = {rank_of[one.device]: HostLeaf.void(on_host(one.data)) for one in lies.addressable_shards}
        return HostLeaf(lies.shape, lies.dtype.itemsize, lies.dtype.name, blocks)

    def host_dtype(self, x: Any) -> str:
        return str(x.dtype.name)

    def from_host(self, path: str, x: Any, leaf: HostLeaf, spec: P) -> jax.Array:
        device_of = dict(zip(self._state.shared.order, self._state.shared.devices, strict=True))
        blocks = {rank: HostLeaf.read(block, x.dtype) for rank, block in leaf.blocks.items()}
        pieces = [jax.device_put(block, device_of[rank]) for rank, block in blocks.items()]
        return jax.make_array_from_single_device_arrays(leaf.shape, self._state.sharding(spec), pieces)

    def to_numpy(self, x: Any) -> Any:
        if not isinstance(x, jax.Array | np.ndarray | np.generic):
            raise ArrayTypeError(
                f"to_numpy: found a {type(x).__qualname__}. Give what dm.distribute or shard_map return."
            )
        refuse_keys("to_numpy", x)
        x = sum_unreduced(x)
        if isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated:
            whole = NamedSharding(self._state.mesh, PartitionSpec())
            x = run_together(self._state, "to_numpy", jax.jit(_unchanged, out_shardings=whole), (x,))
        is_split = isinstance(x, jax.Array) and not x.is_fully_addressable
        return np.array(on_host(x.addressable_data(0) if is_split else x))

    def shard_local(self, block: Any, spec: P) -> Any:
        refuse_keys("shard_local", block)
        where, host, topology = "shard_local", on_host(block), self._state.topology
        ranks = [self._state.grid_rank(rank) for rank in self._state.local_ranks]
        shape = global_shape_of_cover(topology, spec, host.shape, ranks, what=f"{where}: block")
        sharding = self.fitted(where, np.broadcast_to(np.zeros((), host.dtype), shape), spec)
        first = [cut.start for cut in covering_slices(topology, spec, shape, ranks)]

        def cut(index: Any) -> Any:
            bounds = (one.indices(size) for one, size in zip(index, shape, strict=True))
            return own_copy(host[tuple(slice(a - at, b - at) for (a, b, _), at in zip(bounds, first, strict=True))])

        check_narrowing(where, host)
        return _assemble(shape, sharding, cut)

    def constrain(self, x: Any, spec: P) -> Any:
        if get_abstract_mesh().manual_axes:
            return self._constrain_rest(x, spec)
        sharding = self.fitted("constrain", x, spec)
        if not isinstance(x, jax.Array):
            x = own_copy(np.asarray(x))
        if not is_tracing():
            return run_together(self._state, "constrain", private.device_put, (sum_unreduced(x), sharding))
        check_one_place("constrain", self._state, is_staging=is_staging())
        # Where axes are Explicit, a sharding is part of the type: JAX checks a constraint, and does not move the array.
        if self._state.shared.is_explicit:
            return reshard(x, sharding)
        return lax.with_sharding_constraint(x, sharding)

    def _constrain_rest(self, x: Any, spec: P) -> Any:
        """Constrain what is global still inside a `shard_map` over some axes: along the others. *Local.*"""
        around, shared = get_abstract_mesh(), self._state.shared
        manual = set(around.manual_axes)
        left = [axis for axis in self._state.axis_names if self._state.size(axis) > 1]
        left = [axis for axis in left if not manual & set(self._state.axes(axis))]
        if around.shape_tuple != shared.mesh.shape_tuple or not left:
            raise ArgumentError(INSIDE.format(where="constrain"))
        dim_layouts(self._state.topology, spec, np.shape(x), what="constrain: array")
        native = self._state.native_spec("constrain", spec)
        blocked = [axis for axis in spec.axes if manual & set(self._state.axes(axis))]
        if blocked:
            found = {"spec": spec, "axes": listed(blocked), "left": listed(left)}
            raise ArgumentError(LEFT_TO_JAX.format(where="constrain", **found), spec=spec)
        sharding = NamedSharding(around, native)
        return reshard(x, sharding) if shared.is_explicit else lax.with_sharding_constraint(x, sharding)

    def reshard(self, x: Any, spec: P, source: Any, source_spec: P) -> Any:
        if get_abstract_mesh().manual_axes:
            raise ArgumentError(INSIDE.format(where="reshard"))
        self._check_reach("reshard", source)
        if x is None:
            raise ArrayTypeError(NOTHING.format(where="reshard", source=source.label))
        if is_unreduced(x) and source.spec_of(x) == canonical(source.topology, source_spec):
            x, source_spec = sum_unreduced(x), P(*source_spec.entries)
        lies = source.arrays.fitted("reshard src", x, source_spec)
        shall = self.fitted("reshard dst", x, spec)
        if is_staging():
            check_one_place("reshard", self._state, is_staging=True)
            if source.shared.devices != self._state.shared.devices:
                raise ShardingError(
                    TWO_PLACES.format(
                        *(source.label, listed(source.shared.devices)),
                        *(self._state.label, listed(self._state.shared.devices)),
                    ),
                    source=source,
                    target=self._state,
                )
            if self._state.shared.is_explicit:
                return self._reshard_types(x, lies, shall, source)
            return lax.with_sharding_constraint(lax.with_sharding_constraint(x, lies), shall)
        _check_devices(x, source)
        if not isinstance(x, jax.Array):
            x = own_copy(np.asarray(x))
        return run_together(self._state, "reshard", partial(private.device_put, src=lies), (x, shall))

    def transfer(self, tree: Any, job: "TransferJob") -> Any:
        source: Any = job.source
        self._check_reach("transfer", source)
        if tree is None:
            raise ArrayTypeError(NOTHING.format(where="transfer", source=source.label))

        def moved(x: Any, *ends: Any) -> Any:
            return unshare(self.reshard(x, *ends), (x,))  # the source's next step may be given its arrays for good

        return job.array_by_array(tree, moved)

    def _reshard_types(self, x: Any, lies: NamedSharding, shall: NamedSharding, source: "JaxState") -> Any:
        """Move an array inside jit on Explicit axes, where the sharding is part of its type. *Local.*

        Raises:
            ShardingError: The states are on two meshes, between which JAX has no such move.
        """
        if lies.mesh != shall.mesh:
            raise ShardingError(
                TWO_MESHES.format(
                    *(source.label, describe_mesh(source.shared.mesh)),
                    *(self._state.label, describe_mesh(self._state.shared.mesh)),
                ),
                source=source,
                target=self._state,
            )
        return reshard(reshard(x, lies), shall)

    def _check_reach(self, where: str, source: "JaxState") -> None:
        """Refuse, in every process of both ends, what JAX refuses or waits for in some of them. *Local.*

        It moves arrays between processes only where both ends are the same devices, else within one process. A whole
        array of one process that is put on more would be compared with what the others have: they may have none.

        Raises:
            ShardingError: The states are over different devices of several processes.
        """
        target = self._state
        processes = {*source.processes, *target.processes}
        if len(processes) == 1 or set(source.shared.devices) == set(target.shared.devices):
            return
        raise ShardingError(
            TWO_SETS.format(
                where=where,
                **{"source": source.label, "devices": listed(source.shared.devices)},
                **{"target": target.label, "others": listed(target.shared.devices)},
                processes=describe_processes(source.processes),
                other_processes=describe_processes(target.processes),
            ),
            source=source,
            target=target,
        )

    def fitted(self, where: str, x: Any, spec: P) -> NamedSharding:
        """Return the sharding of a spec after checking that it fits an array. *Local.*

        Raises:
            ShapeError: A dim that its axes do not divide.
        """
        dim_layouts(self._state.topology, spec, np.shape(x), what=f"{where}: array")
        return NamedSharding(self._state.mesh, self._state.native_spec(where, spec))


def laid_out(where: str, array: Any, sharding: NamedSharding) -> Any:
    """Return a global array in a sharding; each process cuts its part of its own copy of a host array. *Local.*

    The result shares no memory with what was given: a loader may fill its buffer again at once, and a jitted step that
    was given the one (`donate_argnums`) may not take the other along.

    Raises:
        ArrayTypeError: Integers of 64 bits that do not fit the 32 that JAX keeps.
    """
    if isinstance(array, jax.core.Tracer):
        return private.device_put(array, sharding)
    if isinstance(array, jax.Array):
        if sharding.is_fully_addressable or array.is_fully_addressable:
            return unshare(private.device_put(array, sharding), (array,))
        return unshare(jax.jit(_unchanged, out_shardings=sharding)(array), (array,))
    check_narrowing(where, array)
    if sharding.is_fully_addressable:
        return jax.device_put(own_copy(array), sharding)
    return _assemble(array.shape, sharding, lambda index: own_copy(array[index]))


def _assemble(shape: tuple[int, ...], sharding: NamedSharding, cut: Callable[[Any], Any]) -> Any:
    """Return a global array of the blocks that are cut for this process' devices. *Local.*

    Each is put on its device in so many words: `jax.make_array_from_callback` counts as an implicit transfer, which
    `jax.transfer_guard` may forbid.
    """
    places = sharding.addressable_devices_indices_map(shape)
    blocks = [jax.device_put(cut(index), device) for device, index in places.items()]
    return jax.make_array_from_single_device_arrays(shape, sharding, blocks)


def on_host(x: Any) -> Any:
    """Return an array in the host's memory, which the caller does not write to. *Local.*

    Asked for by name, so that a guard against implicit transfers lets it pass: jax 0.12 counts `np.asarray` as one.
    """
    return np.asarray(jax.device_get(x) if isinstance(x, jax.Array) else x)


def own_copy(block: Any) -> Any:
    """Return a copy of a numpy array that nobody else knows, with the dtype that JAX gives it. *Local.*

    On the CPU JAX takes memory over as it is where it starts at 64 bytes, and otherwise copies it some time later; on
    accelerators too it may be read after the call. No public option changes that (`may_alias=False` does not, for
    numpy), so the copy is made here, once: JAX takes it over.
    """
    dtype = jax.dtypes.canonicalize_dtype(block.dtype)
    room = np.empty(block.size * dtype.itemsize + _ALIGNMENT, np.uint8)
    start = -room.__array_interface__["data"][0] % _ALIGNMENT
    own = room[start : start + block.size * dtype.itemsize].view(dtype).reshape(block.shape)
    own[...] = block
    return own


def unshare(made: Any, given: Iterable[Any]) -> Any:
    """Return a JAX array, or a copy of it where it shares memory with one that was given. *Local.*

    `device_put` hands on what lies right already, also parts of it, and what came by DLPack is another's memory.
    """
    if isinstance(made, jax.core.Tracer):
        return made
    if jnp.issubdtype(made.dtype, jax.dtypes.extended):  # random keys, which do not say where they lie
        return jnp.copy(made)
    theirs = [place for one in given for place in _places(one)]
    if not any(begin < end_ and begin_ < end for begin, end in _places(made) for begin_, end_ in theirs):
        return made
    # Finished before whoever owns the other memory, a torch tensor say, may write to it.
    return jnp.copy(made).block_until_ready()


def _places(x: Any) -> list[tuple[int, int]]:
    """Return where in memory this process' parts of an array lie."""
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
        return []
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return []
    begins = [(shard.data.unsafe_buffer_pointer(), shard.data.nbytes) for shard in x.addressable_shards]
    return [(begin, begin + size) for begin, size in begins if size]


def is_keys(x: Any) -> bool:
    """Tell whether an array holds typed random keys (`jax.random.key`), which numpy has no dtype for. *Local.*"""
    return isinstance(x, jax.Array) and bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def refuse_keys(where: str, x: Any) -> None:
    """Refuse random keys where numbers are meant.

    Raises:
        ArrayTypeError: These are random keys.
    """
    if is_keys(x):
        raise ArrayTypeError(KEYS.format(where=where, dtype=x.dtype, shape=x.shape), found=x.dtype)


def is_unreduced(x: Any) -> bool:
    """Tell whether a finished array's blocks are still to be summed, which there is on Explicit axes. *Local.*"""
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array):
        return False
    return bool(getattr(getattr(x.sharding, "spec", None), "unreduced", None))


def sum_unreduced(x: Any) -> Any:
    """Return an array whose blocks are the value's: JAX moves and reads unreduced ones only in compiled code.

    *Collective over the array's devices.*
    """
    if not is_unreduced(x):
        return x
    whole = NamedSharding(x.sharding.mesh, PartitionSpec(*x.sharding.spec.partitions))
    return jax.jit(reshard, static_argnums=1)(x, whole)


def check_narrowing(where: str, array: Any) -> None:
    """Refuse integers that JAX would wrap around: it keeps 32 bits of 64 while x64 is off. *Local.*"""
    kept = jax.dtypes.canonicalize_dtype(array.dtype)
    if array.dtype.kind not in "iu" or kept == array.dtype or array.size == 0:
        return
    low, high, limits = array.min(), array.max(), np.iinfo(kept)
    if low < limits.min or high > limits.max:
        raise ArrayTypeError(NARROWED.format(where=where, dtype=array.dtype, low=low, high=high, kept=kept))


def _check_devices(x: Any, source: "JaxState") -> None:
    """Refuse an array that lies on other devices than its state's."""
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array) or not x.committed:
        return
    if x.sharding.device_set != set(source.shared.devices):
        raise ShardingError(
            f"reshard: the array of shape {x.shape} lies on {listed(x.sharding.device_set)}, but {source.label} is "
            f"over {listed(source.shared.devices)}. Name the state that it lies on in src=.",
            found=x.sharding,
        )


def is_staging() -> bool:
    """Tell whether operations are recorded (jit, scan) rather than run; an eager gradient runs them. *Local.*

    A constant is asked for, which leaves nothing in the program; `jax.transfer_guard` may not forbid it where it runs.
    """
    if not is_tracing():
        return False
    with jax.transfer_guard_host_to_device("allow"):
        return isinstance(lax.full((), 0), jax.core.Tracer)


def is_tracing() -> bool:
    """Tell whether some transformation that sets the mesh aside (jit, shard_map, scan) is recording. *Local.*"""
    try:
        get_mesh()
    except ValueError:  # JAX's answer inside tracing
        return True
    return False


def _unchanged(x: Any) -> Any:
    return x
