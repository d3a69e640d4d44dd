"""`TorchFabric`: the device meshes and process groups of a `DistributedState`.

Which ranks they are for is planned in `dualmesh.topology.federated_topology`; states have their groups from
`group_pool`.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dualmesh.backend.group_factory import Fabric, Grid
from dualmesh.errors import RankError, SessionError, listed
from dualmesh.topology.averaging import AveragingPlan
from dualmesh.topology.communicators import Membership, RankList
from dualmesh_torch.collectives.group_member import GroupMember
from dualmesh_torch.federated import average
from dualmesh_torch.mesh.group_pool import GroupPool, Key

_AVAILABLE: Mapping[str, Callable[[], bool]] = {
    "gloo": dist.is_gloo_available,
    "nccl": dist.is_nccl_available,
    "mpi": dist.is_mpi_available,
    "ucc": dist.is_ucc_available,
    "xccl": dist.is_xccl_available,
}


class _Held(NamedTuple):
    """A mesh or group, kept alive, and for whom the pool keeps its communicators."""

    made: Any
    user: object
    keys: list[Key]


class TorchFabric(Fabric):
    """Meshes share their groups with states; every `make_group` is a communicator of its own.

    Args:
        pool: The groups of the running world, or None while there is none.
    """

    def __init__(self, pool: GroupPool | None) -> None:
        self._pool = pool
        self._made: Counter[tuple[tuple[int, ...], str]] = Counter()
        self._held: dict[int, _Held] = {}

    def is_running(self) -> bool:
        return self._pool is not None and dist.group.WORLD is self._pool.default

    def check_place(self, where: str, rank: int, world_size: int) -> None:
        pool = self._live(where)
        if (rank, world_size) != (pool.rank, pool.size):
            raise RankError(
                f"{where}: set_global said rank {rank} of {world_size}, but this process is rank {pool.rank} of "
                f"{pool.size}. Call set_global with the running world's numbers.",
                rank=rank,
                world_size=world_size,
            )

    def communication_backends(self) -> tuple[str, ...]:
        return tuple(name for name, is_here in _AVAILABLE.items() if is_here())

    def device_types(self) -> tuple[str, ...]:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return ("cpu",) if accelerator is None else ("cpu", accelerator.type)

    def make_mesh(self, rows: Grid, names: tuple[str, ...], device_type: str) -> DeviceMesh:
        pool = self._live("make_mesh")
        row = next((row for row in rows if pool.rank in row), None)
        if row is None:
            raise RankError(f"make_mesh: rank {pool.rank} is not in {listed(rows)}. Only members call it.", rows=rows)
        column = tuple(other[row.index(pool.rank)] for other in rows)
        keys = [_hook_key(pool, line, device_type) for line in ((column, row) if len(names) == 2 else (row,))]
        user = object()
        held = pool.acquire(keys, user)
        groups, grid = [held[key] for key in keys], torch.tensor(row if len(names) == 1 else rows, dtype=torch.int)
        made = groups[0] if len(names) == 1 else groups
        mesh = DeviceMesh.from_group(made, device_type, mesh=grid, mesh_dim_names=names)
        self._held[id(mesh)] = _Held(mesh, user, keys)
        return mesh

    def mesh_rows(self, mesh: Any) -> Grid:
        ranks = mesh.mesh.tolist()
        return tuple(map(tuple, ranks if ranks and isinstance(ranks[0], list) else [ranks]))

    def make_group(self, ranks: tuple[int, ...], backend: str, description: str | None) -> dist.ProcessGroup:
        pool = self._live("make_group")
        if pool.rank not in ranks:
            raise RankError(f"make_group: rank {pool.rank} is not among {listed(ranks)}. Only members call it.")
        devices = [device for device, known in pool.device_backends.items() if known == backend]
        device_type = devices[0] if devices else "cpu" if backend == "gloo" else self.device_types()[-1]
        # Each member counts its groups of a list, so all give one group the same number.
        self._made[tuple(ranks), backend] += 1
        owner = f"initializers/{self._made[tuple(ranks), backend]}"
        key = Key(RankList(ranks), "data", backend, device_type, (), owner)
        user = object()
        group = pool.acquire([key], user)[key]
        self._held[id(group)] = _Held(group, user, [key])
        return group

    def group_ranks(self, group: Any) -> tuple[int, ...]:
        return tuple(dist.get_process_group_ranks(group))

    def release(self, made: Any) -> None:
        held = self._held.pop(id(made), None)
        if held is not None and self._pool is not None:
            self._pool.release(held.user, held.keys)

    def make_streams(self, device: Any, count: int) -> tuple[Any, ...] | None:
        if not torch.accelerator.is_available() or str(device).startswith("cpu"):
            return None
        kind = self.device_types()[-1]
        place = torch.device(kind, device) if isinstance(device, int) else torch.device(device)
        return tuple(torch.Stream(place) for _ in range(count))

    def federated_mean(self, tree: Any, plan: AveragingPlan, state: Any) -> Any:
        pool = self._live("federated_mean")
        handles = {"exchange": state.federated_group, "mean": state.replica_group, "broadcast": state.replica_group}

        def member(action: str) -> GroupMember:
            group = (handles.get(action) or (pool.default,))[0]
            return GroupMember(group, group.size(), group.rank(), pool)

        return average(tree, plan, state.rank, member, plan.topology.federation(state.rank))

    def _live(self, where: str) -> GroupPool:
        if self._pool is None or not self.is_running():
            raise SessionError(f"{where}: the world is not running. Start it first (dm.init_distributed).")
        return self._pool


def _hook_key(pool: GroupPool, ranks: tuple[int, ...], device_type: str) -> Key:
    """Return the key of a group that wrappers reduce over from hooks (see `dualmesh.topology.communicators`)."""
    return pool.key(Membership(RankList(ranks), "param" if len(ranks) > 1 else "data"), device_type)
