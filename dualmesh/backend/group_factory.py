"""What a `DistributedState` needs of a framework: meshes, groups, devices and streams, behind one small abstract face.

Which ranks they are for is planned in `federated_topology`. Here is also the fill of plain lists, for simulated worlds.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from dualmesh._support.optional_imports import np
from dualmesh.errors import BackendError
from dualmesh.topology.averaging import AveragingPlan
from dualmesh.topology.resolve import positive

Grid = tuple[tuple[int, ...], ...]
"""Ranks in rows."""


class Fabric(ABC):
    """Makes what a distributed state holds; one per framework."""

    @abstractmethod
    def is_running(self) -> bool:
        """Whether the world exists, so that groups can be made. *Local.*"""

    @abstractmethod
    def check_place(self, where: str, rank: int, world_size: int) -> None:
        """Refuse a place that this process does not have in the running world. *Local.*

        Raises:
            RankError: It is another.
        """

    @abstractmethod
    def communication_backends(self) -> tuple[str, ...]:
        """Return the communication backends that can be used here, such as "gloo". *Local.*"""

    @abstractmethod
    def device_types(self) -> tuple[str, ...]:
        """Return the kinds of device that can be used here, such as "cpu". *Local.*"""

    @abstractmethod
    def make_mesh(self, rows: Grid, names: tuple[str, ...], device_type: str) -> Any:
        """Return a mesh of ranks. *Collective over its ranks.*

        Args:
            rows: The ranks; one row for a mesh of one axis.
            names: One axis name, or two with the slower first.
        """

    @abstractmethod
    def mesh_rows(self, mesh: Any) -> Grid:
        """Return the ranks of a mesh in rows. *Local.*"""

    @abstractmethod
    def make_group(self, ranks: tuple[int, ...], backend: str, description: str | None) -> Any:
        """Return a new group in which every rank's index is its place in the list. *Collective over its ranks.*"""

    @abstractmethod
    def group_ranks(self, group: Any) -> tuple[int, ...]:
        """Return the ranks of a group, in index order. *Local.*"""

    @abstractmethod
    def release(self, made: Any) -> None:
        """End a mesh or group that was made here, and whatever communicators nobody else uses. *Local*; idempotent."""

    @abstractmethod
    def make_streams(self, device: Any, count: int) -> tuple[Any, ...] | None:
        """Return streams on which groups communicate side by side, or None where devices have none. *Local.*"""

    def federated_mean(self, tree: Any, plan: AveragingPlan, state: Any) -> Any:
        """Carry a plan out over the groups of a `DistributedState`. *Collective over the plan's ranks.*

        Raises:
            BackendError: Nothing communicates here.
        """
        raise BackendError(
            f"federated_mean: a {type(self).__name__} carries nothing. Use the fabric of a running torch or JAX world.",
            fabric=self,
        )


@dataclass(frozen=True)
class ListedMesh:
    """A mesh that is its ranks and axis names."""

    rows: Grid
    names: tuple[str, ...]
    device_type: str


@dataclass(frozen=True, eq=False)
class ListedGroup:
    """A group that is its ranks; every one is another."""

    ranks: tuple[int, ...]
    backend: str
    description: str | None


@dataclass(frozen=True)
class ListedStream:
    """A stream that is its number on a device."""

    device: str
    number: int


@dataclass(frozen=True)
class ListedFabric(Fabric):
    """Meshes and groups as plain lists: nothing communicates.

    Args:
        running: Whether to act as inside a world.
    """

    running: bool = True

    def is_running(self) -> bool:
        return self.running

    def check_place(self, where: str, rank: int, world_size: int) -> None:
        """Accept any place: lists are nobody's. *Local.*"""

    def communication_backends(self) -> tuple[str, ...]:
        return ("gloo", "nccl", "mpi", "ucc", "xccl")

    def device_types(self) -> tuple[str, ...]:
        return ("cpu", "cuda", "xpu")

    def make_mesh(self, rows: Grid, names: tuple[str, ...], device_type: str) -> ListedMesh:
        return ListedMesh(rows, names, device_type)

    def mesh_rows(self, mesh: Any) -> Grid:
        rows: Grid = mesh.rows
        return rows

    def make_group(self, ranks: tuple[int, ...], backend: str, description: str | None) -> ListedGroup:
        return ListedGroup(tuple(ranks), backend, description)

    def group_ranks(self, group: Any) -> tuple[int, ...]:
        ranks: Sequence[int] = group.ranks
        return tuple(ranks)

    def release(self, made: Any) -> None:
        """Do nothing: lists hold nothing. *Local.*"""

    def make_streams(self, device: Any, count: int) -> tuple[ListedStream, ...]:
        return tuple(ListedStream(str(device), number) for number in range(count))


def create_device_mesh(shape: Iterable[int]) -> Any:
    """Return the ranks 0, 1, .. as a numpy array of a shape, the last axis fastest. *Pure.*

    Raises:
        ArgumentError: The shape has a size that is no positive integer.

    >>> create_device_mesh((2, 3)).tolist()
    [[0, 1, 2], [3, 4, 5]]
    """
    sizes = tuple(positive("create_device_mesh", "size", size) for size in shape)
    return np.arange(prod(sizes), dtype=np.int32).reshape(sizes)


def device_kind(device: Any) -> str:
    """Return the kind of a device: "cuda" of "cuda:1". *Pure.*"""
    return str(device).partition(":")[0]
