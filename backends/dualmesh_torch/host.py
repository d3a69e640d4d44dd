"""Plain Python objects between processes, pickled, over the groups of lane "data".

Tensors travel with `collectives`.
"""

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dualmesh.backend.host import HostObjects
from dualmesh.topology.topology import Axis
from dualmesh_torch.collectives.exchanges import exchange

if TYPE_CHECKING:
    from dualmesh_torch.state import TorchState


class TorchHostObjects(HostObjects):
    """`src` is an index of the axis; objects come in index order."""

    def __init__(self, state: "TorchState") -> None:
        self._state = state

    def barrier(self) -> None:
        self._gathered("host.barrier", None, "world")

    def broadcast(self, value: Any, axis: Axis, *, src: int) -> Any:
        held, member = [value], self._state.member(axis)
        with exchange("host.broadcast", member, src=src):
            dist.broadcast_object_list(held, group=member.group, group_src=src)
        return held[0]

    def all_gather(self, value: Any, axis: Axis) -> list[Any]:
        return self._gathered("host.all_gather", value, axis)

    def _gathered(self, where: str, value: Any, axis: Axis) -> list[Any]:
        member = self._state.member(axis)
        found: list[Any] = [None] * member.size
        with exchange(where, member):
            dist.all_gather_object(found, value, group=member.group)
        return found
