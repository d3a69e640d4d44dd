"""What a framework adds to a transfer group: a native group of its processes.

The groups themselves are in `group`.
"""

from abc import ABC, abstractmethod
from typing import Any


class Carrier(ABC):
    """What a framework adds to a transfer group: a native group of its processes, where it has such a thing."""

    backend: str

    @abstractmethod
    def offer(self, rank: int) -> dict[str, Any]:
        """Return what the others must know to make the native group, as plain data. *Local.*"""

    @abstractmethod
    def join(self, name: str, rank: int, hosts: list[str], told: list[dict[str, Any]], timeout_s: float) -> Any:
        """Return the native group, or None. *Collective over the group, with a timeout.*

        Raises:
            RuntimeError: It cannot be made.
        """

    def is_live(self, native: Any) -> bool:
        """Whether a native group still works. *Local.*"""
        return True

    @abstractmethod
    def end(self, native: Any) -> None:
        """End a native group, or what was offered for one that was not made (None). *Local.*"""


class NoCarrier(Carrier):
    """Of a framework without groups of processes."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def offer(self, rank: int) -> dict[str, Any]:
        return {}

    def join(self, name: str, rank: int, hosts: list[str], told: list[dict[str, Any]], timeout_s: float) -> None:
        """Return None. *Local.*"""

    def end(self, native: Any) -> None:
        """Do nothing. *Local.*"""
