"""`JaxFabric`: the meshes of a `DistributedState` over JAX devices; a group is a mesh of one axis.

Which ranks they are for is planned in `dualmesh.topology.federated_topology`.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from dualmesh.backend.group_factory import Fabric, Grid
from dualmesh.errors import RankError, SessionError
from dualmesh.topology.averaging import AveragingPlan
from dualmesh_jax.federated import Federations, mean_of_trees
from dualmesh_jax.mesh.meshes import mesh_of
from dualmesh_jax.store import JaxStore

GROUP = "group"
"""The axis of a mesh that is a group: an index along it is a place in the list."""


class JaxFabric(Fabric):
    """Meshes over lists of devices. Nothing is exchanged to make one, and equal ones are equal.

    Args:
        devices: The world's, in rank order; empty while there is none.
        store: What processes exchange objects through, or None in a world of one.
    """

    def __init__(self, devices: Sequence[jax.Device], store: JaxStore | None) -> None:
        self._devices = tuple(devices)
        self._store = store
        self._rank_of = {device: rank for rank, device in enumerate(self._devices)}

    def is_running(self) -> bool:
        return bool(self._devices)

    def check_place(self, where: str, rank: int, world_size: int) -> None:
        mine = [own for own, device in enumerate(self._devices) if device.process_index == jax.process_index()]
        if world_size != len(self._devices) or rank not in mine:
            raise RankError(
                f"{where}: set_global said rank {rank} of {world_size}, but this process holds the ranks {mine} of "
                f"{len(self._devices)}. Call set_global with the running world's numbers.",
                rank=rank,
                world_size=world_size,
            )

    def communication_backends(self) -> tuple[str, ...]:
        return ("gloo", "mpi") if self.device_types() == ("cpu",) else ("nccl", "gloo")

    def device_types(self) -> tuple[str, ...]:
        kind = jax.default_backend() if self._devices else "cpu"
        return ("cpu",) if kind == "cpu" else ("cpu", "cuda" if kind == "gpu" else kind)

    def make_mesh(self, rows: Grid, names: tuple[str, ...], device_type: str) -> Mesh:
        devices = [self._device(rank) for row in rows for rank in row]
        return mesh_of(devices, (len(rows), len(rows[0]))[-len(names) :], names)

    def mesh_rows(self, mesh: Any) -> Grid:
        width = mesh.devices.shape[-1]
        ranks = [self._rank_of[device] for device in mesh.devices.flat]
        return tuple(tuple(ranks[first : first + width]) for first in range(0, len(ranks), width))

    def make_group(self, ranks: tuple[int, ...], backend: str, description: str | None) -> Mesh:
        return mesh_of([self._device(rank) for rank in ranks], (len(ranks),), (GROUP,))

    def group_ranks(self, group: Any) -> tuple[int, ...]:
        return tuple(self._rank_of[device] for device in group.devices.flat)

    def release(self, made: Any) -> None:
        """Do nothing: a mesh holds no communicators. *Local.*"""

    def make_streams(self, device: Any, count: int) -> None:
        """Return None: JAX orders its own work."""

    def federated_mean(self, tree: Any, plan: AveragingPlan, state: Any) -> Any:
        whole = mesh_of(self._devices, (len(self._devices),), ("world",))
        return mean_of_trees(tree, plan, Federations(whole, self._gathered))

    def _gathered(self, said: str) -> list[str]:
        if self._store is None:
            return [said]
        processes = sorted({device.process_index for device in self._devices})
        found = self._store.exchanged("federated_mean", processes, said.encode())
        return [found[process].decode() for process in processes]

    def _device(self, rank: int) -> jax.Device:
        if not 0 <= rank < len(self._devices):
            raise SessionError(
                f"DistributedState: there is no device for rank {rank} of {len(self._devices)}. Start the world first "
                f"(dm.init_distributed)."
            )
        return self._devices[rank]
