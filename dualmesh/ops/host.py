"""Plain Python objects between processes: barrier, broadcast, all_gather.

Arrays travel with `ops`. None of these is differentiable, and none belongs in compiled code.
"""

from typing import Any

from dualmesh.backend.state import ParallelState
from dualmesh.ops.checks import checked_index, resolve_axis
from dualmesh.runtime.scope import resolve_state
from dualmesh.topology.topology import Axis


def barrier(*, state: ParallelState | None = None) -> None:
    """Return once every process of the state is here. *Collective over the state.*"""
    owner = resolve_state("host.barrier", state)
    owner.require_ready("host.barrier")
    if owner.world_size > 1:
        owner.host.barrier()


def broadcast(value: Any, axis: Axis = "world", src: int = 0, *, state: ParallelState | None = None) -> Any:
    """Return the object of index `src` of the axis. *Collective over the axis.*"""
    owner, axis, size = resolve_axis("host.broadcast", axis, state)
    src = checked_index("host.broadcast", "src", src, axis, size)
    return value if size == 1 else owner.host.broadcast(value, axis, src=src)


def all_gather(value: Any, axis: Axis = "world", *, state: ParallelState | None = None) -> list[Any]:
    """Return the objects of all indices of the axis, in index order. *Collective over the axis.*"""
    owner, axis, size = resolve_axis("host.all_gather", axis, state)
    return [value] if size == 1 else owner.host.all_gather(value, axis)
