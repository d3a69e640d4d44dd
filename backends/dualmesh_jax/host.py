"""Plain Python objects between processes, pickled, through the store in which they met.

A process of several ranks speaks for all of them. Arrays travel with `collectives`.
"""

import pickle
from typing import TYPE_CHECKING, Any

import jax

from dualmesh.backend.host import HostObjects
from dualmesh.errors import BackendError, RankError, listed
from dualmesh.topology.topology import Axis

if TYPE_CHECKING:
    from dualmesh_jax.state import JaxState

SEVERAL_GROUPS = (
    "{where}: along {axis!r} of {label} the ranks {ranks} of this process lie in groups of different processes "
    "({groups}), and a process says and hears one thing. Ask over an axis that keeps its ranks together, or 'world'."
)
NO_STORE = (
    "{where}: {label} spans several processes, and jax {version} has no store that dualmesh knows to exchange Python "
    "objects through. Use jax.experimental.multihost_utils."
)


class JaxHostObjects(HostObjects):
    """`src` is an index of the axis; objects come in index order."""

    def __init__(self, state: "JaxState") -> None:
        self._state = state

    def barrier(self) -> None:
        self._gathered("host.barrier", None, "world", None)

    def broadcast(self, value: Any, axis: Axis, *, src: int) -> Any:
        return self._gathered("host.broadcast", value, axis, src)[src]

    def all_gather(self, value: Any, axis: Axis) -> list[Any]:
        return self._gathered("host.all_gather", value, axis, None)

    def _gathered(self, where: str, value: Any, axis: Axis, src: int | None) -> list[Any]:
        """Return the objects of all indices, or, where one is the source, at least its object."""
        speakers = self._speakers(where, axis)
        processes = sorted(set(speakers))
        if len(processes) == 1:
            sent = pickle.dumps(value)
            return [pickle.loads(sent) for _ in speakers]
        store = self._state.store
        if store is None:
            raise BackendError(NO_STORE.format(where=where, label=self._state.label, version=jax.__version__))
        speaks = src is None or speakers[src] == store.process
        said = store.exchanged(where, processes, pickle.dumps(value if speaks else None))
        return [pickle.loads(said[process]) for process in speakers]

    def _speakers(self, where: str, axis: Axis) -> tuple[int, ...]:
        """Return the process of every index along the axis in this process' group."""
        state, mine = self._state, self._state.local_ranks
        groups = {tuple(state.process_of[rank] for rank in state.ranks(axis, own)) for own in mine}
        if len(groups) > 1:
            shown = "; ".join(listed(group) for group in sorted(groups))
            text = SEVERAL_GROUPS.format(where=where, axis=axis, label=state.label, ranks=listed(mine), groups=shown)
            raise RankError(text, axis=axis, ranks=mine)
        return groups.pop()
