"""Global arrays over the ranks of a state: lay one out, read it back, build it from blocks.

What a spec means in integers is in `partition_spec`, what the frameworks make of it in the backends.
"""

from collections.abc import Sequence
from typing import Any

from dualmesh.ambient import meant
from dualmesh.arguments import items_of
from dualmesh.partition_spec import P, slices_of
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


def shard_local(block: Any, spec: Any, *, state: ParallelState | None = None) -> Any:
    """Build a global array from what each process holds. *Local.*

    Args:
        block: This rank's block; for a process with several ranks, the smallest slice of the global array that
            covers the blocks of all of them.
        spec: How the global array is split.
    """
    return _ready("shard_local", state).arrays.shard_local(block, P.of(spec))


def constrain(x: Any, spec: Any, *, state: ParallelState | None = None) -> Any:
    """Return the same global value laid out as `spec` says; the constraint inside a JAX jit. *Collective.*"""
    return _ready("constrain", state).arrays.constrain(x, P.of(spec))


def local_slices(
    spec: Any, shape: Sequence[int], rank: int | None = None, *, state: ParallelState | None = None
) -> tuple[slice, ...]:
    """Return the slice of a global array of `shape` that a rank holds, one slice per dim. *Pure.*

    Args:
        rank: A session rank; None: this process' rank.
    """
    where = "local_slices"
    owner = meant(where, state)
    shape = tuple(positive(where, "shape", size, least=0) for size in items_of(where, "shape", shape))
    session_rank = owner.own_rank() if rank is None else rank
    return slices_of(owner.topology, P.of(spec), shape, owner.grid_rank(session_rank))


def _ready(where: str, state: ParallelState | None) -> ParallelState:
    owner = meant(where, state)
    owner.require_ready(where)
    return owner
