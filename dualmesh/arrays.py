"""Global arrays over the ranks of a state: lay one out, read it back, build it from blocks.

What a spec means in integers is in `partition_spec`, what the frameworks make of it in the backends.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

from dualmesh import host
from dualmesh.ambient import meant
from dualmesh.arguments import items_of
from dualmesh.covers import covering_slices
from dualmesh.errors import ShardingError
from dualmesh.lazy import np
from dualmesh.partition_spec import P
from dualmesh.resolution import positive
from dualmesh.state import ParallelState


def distribute(array: Any, spec: Any, *, state: ParallelState | None = None) -> Any:
    """Lay a global host array over the ranks. *Local*: each process cuts its part of its own copy.

    Args:
        array: The global array, equal on every process.
        spec: A `dm.P` (or jax PartitionSpec), at most one entry per dim.

    Returns:
        A DTensor, jax Array or simulated array of the same global shape.

    Raises:
        ShapeError: A dim that its axes do not divide.
    """
    return _ready("distribute", state).arrays.distribute(array, P.of(spec))


def to_numpy(x: Any, *, state: ParallelState | None = None) -> Any:
    """Return the global value as a numpy array, on every process. *Collective over the state.*"""
    return _ready("to_numpy", state).arrays.to_numpy(x)


def shard_local(block: Any, spec: Any, *, state: ParallelState | None = None, check: bool = False) -> Any:
    """Build a global array from what each process holds, its `local_slices`. *Local*; with `check` *collective*.

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
    """Return the same global value laid out as `spec` says; the constraint inside a JAX jit. *Collective.*"""
    return _ready("constrain", state).arrays.constrain(x, P.of(spec))


def local_slices(
    spec: Any, shape: Sequence[int], rank: int | None = None, *, state: ParallelState | None = None
) -> tuple[slice, ...]:
    """Return the slice of a global array of `shape` that a rank holds, one slice per dim. *Pure.*

    Args:
        rank: A session rank; None: this process' rank, or the smallest slice that covers what all of its ranks hold.
    """
    where = "local_slices"
    owner = meant(where, state)
    shape = tuple(positive(where, "shape", size, least=0) for size in items_of(where, "shape", shape))
    ranks = (rank,) if rank is not None else owner.local_ranks or (owner.own_rank(),)
    return covering_slices(owner.topology, P.of(spec), shape, [owner.grid_rank(one) for one in ranks])


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


def _digest(block: Any, part: tuple[slice, ...]) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(np.asarray(block)[part]).tobytes()).digest()


def _ready(where: str, state: ParallelState | None) -> ParallelState:
    owner = meant(where, state)
    owner.require_ready(where)
    return owner
