"""`DistributedState`: one process' place among nodes, replicas and federations, with the groups and meshes it needs.

Which ranks are together is planned in `federated_topology`; meshes and groups are made by a `Fabric`. Everything that
can be wrong is refused before anything is made, and a refusal leaves the object as it was. What it made is kept in
`distributed_holdings`, and released once nothing here refers to it.
"""

from collections.abc import Iterable
from typing import Any

from dualmesh.backend.group_factory import Fabric, create_device_mesh, device_kind
from dualmesh.errors import (
    ArgumentError,
    MembershipError,
    RankError,
    SessionError,
    SpecError,
    counted,
    did_you_mean,
    listed,
)
from dualmesh.federated.distributed_fields import DistributedFields
from dualmesh.topology.federation import FederatedSpec
from dualmesh.topology.layout import divisors
from dualmesh.topology.nodes import Nodes
from dualmesh.topology.parallel_modes import listed_group
from dualmesh.topology.resolve import positive, whole

PORTS = range(65536)

UNEQUAL_NODES = (
    "DistributedState.set_node: {world} ranks on nodes of {size} make {nodes}, found node_world_size={found}. Give the "
    "numbers of equal nodes (the last may hold the rest), or call set_nodes(nodes) for others."
)


class DistributedState(DistributedFields):
    """Where a process is: in the world, on its node, in its replica and in its federation. Fields are None until set.

    Order of calls: `set_global`, then `set_node` and `set_exec_device`, then one of `set_fsdp`, `set_hsdp` and
    `set_federated_scaling`, then `set_init_device`.

    >>> from dualmesh.backend.group_factory import ListedFabric
    >>> state = DistributedState(fabric=ListedFabric())
    >>> state.set_global("gloo", "cpu", "localhost", 29500, rank=5, world_size=12)
    >>> state.set_federated_scaling((8, 4), hsdp=2)
    >>> state.federated_rank, state.replica_rank, state.is_sender, state.receive_from
    (0, 2, False, 3)
    """

    create_device_mesh = staticmethod(create_device_mesh)

    # -- the world and devices -------------------------------------------------------------------------------------

    def set_global(
        self, backend: str, device_type: Any, master_addr: str, master_port: int, rank: int, world_size: int
    ) -> None:
        """Set the place in the world. *Local.*

        Raises:
            ArgumentError: The backend, device, address, port or world size is none.
            RankError: The rank is not in the world.
        """
        where, fabric = "DistributedState.set_global", self._fabric()
        _choose(where, "backend", backend, fabric.communication_backends())
        _choose(where, "device_type", device_kind(device_type), fabric.device_types())
        if not isinstance(master_addr, str) or not master_addr:
            raise ArgumentError(f"{where}: master_addr is {master_addr!r}. It must be a host name or address.")
        if whole(master_port) not in PORTS:
            raise ArgumentError(f"{where}: master_port is {master_port!r}. Ports are 0..{PORTS[-1]}.")
        size = positive(where, "world_size", world_size)
        if whole(rank) not in range(size):
            raise RankError(f"{where}: rank {rank!r} is not in the world. Ranks: 0..{size - 1}.", rank=rank)
        self.backend, self.device_type = backend, device_type
        self.master_addr, self.master_port = master_addr, whole(master_port)
        self.rank, self.world_size = whole(rank), size

    def set_exec_device(self, current_device: Any, streams: int | None = None) -> None:
        """Set the device in use and, where devices have them, its pool of streams. *Local.*

        Args:
            current_device: A device, or its number.
            streams: How many; None: none.

        Raises:
            ArgumentError: The device is of no kind that is here, or the number of streams is not positive.
        """
        where, fabric = "DistributedState.set_exec_device", self._fabric()
        number = whole(current_device)
        if number is None or number < 0:
            _choose(where, "current_device", device_kind(current_device), fabric.device_types())
        count = None if streams is None else positive(where, "streams", streams)
        self.streams = None if count is None else fabric.make_streams(current_device, count)
        self.current_device = current_device

    def set_init_device(self, init_device: Any, meta_initialization: bool = False) -> None:
        """Set where models are initialised. *Local.*

        Raises:
            ArgumentError: The device is neither "meta" nor of a kind that is here, or the flag is no bool.
        """
        where = "DistributedState.set_init_device"
        _choose(where, "init_device", device_kind(init_device), (*self._fabric().device_types(), "meta"))
        if not isinstance(meta_initialization, bool):
            raise ArgumentError(f"{where}: meta_initialization is {meta_initialization!r}. It must be True or False.")
        self.init_device, self.meta_initialization = init_device, meta_initialization

    # -- nodes -----------------------------------------------------------------------------------------------------

    def set_node(self, node_local_rank: int, node_local_size: int, node_rank: int, node_world_size: int) -> None:
        """Set the place on nodes of equal size, of which the last may hold the rest. *Local.*

        Raises:
            SessionError: `set_global` was not called.
            ArgumentError: A number is none, or they do not fit the world.
        """
        where, (_, world) = "DistributedState.set_node", self._place("set_node")
        size = positive(where, "node_local_size", node_local_size)
        count = positive(where, "node_world_size", node_world_size)
        if count != -(-world // size):
            text = UNEQUAL_NODES.format(world=world, size=size, nodes=-(-world // size), found=count)
            raise ArgumentError(text, node_local_size=size, node_world_size=count)
        for name, value, end in (("node_local_rank", node_local_rank, size), ("node_rank", node_rank, count)):
            if whole(value) not in range(end):
                raise ArgumentError(f"{where}: {name} is {value!r}. Allowed: 0..{end - 1}.", **{name: value})
        self.node_local_rank, self.node_local_size = whole(node_local_rank), size
        self.node_rank, self.node_world_size = whole(node_rank), count

    def set_nodes(self, nodes: Nodes) -> None:
        """Set the place on nodes of any shape, as `dm.nodes()` finds them. *Local.*

        Raises:
            SessionError: `set_global` was not called.
            ArgumentError: The nodes are of another world.
        """
        rank, world = self._place("set_nodes")
        if nodes.world_size != world:
            raise ArgumentError(
                f"DistributedState.set_nodes: the nodes hold {counted(nodes.world_size, 'rank')}, the world {world}.",
                nodes=nodes,
            )
        self.node_local_rank, self.node_local_size, self.node_rank, self.node_world_size = nodes.place(rank)

    # -- sharding --------------------------------------------------------------------------------------------------

    def set_fsdp(self, mesh: Any = None) -> None:
        """Shard over a mesh, or over all ranks. *Collective over the mesh.*

        A single process without a running world has nothing to shard over: its mesh stays None.

        Raises:
            SessionError: `set_global` was not called, or a world of several ranks is not running.
        """
        if mesh is None:
            rank, world = self._place("set_fsdp")
            if world == 1 and not self._fabric().is_running():
                return
            topology = FederatedSpec((world,)).resolve(world)
            mesh = self._holdings.mesh(self._running("set_fsdp"), topology, rank, self.device_type)
        self.fsdp_mesh = mesh
        self._let_go()

    def set_hsdp(self, hsdp: int) -> None:
        """Shard over replicas of `hsdp` consecutive ranks of the world. *Collective over the world.*

        Raises:
            SessionError: `set_global` was not called, the world is not running, or federations are set up.
            SpecError: `hsdp` does not divide the world.
        """
        rank, world = self._place("set_hsdp")
        if self.is_federated_scaling_setup():
            raise SessionError(
                "DistributedState.set_hsdp: federations are set up, and replicas lie inside them. Call "
                "unset_federated_scaling() first, or set_federated_scaling(sizes, hsdp=...)."
            )
        if (whole(hsdp) or 0) < 1 or world % hsdp:
            raise SpecError(
                f"DistributedState.set_hsdp: hsdp={hsdp!r} does not divide the world of {counted(world, 'rank')}. What "
                f"would fit: {listed(divisors(world))}.",
                hsdp=hsdp,
            )
        topology = FederatedSpec((world,), hsdp).resolve(world)
        mesh = self._holdings.mesh(self._running("set_hsdp"), topology, rank, self.device_type)
        self._set_replica(topology, rank, mesh)
        self._let_go()

    def unset_hsdp(self) -> None:
        """Forget replicas and release their mesh; a federation keeps its groups and roles. *Local.*"""
        self._set_replica(None, 0, None)
        self._let_go()

    # -- federations -----------------------------------------------------------------------------------------------

    def set_federated_scaling(self, federated_group_size: Iterable[int] | int, hsdp: int | None = None) -> None:
        """Cut the world into federations and make their groups and mesh. *Collective over the world.*

        Args:
            federated_group_size: Ranks in each federation, of any sizes; one integer: all of that size.
            hsdp: Ranks in a replica inside the federations; None: as `set_hsdp` said, else no replicas.

        Raises:
            SessionError: `set_global` was not called, or the world is not running.
            SpecError: The sizes do not fit the world; the message lists every problem.
        """
        rank, world = self._place("set_federated_scaling")
        topology = FederatedSpec(federated_group_size, self.replica_local_size if hsdp is None else hsdp).resolve(world)
        fabric, made = self._running("set_federated_scaling"), self._holdings
        number, count = topology.federated_rank(rank), len(self.streams or (None,))
        ranks = topology.replica_group(rank)
        # Collective order: every rank makes the groups of one kind before those of the next.
        with made.all_or_none():
            federated = made.groups(fabric, topology.federated_group(rank), self.backend, "federated group", count)
            what = f"replica group of federation {number}"
            replicas = ranks and made.groups(fabric, ranks, self.backend, what, count)
            federation = made.group(fabric, topology.federation(rank), self.backend, f"federation {number}")
            mesh = made.mesh(fabric, topology, rank, self.device_type)
        self.fsdp_mesh = mesh if replicas is None else None
        self._set_replica(None if replicas is None else topology, rank, mesh)
        self._set_federation(topology, rank)
        self.federated_group, self.replica_group, self.federation = federated, replicas, federation
        self._let_go()

    def unset_federated_scaling(self) -> None:
        """Forget federations, the meshes and replicas inside them, and release their groups. *Local.*

        Groups that named states or other distributed states use too go on; a model laid out on a mesh made here does
        not communicate any more.
        """
        self._set_federation(None, 0)
        self._set_replica(None, 0, None)
        self.fsdp_mesh = None
        self.federated_group = self.replica_group = self.federation = None
        self._let_go()

    def create_process_group(self, ranks: Iterable[int], group_desc: str | None = None) -> Any:
        """Return a new group of ranks in the listed order, the caller's to keep. *Collective: only its ranks call it.*

        Raises:
            SessionError: `set_global` was not called, or the world is not running.
            SpecError: The ranks are none, repeated or outside the world.
            MembershipError: This rank is not among them.
        """
        rank, world = self._place("create_process_group")
        (group,) = listed_group("DistributedState.create_process_group", world, ranks)
        if rank not in group:
            raise MembershipError(
                f"DistributedState.create_process_group: rank {rank} is not among {listed(group)}. Only "
                f"members call it.",
                ranks=group,
            )
        return self._running("create_process_group").make_group(group, self.backend or "", group_desc)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _place(self, where: str) -> tuple[int, int]:
        if self.rank is None or self.world_size is None:
            raise SessionError(f"DistributedState.{where}: the rank is not known. Call set_global(...) first.")
        return self.rank, self.world_size

    def _running(self, where: str) -> Fabric:
        fabric = self._fabric()
        if not fabric.is_running():
            raise SessionError(
                f"DistributedState.{where}: the world is not running, so nothing can be made. Start it first, for "
                f"example with dm.init_distributed()."
            )
        fabric.check_place(f"DistributedState.{where}", *self._place(where))
        return fabric


def _choose(where: str, name: str, value: Any, allowed: Iterable[str]) -> None:
    options = tuple(allowed)
    if value not in options:
        raise ArgumentError(
            f"{where}: {name} is {value!r}. Allowed here: {listed(options)}.{did_you_mean(value, options)}",
            **{name: value},
        )
