"""What a `DistributedState` knows, as fields: which parts of it are set, and how it reads.

Setting them is in `distributed_state`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dualmesh.backend.group_factory import Fabric
from dualmesh.federated.distributed_holdings import Holdings
from dualmesh.runtime.session import driver_for
from dualmesh.topology.federated_topology import FederatedTopology

SECTIONS: dict[str, tuple[str, ...]] = {
    "world": ("backend", "master_addr", "master_port", "rank", "world_size"),
    "node": ("node_local_rank", "node_local_size", "node_rank", "node_world_size"),
    "replica": ("replica_local_rank", "replica_local_size", "replica_rank", "replica_world_size"),
    "federation": ("federated_local_rank", "federated_local_size", "federated_rank", "federated_world_size"),
    "exchange": ("is_sender", "receive_from"),
    "device": ("device_type", "current_device", "init_device", "meta_initialization"),
}
"""The lines of a state's text and the fields in each; groups, meshes and streams have lines of their own."""


@dataclass
class DistributedFields:
    """The fields of a `DistributedState`, None until set."""

    backend: str | None = None
    """Communication backend."""
    master_addr: str | None = None
    master_port: int | None = None
    rank: int | None = None
    world_size: int | None = None

    node_local_rank: int | None = None
    node_local_size: int | None = None
    node_rank: int | None = None
    node_world_size: int | None = None
    """Number of nodes."""

    replica_local_rank: int | None = None
    """Which shard of its replica the rank holds."""
    replica_local_size: int | None = None
    replica_rank: int | None = None
    """Which replica, counted inside the federation where there is one."""
    replica_world_size: tuple[int, ...] | None = None
    """Number of replicas: of the world, or of each federation."""

    federated_local_rank: int | None = None
    federated_local_size: tuple[int, ...] | None = None
    """Ranks in each federation."""
    federated_rank: int | None = None
    federated_world_size: int | None = None
    """Number of federations."""

    fsdp_mesh: Any = None
    """Axis "shard"."""
    hsdp_mesh: Any = None
    """Axes "replica" and "shard"."""
    is_sender: bool | None = None
    """Whether the rank exchanges with other federations."""
    receive_from: int | None = None
    """The rank that gives it the result; None for senders."""
    federated_group: tuple[Any, ...] | None = None
    """The ranks with the same part of the model in all federations: one handle per stream."""
    replica_group: tuple[Any, ...] | None = None
    """The ranks with the same shard in the federation: one handle per stream."""
    federation: Any = None
    """All ranks of the federation."""

    device_type: Any = None
    current_device: Any = None
    init_device: Any = None
    meta_initialization: bool | None = None
    streams: tuple[Any, ...] | None = None

    fabric: Fabric | None = field(default=None, kw_only=True, repr=False, compare=False)
    """What makes meshes and groups; None: that of the running world."""
    federated_topology: FederatedTopology | None = field(default=None, init=False, repr=False)
    """The plan of the federations, for any rank."""
    _holdings: Holdings = field(default_factory=Holdings, init=False, repr=False, compare=False)
    """What it made."""

    def is_node_setup(self) -> bool:
        """Tell whether the node is set. *Local.*"""
        return _all_set(self.node_local_rank, self.node_local_size, self.node_rank, self.node_world_size)

    def is_fsdp_setup(self) -> bool:
        """Tell whether there is an FSDP mesh. *Local.*"""
        return self.fsdp_mesh is not None

    def is_hsdp_setup(self) -> bool:
        """Tell whether replicas are set. *Local.*"""
        return _all_set(self.replica_local_rank, self.replica_local_size, self.replica_rank, self.replica_world_size)

    def is_federated_scaling_setup(self) -> bool:
        """Tell whether federations are set. *Local.*"""
        return _all_set(
            self.federated_local_rank, self.federated_local_size, self.federated_rank, self.federated_world_size
        )

    @property
    def fabric_in_use(self) -> Fabric:
        """What makes its meshes and groups. *Local.*"""
        return self._fabric()

    def _fabric(self) -> Fabric:
        return driver_for(None).fabric() if self.fabric is None else self.fabric

    def _let_go(self) -> None:
        """Release what was made and is in no field any more."""
        handles = (*(self.federated_group or ()), *(self.replica_group or ()))
        self._holdings.release_but(self.fsdp_mesh, self.hsdp_mesh, self.federation, *handles)

    def _set_replica(self, topology: FederatedTopology | None, rank: int, mesh: Any) -> None:
        if topology is None:
            self.replica_local_rank = self.replica_local_size = self.replica_rank = self.replica_world_size = None
            self.hsdp_mesh = None
            return
        self.replica_local_rank, self.replica_local_size = topology.shard_index(rank), topology.shard_size
        self.replica_rank, self.replica_world_size = topology.replica_rank(rank), topology.replica_world_size
        self.hsdp_mesh = mesh

    def _set_federation(self, topology: FederatedTopology | None, rank: int) -> None:
        self.federated_topology = topology
        if topology is None:
            self.federated_local_rank = self.federated_local_size = None
            self.federated_rank = self.federated_world_size = None
            self.is_sender = self.receive_from = None
            return
        self.federated_local_rank, self.federated_local_size = topology.federated_index(rank), topology.sizes
        self.federated_rank, self.federated_world_size = topology.federated_rank(rank), topology.federated_world_size
        self.is_sender, self.receive_from = topology.is_sender(rank), topology.receive_from(rank)

    def __str__(self) -> str:
        lines = [
            f"{title}: " + ", ".join(f"{name}={getattr(self, name)}" for name in names)
            for title, names in SECTIONS.items()
            if any(getattr(self, name) is not None for name in names)
        ]
        lines += (f"{name}: {text}" for name, text in self._made())
        return "\n  ".join(["DistributedState", *(lines or ["nothing is set"])])

    def _made(self) -> Iterator[tuple[str, str]]:
        """Give a name and a text for each mesh, group and pool of streams that there is."""
        for name in ("fsdp_mesh", "hsdp_mesh"):
            mesh = getattr(self, name)
            if mesh is not None:
                yield name, " ".join(str(list(row)) for row in self._fabric().mesh_rows(mesh))
        for name in ("federated_group", "replica_group"):
            handles = getattr(self, name)
            if handles is not None:
                many = f" ({len(handles)} handles)" if len(handles) > 1 else ""
                yield name, f"{list(self._fabric().group_ranks(handles[0]))}{many}"
        if self.federation is not None:
            yield "federation group", str(list(self._fabric().group_ranks(self.federation)))
        if self.streams is not None:
            yield "streams", str(len(self.streams))


def _all_set(*values: object) -> bool:
    return all(value is not None for value in values)
