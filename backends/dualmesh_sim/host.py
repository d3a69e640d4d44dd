"""Plain Python objects between simulated ranks, or the one process that holds them all.

Arrays travel with `collectives`.
"""

import pickle
from typing import TYPE_CHECKING, Any

from dualmesh.backend.host import HostObjects
from dualmesh.topology.topology import Axis
from dualmesh_sim.rendezvous import place

if TYPE_CHECKING:
    from dualmesh_sim.state import SimState


class SimHostObjects(HostObjects):
    """Objects travel pickled, as between processes. Outside `shard_map` this process speaks for every index."""

    def __init__(self, state: "SimState") -> None:
        self._state = state

    def barrier(self) -> None:
        self._swap("barrier()", None, "world")

    def broadcast(self, value: Any, axis: Axis, *, src: int) -> Any:
        return self._swap(f"host.broadcast(src={src})", value, axis)[src]

    def all_gather(self, value: Any, axis: Axis) -> list[Any]:
        return self._swap("host.all_gather()", value, axis)

    def _swap(self, call: str, value: Any, axis: Axis) -> list[Any]:
        sent = pickle.dumps(value)
        here = place()
        if here is None:
            return [pickle.loads(sent) for _ in range(self._state.size(axis))]
        return [pickle.loads(got) for got in here.run.exchange(here.rank, self._state.ranks(axis), call, sent)]
