"""Global arrays over the ranks of a state: lay one out, read it back, build it from blocks.

What a spec means in integers is in `partition_spec`, what the frameworks make of it in the backends.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

from dualmesh._support.checks import check_flag, check_items
from dualmesh._support.optional_imports import np
from dualmesh.backend.state import ParallelState
from dualmesh.errors import ArgumentError, ArrayTypeError, DualmeshError, RankError, ShardingError, listed
from dualmesh.ops import host
from dualmesh.runtime.scope import resolve_state
from dualmesh.sharding.partition_spec import P, dim_layouts
from dualmesh.sharding.slices import clip_slices, covering_slices, padded_shape, trim
from dualmesh.topology.resolve import positive


def distribute(
    array: Any,
    spec: Any,
    *,
    pad: bool = False,
    src: int | None = None,
    check: bool = False,
    state: ParallelState | None = None,
) -> Any:
    """Lay a global host array over the ranks. *Local*; with `src` or `check` *collective over the state*.

    The result has memory of its own: the array may be written to at once.

    Args:
        array: The global array. Every process holds an equal copy and cuts its part of it; with `src` only the process
            of that rank gives it, and what others give is not looked at.
        spec: A `dm.P` (or jax PartitionSpec), at most one entry per dim.
        pad: Put zeros at the end of dims that their axes do not divide; the result has the padded shape.
            `to_numpy(x, shape=...)` takes them off, `local_slices(..., pad=True)` says what a rank has of the array.
        src: The session rank that holds the array.
        check: Compare hashes of the copies, for debugging: nothing else would say that they differ.

    Returns:
        A DTensor, jax Array or simulated array of the same global shape.

    Raises:
        ShapeError: A dim that its axes do not divide, without `pad`.
        RankError: `src` is no rank of the state.
        ShardingError: With `check`: the copies differ. With `src`: that rank's array was refused there.
    """
    where = "distribute"
    owner, spec = _ready(where, state), P.of(spec)
    pad, check = check_flag(where, "pad", pad), check_flag(where, "check", check)
    if src is None:
        made = owner.arrays.distribute(_pad(owner, array, spec) if pad else array, spec)
        if check:
            _check_equal(owner, array)
        return made
    if check:
        raise ArgumentError(
            f"{where}: src={src!r} with check=True. One rank holds the array, or all do and are compared: give one.",
            src=src,
        )
    return _from_one(owner, array, spec, src, pad)


def to_numpy(x: Any, *, shape: Sequence[int] | None = None, state: ParallelState | None = None) -> Any:
    """Return the global value as a numpy array, a copy, on every process. *Collective over the state.*

    Args:
        shape: The shape that the array had before `distribute(pad=True)`; what was put there is taken off.

    Raises:
        ShapeError: The array has another number of dims than `shape`, or is smaller.
    """
    whole = _ready("to_numpy", state).arrays.to_numpy(x)
    return whole if shape is None else trim("to_numpy", whole, shape)


def shard_local(block: Any, spec: Any, *, state: ParallelState | None = None, check: bool = False) -> Any:
    """Build a global array from what each process holds, its `local_slices`. *Local*; with `check` *collective*.

    The result has memory of its own: the block may be written to at once.

    Args:
        block: This rank's block; for a process with several ranks, the smallest slice of the global array that
            covers the blocks of all of them.
        spec: How the global array is split.
        check: Compare what processes give for the same rows, for debugging: a loader that seeds by process, not by
            `data_index`, gives ranks of one data index different rows, and nothing else would say so.

    Raises:
        ShardingError: With `check`: ranks that hold the same slice were given different values.
    """
    owner, spec = _ready("shard_local", state), P.of(spec)
    made = owner.arrays.shard_local(block, spec)
    if check:
        _check_copies(owner, block, spec, made.shape)
    return made


def constrain(x: Any, spec: Any, *, state: ParallelState | None = None) -> Any:
    """Return the same global value laid out as `spec` says; the constraint inside a JAX jit. *Collective.*

    What lies so already may come back itself, in the same memory.
    """
    return _ready("constrain", state).arrays.constrain(x, P.of(spec))


def local_slices(
    spec: Any,
    shape: Sequence[int],
    rank: int | None = None,
    *,
    pad: bool = False,
    state: ParallelState | None = None,
) -> tuple[slice, ...]:
    """Return the slice of a global array of `shape` that a rank holds, one slice per dim. *Pure.*

    Args:
        rank: A session rank; None: this process' rank, or the smallest slice that covers what all of its ranks hold.
        pad: The array is padded where its sizes do not divide; the slice is what the rank holds of the array itself,
            the beginning of its block, and may be short or empty.
    """
    where = "local_slices"
    owner = resolve_state(where, state)
    shape = tuple(positive(where, "shape", size, least=0) for size in check_items(where, "shape", shape))
    ranks = (rank,) if rank is not None else owner.local_ranks or (owner.own_rank(),)
    places, topology, spec = [owner.grid_rank(one) for one in ranks], owner.topology, P.of(spec)
    if not check_flag(where, "pad", pad):
        return covering_slices(topology, spec, shape, places)
    return clip_slices(covering_slices(topology, spec, padded_shape(topology, spec, shape), places), shape)


def _pad(owner: ParallelState, array: Any, spec: P) -> Any:
    """Return a host array with zeros where the spec's axes do not divide it; as it is where they do."""
    shape = tuple(np.shape(array))
    padded = padded_shape(owner.topology, spec, shape, what="distribute: array")
    return array if padded == shape else owner.arrays.grown(array, padded)


def _from_one(owner: ParallelState, array: Any, spec: P, src: Any, pad: bool) -> Any:
    """Lay out what one rank holds; all refuse together, and only that rank looks at its array."""
    where, src = "distribute", positive("distribute", "src", src, least=0)
    if src not in owner.members:
        raise RankError(
            f"{where}: src={src} is no rank of {owner.label}. Ranks: {listed(owner.members)}.", src=src, state=owner
        )
    refusal: DualmeshError | None = None
    if src in owner.local_ranks:
        try:
            array = _pad(owner, array, spec) if pad else array
            dim_layouts(owner.topology, spec, np.shape(array), what=f"{where}: array")
            if len(owner.local_ranks) == owner.world_size:
                return owner.arrays.distribute(array, spec)
            array = owner.arrays.checked(array)
        except DualmeshError as error:
            refusal = error
    place = tuple(owner.members).index(src)
    said = host.broadcast(refusal and str(refusal), "world", place, state=owner)
    if refusal is not None:
        raise refusal
    if said is not None:
        raise ShardingError(f"{where}: rank {src}, which holds the array, refused it: {said}", src=src)
    return owner.arrays.handed_out(array, spec, place)


def _check_equal(owner: ParallelState, array: Any) -> None:
    """Compare hashes of the copies of a host array."""
    try:
        value = owner.arrays.to_numpy(array if hasattr(array, "dtype") else np.asarray(array))
    except ArrayTypeError as error:
        refusal = str(error).removeprefix("to_numpy: ")
        raise ArrayTypeError(f"distribute with check=True: {refusal}", found=type(array)) from error
    mine = (tuple(value.shape), str(value.dtype), _digest(value, ...))
    said = host.all_gather(dict.fromkeys(owner.local_ranks, mine), state=owner)
    copies = sorted((rank, one) for held in said for rank, one in held.items())
    (first, expected), *others = copies
    for rank, found in others:
        if found != expected:
            (shape, dtype, _), (other_shape, other_dtype, _) = expected, found
            raise ShardingError(
                f"distribute: ranks {first} and {rank} hold different arrays ({dtype}{list(shape)} and "
                f"{other_dtype}{list(other_shape)}). Load or seed alike everywhere, or say whose counts: src=.",
                ranks=(first, rank),
            )


def _check_copies(owner: ParallelState, block: Any, spec: P, shape: Sequence[int]) -> None:
    """Compare hashes of the parts that several processes supplied."""
    held = local_slices(spec, shape, state=owner)
    mine = {}
    for rank in owner.local_ranks:
        part = local_slices(spec, shape, rank, state=owner)
        inside = tuple(
            slice(cut.start - all_.start, cut.stop - all_.start) for cut, all_ in zip(part, held, strict=True)
        )
        mine[rank] = (tuple((cut.start, cut.stop) for cut in part), _digest(block, inside))
    said = {rank: one for parts in host.all_gather(mine, state=owner) for rank, one in parts.items()}
    first: dict[Any, int] = {}
    for rank, (part, digest) in sorted(said.items()):
        other = first.setdefault(part, rank)
        if said[other][1] != digest:
            raise ShardingError(
                f"shard_local: ranks {other} and {rank} both hold the slice {list(part)} of {tuple(shape)}, but were "
                f"given different values. Load what dm.local_slices says, the same on all ranks of one data index.",
                ranks=(other, rank),
                spec=spec,
            )


def _digest(block: Any, part: Any) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(np.asarray(block)[part]).tobytes()).digest()


def _ready(where: str, state: ParallelState | None) -> ParallelState:
    owner = resolve_state(where, state)
    owner.require_ready(where)
    return owner
