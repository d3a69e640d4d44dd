"""Plain Python objects between processes, as a backend moves them.

Arguments arrive checked (`ops.host` does that).
"""

from abc import ABC, abstractmethod
from typing import Any

from dualmesh.topology.topology import Axis


class HostObjects(ABC):
    """Plain Python objects between processes."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once every process of the state is here. Collective over the state."""

    @abstractmethod
    def broadcast(self, value: Any, axis: Axis, *, src: int) -> Any:
        """Return the object of index `src`. Collective over the axis."""

    @abstractmethod
    def all_gather(self, value: Any, axis: Axis) -> list[Any]:
        """Return the objects of all indices, in index order. Collective over the axis."""
