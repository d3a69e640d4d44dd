"""Plain Python objects between processes; one process that holds every rank speaks for all of them.

Arrays travel with `collectives`.
"""

import pickle
from typing import TYPE_CHECKING, Any

from jax.experimental import multihost_utils

from dualmesh.errors import BackendError
from dualmesh.topology import Axis
from dualmesh.verbs import HostObjects

if TYPE_CHECKING:
    from dualmesh_jax.state import JaxState


class JaxHostObjects(HostObjects):
    """Objects travel pickled, as between processes."""

    def __init__(self, state: "JaxState") -> None:
        self._state = state

    def barrier(self) -> None:
        if self._state.world.process_count > 1:
            multihost_utils.sync_global_devices(f"dualmesh barrier of {self._state.label}")

    def broadcast(self, value: Any, axis: Axis, *, src: int) -> Any:
        return self._copies("host.broadcast", value, axis)[src]

    def all_gather(self, value: Any, axis: Axis) -> list[Any]:
        return self._copies("host.all_gather", value, axis)

    def _copies(self, where: str, value: Any, axis: Axis) -> list[Any]:
        if self._state.local_ranks != self._state.members:
            raise BackendError(
                f"{where}: {self._state.label} spans several JAX processes, between which dualmesh moves no Python "
                f"objects yet. Use jax.experimental.multihost_utils, or keep the state in one process.",
                state=self._state,
            )
        sent = pickle.dumps(value)
        return [pickle.loads(sent) for _ in range(self._state.size(axis))]
