"""`tap`: a name for a value in a program, by which two programs can be compared place by place.

Without a recording or a fault (`recorder`, `faults`) a tap returns its argument and costs a few nanoseconds.
"""

import itertools
import threading
from collections.abc import Callable
from typing import Any, Protocol

from dualmesh._support.optional_imports import np
from dualmesh.arrays import transforms
from dualmesh.backend.state import ParallelState
from dualmesh.errors import ArgumentError, ArrayTypeError, OutsideShardMapError
from dualmesh.runtime.scope import get_parallel_state
from dualmesh.sharding.partition_spec import P, global_shape, slices_of
from dualmesh.testing.instruments import instruments_of
from dualmesh.testing.recordings import Entry
from dualmesh.topology.roles import expand_axes, stage_axes
from dualmesh.topology.topology import Topology

NO_SPEC = (
    "tap {name!r}: {spec!r} is partial, so over which axes its gradient is summed is not said. Give grad_spec=: the "
    "same entries, partial over the axes along which gradients are still to be summed."
)


class Sink(Protocol):
    """What gets the blocks."""

    def note(self, make: Callable[[int], Entry], name: str, kind: str, rank: int) -> None:
        """Keep a block; `make` gets the number of times that this rank has passed this tap."""


class _Watch:
    """What this process is being watched for."""

    sink: Sink | None = None
    faults: int = 0
    orders = itertools.count()


class _Place(threading.local):
    """The tap that this thread passed last."""

    def __init__(self) -> None:
        self.name: str | None = None


watch = _Watch()
place = _Place()


def tap(name: str, x: Any, spec: Any = None, *, grad_spec: Any = None, state: ParallelState | None = None) -> Any:
    """Return `x`; while a recording runs, keep its value, and its gradient when backward comes. *Local.*

    Works on per-rank blocks (torch code, functions given to `dm.shard_map`) and on global arrays (DTensors; JAX arrays,
    inside jit too). Use what it returns: the gradient is that of the returned value. All ranks of the state pass it,
    of a pipeline (role "stages") those of one stage or more; ranks that do not are named when recordings are compared.

    Args:
        name: Its name in every program that is compared; a name may pass several times, once per step for example.
        x: The value.
        spec: How the global array is split; None: whole on every rank.
        grad_spec: How the gradient of a per-rank block lies. None: each rank that holds the same block has a part, and
            the parts are summed, as for `dm.shard_map`'s exact transposes. Where ranks that hold the same block have
            its whole gradient each, as between `dm.ops.enter` and `dm.ops.leave`, give the spec again; axes in its
            `partial` are summed.
    """
    if watch.sink is None and not watch.faults:
        return x
    owner = get_parallel_state() if state is None else state
    laid = P() if spec is None else P.of(spec)
    place.name = name
    if watch.sink is None:
        return x
    if not _is_block(owner, x):
        unsummed = P(*laid.entries)
        return transforms.shard_map(lambda block: tap(name, block, unsummed, state=owner), unsummed, unsummed, owner)(x)
    note = _note(name, "value", owner, laid, laid.partial)
    return instruments_of(owner.backend).watched(owner, x, note, _gradient(name, owner, laid, grad_spec))


def _is_block(owner: ParallelState, x: Any) -> bool:
    """Tell whether a value is a rank's own block, here."""
    try:
        owner.collectives.admit("tap", x, "world")
    except (ArrayTypeError, OutsideShardMapError):
        return False
    return True


def _gradient(name: str, owner: ParallelState, laid: P, grad_spec: Any) -> Callable[[], Callable[[int, Any], None]]:
    if grad_spec is not None:
        spec = P.of(grad_spec)
    elif laid.partial:
        raise ArgumentError(NO_SPEC.format(name=name, spec=laid), name=name, spec=laid)
    else:
        used = set(expand_axes(owner.topology, laid.axes))
        spec = P(*laid.entries, partial=[axis for axis in owner.topology.base_axes if axis not in used])
    return lambda: _note(name, "gradient", owner, spec, spec.partial)


def _note(name: str, kind: str, owner: ParallelState, spec: P, partial: tuple[str, ...]) -> Callable[[int, Any], None]:
    """Return what keeps a block; its place in the order of the run is now."""
    order = next(watch.orders)
    topology, grid_rank, entries = owner.topology, owner.grid_rank, P(*spec.entries)
    together = _stage_of(owner)

    def note(rank: int, block: Any) -> None:
        place_in_grid = grid_rank(rank)
        shape = global_shape(topology, entries, block.shape, what=f"tap {name!r}")
        start = tuple(cut.start for cut in slices_of(topology, entries, shape, place_in_grid))
        part = topology.index(partial, place_in_grid) if partial else 0
        kept = storable(block)

        def make(occurrence: int) -> Entry:
            dtype = str(block.dtype)
            return Entry(name, kind, occurrence, order, rank, start, shape, part, together(rank), dtype, kept)

        if watch.sink is not None:
            watch.sink.note(make, name, kind, rank)

    return note


def _stage_of(owner: ParallelState) -> Callable[[int], tuple[int, ...]]:
    """Return what says which ranks pass a tap with a rank: all of the state; of a pipeline, those of its stage."""
    topology, stages = owner.topology, stage_axes(owner.topology)
    members: dict[tuple[int, ...], list[int]] = {}
    numbers = {rank: _stage_number(topology, stages, owner.grid_rank(rank)) for rank in sorted(owner.members)}
    for rank, number in numbers.items():
        members.setdefault(number, []).append(rank)
    together = {number: tuple(ranks) for number, ranks in members.items()}
    return lambda rank: together[numbers[rank]]


def _stage_number(topology: Topology, stages: tuple[str, ...], rank: int) -> tuple[int, ...]:
    """Return the index of a rank along each axis of stages; of rank groups, -1 where it is in none."""
    return tuple(topology.index(axis, rank) if topology.is_member(axis, rank) else -1 for axis in stages)


def storable(block: Any) -> Any:
    """Return a block as .npy files hold it: narrow floats that numpy lacks as their values in float32. *Pure.*"""
    found = np.array(block, order="C")
    return found.astype(np.float32) if found.dtype.type.__module__ == "ml_dtypes" else found
