"""Federated averaging of JAX arrays: of blocks inside `shard_map`, or of each federation's own arrays outside.

Who exchanges what is planned in `dualmesh.topology.averaging`. Outside, one compiled function over the devices of all
federations sums what each rank holds; shards never leave their devices whole.
"""

# mypy: allow-untyped-calls
# jax leaves some of its public functions unannotated.

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dualmesh.errors import AgreementError, ArgumentError, ArrayTypeError, ShardingError, counted, listed
from dualmesh.topology.averaging import AveragingPlan
from dualmesh_jax.collectives.line import Line
from dualmesh_jax.mesh.meshes import mesh_of

Names = tuple[str, ...]
TRACED = (
    "federated_mean: called inside jit or another transformation on arrays of federations. Call it outside, or on "
    "blocks inside dm.shard_map over the state."
)


class Federations(NamedTuple):
    """The devices of all federations in rank order, as one mesh, and what processes tell each other."""

    mesh: Mesh
    gathered: Callable[[str], Sequence[str]]
    """Returns what the processes of all ranks said, by rank."""

    @property
    def devices(self) -> list[Any]:
        """One per rank."""
        return list(self.mesh.devices.flat)


class _Piece(NamedTuple):
    """A rank's shard, which part of the array it is, and where it lies in what its group sums.

    That is from `start` along `dim`; dim -1: it is all of it.
    """

    data: Any
    part: str
    dim: int = -1
    start: int = 0
    length: int = 0


def mean_of_block(x: Any, plan: AveragingPlan, names: Names, *, is_whole: bool = True) -> Any:
    """Return the mean of a rank's block, inside `shard_map`. *Collective over the mesh.*

    Args:
        names: The axes of the mesh, slowest first.
        is_whole: Whether all ranks of a group hold the same, where federations cut the model differently; else each
            holds its piece among zeros.
    """
    value = lax.stop_gradient(x.astype(jnp.float32) if x.dtype.itemsize < 4 else x)
    place, count = lax.axis_index(names), plan.topology.world_size

    def line(action: Any) -> Line:
        return Line(names, tuple(plan.partition(action)))

    def kept(factors: Sequence[float]) -> Any:
        factor = jnp.asarray(factors, value.real.dtype)[place]
        return jnp.where(factor == 0, jnp.zeros_like(value), value * factor)

    if plan.averages_replicas and plan.topology.shard_size is not None:
        value = line("mean").sum(kept(plan.factors("mean")))
    shares = plan.factors("exchange")
    if is_whole:
        shares = tuple(shares[rank] * (plan.piece(rank).place == 0) for rank in range(count))
    value = line("exchange").sum(kept(shares))
    if plan.topology.shard_size is not None and plan.topology.federated_world_size > 1:
        value = line("broadcast").sum(kept(plan.factors("broadcast")))
    return value.astype(x.dtype)


def mean_of_trees(tree: Any, plan: AveragingPlan, over: Federations) -> Any:
    """Return the tree, or list of trees, of means. *Collective over the mesh, in every process the same.*

    Raises:
        ArgumentError: There is not one tree for every federation of which this process holds ranks.
        ShardingError: An array is not laid over its federation, or split unlike the plan.
        AgreementError: Federations gave different trees or weights.
    """
    here = {rank: device for rank, device in enumerate(over.devices) if device.process_index == jax.process_index()}
    numbers = sorted({plan.topology.federated_rank(rank) for rank in here})
    trees = [tree] if len(numbers) == 1 else tree
    if not isinstance(trees, list | tuple) or len(trees) != len(numbers):
        raise ArgumentError(
            f"federated_mean: this process holds ranks of the federations {listed(numbers)}. Give a list of "
            f"{counted(len(numbers), 'tree')}, one for each, in this order; or call it inside dm.shard_map.",
            federations=tuple(numbers),
        )
    flat = {number: jax.tree.flatten(one) for number, one in zip(numbers, trees, strict=True)}
    _agree(flat, plan, over)
    found: dict[int, list[Any]] = {number: [] for number in numbers}
    for leaves in zip(*(flat[number][0] for number in numbers), strict=True):
        arrays = dict(zip(numbers, leaves, strict=True))
        for number, mean in _mean_of_arrays(arrays, here, plan, over).items():
            found[number].append(mean)
    rebuilt = [jax.tree.unflatten(flat[number][1], found[number]) for number in numbers]
    return rebuilt[0] if len(numbers) == 1 else type(trees)(rebuilt)


def _mean_of_arrays(
    arrays: dict[int, Any], here: dict[int, Any], plan: AveragingPlan, over: Federations
) -> dict[int, Any]:
    """Return the mean of one array of every federation, laid out as that federation's own."""
    pieces = {rank: _piece(arrays, rank, device, plan) for rank, device in here.items()}
    _check_alike(pieces, plan)
    is_whole = all(piece.dim < 0 for piece in pieces.values())
    blocks = [_on(here[rank], _embed, piece) for rank, piece in pieces.items()]
    names = over.mesh.axis_names
    split = NamedSharding(over.mesh, PartitionSpec(names))
    joined = jax.make_array_from_single_device_arrays((len(over.devices), *blocks[0].shape[1:]), split, blocks)
    with jax.set_mesh(over.mesh):
        summed = _program(over.mesh, plan, is_whole)(joined)
    results = {shard.device: shard.data for shard in summed.addressable_shards}
    found = {}
    for number, array in arrays.items():
        mine = [rank for rank in _ranks(plan, number) if rank in here]
        own = [_on(here[rank], _cut_shard, pieces[rank], results[here[rank]]) for rank in mine]
        found[number] = jax.make_array_from_single_device_arrays(array.shape, array.sharding, own)
    return found


@functools.lru_cache(maxsize=64)
def _program(mesh: Mesh, plan: AveragingPlan, is_whole: bool) -> Callable[[Any], Any]:
    names = tuple(mesh.axis_names)

    def program(block: Any) -> Any:
        return mean_of_block(block, plan, names, is_whole=is_whole)

    split = PartitionSpec(names)
    return jax.jit(jax.shard_map(program, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))


def _piece(arrays: dict[int, Any], rank: int, device: Any, plan: AveragingPlan) -> _Piece:
    """Return what a rank holds of its federation's array."""
    topology = plan.topology
    number = topology.federated_rank(rank)
    array = arrays[number]
    (shard,) = [shard for shard in array.addressable_shards if shard.device == device]
    if topology.shard_size is not None or topology.is_symmetric:
        return _Piece(shard.data, repr(shard.index))
    cuts = [dim for dim, (part, size) in enumerate(zip(shard.data.shape, array.shape, strict=True)) if part != size]
    if not cuts:
        return _Piece(shard.data, "all")
    size, dim = array.shape[cuts[0]], cuts[0]
    width = size // topology.sizes[number]
    expected = topology.federated_index(rank) * width
    if len(cuts) > 1 or shard.data.shape[dim] != width or (shard.index[dim].start or 0) != expected:
        raise ShardingError(
            f"federated_mean: an array of shape {array.shape} is {array.sharding} in federation {number}. Where "
            f"federations differ in size and have no shard_size, it must be split along one dim over all "
            f"{topology.sizes[number]} ranks, in rank order, or not at all.",
            sharding=array.sharding,
        )
    return _Piece(shard.data, repr(shard.index), dim, plan.piece(rank).place * width, size // topology.parts)


def _on(device: Any, fn: Callable[..., Any], *args: Any) -> Any:
    """Return what a function of arrays on one device gives, whatever mesh is ambient. *Local.*"""
    with jax.set_mesh(mesh_of([device], (1,), ("alone",))):
        return fn(*args)


def _embed(piece: _Piece) -> Any:
    """Return a shard among zeros, as the one row of a block."""
    if piece.dim < 0:
        return piece.data[None]
    after = piece.length - piece.start - piece.data.shape[piece.dim]
    padding = [(0, 0)] * piece.data.ndim
    padding[piece.dim] = (piece.start, after)
    return jnp.pad(piece.data, padding)[None]


def _cut_shard(piece: _Piece, row: Any) -> Any:
    """Return a rank's shard of the one row of a block."""
    result = row[0]
    if piece.dim < 0:
        return result
    return lax.slice_in_dim(result, piece.start, piece.start + piece.data.shape[piece.dim], axis=piece.dim)


def _check_alike(pieces: dict[int, _Piece], plan: AveragingPlan) -> None:
    """Refuse shards that are not the same part of the model wherever ranks hold the same shard."""
    topology = plan.topology
    if topology.shard_size is None and not topology.is_symmetric:
        return
    known: dict[int, tuple[int, str]] = {}
    for rank, piece in pieces.items():
        first, part = known.setdefault(topology.shard_index(rank), (rank, piece.part))
        if part != piece.part:
            raise ShardingError(
                f"federated_mean: rank {rank} holds {piece.part} of an array where rank {first} holds {part}, but both "
                f"hold shard {topology.shard_index(rank)}. Split arrays over the ranks of a replica, in their order.",
                ranks=(first, rank),
            )


def check_dtype(x: Any) -> None:
    """Refuse what has no mean. *Local.*

    Raises:
        ArrayTypeError: No array of floating or complex numbers.
    """
    if not isinstance(x, jax.Array) or not jnp.issubdtype(x.dtype, jnp.inexact):
        found = f"{x.dtype} of shape {x.shape}" if isinstance(x, jax.Array) else f"a {type(x).__qualname__}"
        raise ArrayTypeError(
            f"federated_mean: found {found}. A mean is taken of floating or complex JAX arrays: leave it out of the "
            f"tree.",
            found=type(x),
        )


def _check(x: Any, devices: Sequence[Any], number: int) -> None:
    check_dtype(x)
    if isinstance(x, jax.core.Tracer):
        raise ArgumentError(TRACED)
    if x.sharding.device_set != set(devices):
        raise ShardingError(
            f"federated_mean: an array of shape {x.shape} lies on {listed(x.sharding.device_set)}, but federation "
            f"{number} is {listed(devices)}. Lay it over all of these.",
            federation=number,
        )


def _agree(flat: dict[int, tuple[list[Any], Any]], plan: AveragingPlan, over: Federations) -> None:
    """Refuse in every process when federations gave different trees or weights."""
    said = {}
    for number, (leaves, structure) in flat.items():
        for x in leaves:
            _check(x, [over.devices[rank] for rank in _ranks(plan, number)], number)
        shapes = listed([f"{x.dtype}{list(x.shape)}" for x in leaves], limit=len(leaves) + 1)
        said[number] = f"{structure} of {shapes}; shares {plan.shares}, averages_replicas={plan.averages_replicas}"
    first = next(iter(said))
    for number, text in said.items():
        if text != said[first]:
            raise _differs(f"federation {number}", text, f"federation {first}", said[first])
    for place, text in enumerate(over.gathered(said[first])):
        if text != said[first]:
            raise _differs(f"the process of rank {place}", text, f"federation {first}", said[first])


def _differs(one: str, its: str, other: str, others: str) -> AgreementError:
    return AgreementError(
        f"federated_mean: {one} gave {its}; {other} gave {others}. Give the same containers, shapes, dtypes and "
        f"weights for every federation."
    )


def _ranks(plan: AveragingPlan, number: int) -> tuple[int, ...]:
    first = sum(plan.topology.sizes[:number])
    return tuple(range(first, first + plan.topology.sizes[number]))
