"""`TorchState`: a topology over torch processes, its groups taken from the pool.

Device meshes are in `meshes`, the pool in `group_pool`.
"""

from collections.abc import Iterable
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from dualmesh._support.waits import check_timeout
from dualmesh.backend.state import AxisTable, ParallelState
from dualmesh.backend.state_plan import StatePlan, World
from dualmesh.errors import RankError, ShardingError, listed
from dualmesh.sharding.partition_spec import P
from dualmesh.topology import communicators
from dualmesh.topology.layout import Layout
from dualmesh.topology.roles import expand_axes
from dualmesh.topology.topology import Axis
from dualmesh_torch import private
from dualmesh_torch.agreement import agree_on_group
from dualmesh_torch.arrays.arrays import TorchArrays
from dualmesh_torch.collectives.collectives import TorchCollectives
from dualmesh_torch.collectives.compile_errors import refuse, refuse_unmade, tell_when_forked
from dualmesh_torch.collectives.exchanges import exchange
from dualmesh_torch.collectives.group_member import GroupMember, MeshMembers
from dualmesh_torch.host import TorchHostObjects
from dualmesh_torch.mesh.group_pool import Group, GroupPool, Key
from dualmesh_torch.mesh.meshes import Meshes, Sharding
from dualmesh_torch.mesh.named_mesh import NamedMesh
from dualmesh_torch.models.models import TorchModels
from dualmesh_torch.transforms.programs import TorchPrograms


class TorchState(ParallelState):
    """A topology over torch processes. Native groups are `ProcessGroup`s whose group rank is the axis index."""

    backend = "torch"
    collectives: TorchCollectives

    def __init__(self, plan: StatePlan, world: World, pool: GroupPool) -> None:
        super().__init__(plan, world)
        self._pool = pool
        self.is_real = pool.is_real
        pool.handles[id(self._groups)] = self._groups
        self._default: Group | None = pool.default
        self._owner = f"state/{plan.owner}" if plan.own_groups else ""
        self._held: dict[Key, Group] = {}
        self._timeout_s: float | None = None
        self._is_forked = False
        tell_when_forked(self)
        self._member = self.has_rank(pool.rank)
        self._place = self.grid_rank(pool.rank) if self._member else -1
        self._indices = AxisTable(self._index_for) if pool.is_real else _SimulatedTable(self._index_for)
        self.meshes = Meshes(self, _suffix(plan))
        self.collectives = TorchCollectives(self)
        self.arrays = arrays = TorchArrays(self)
        self.models = TorchModels(self)
        self.programs = TorchPrograms(self, arrays)
        self.host = TorchHostObjects(self)

    # -- groups ----------------------------------------------------------------------------------------------------

    def planned_keys(self) -> list[Key]:
        """Return the groups that this rank needs from the start. *Pure.*"""
        if not self._member:
            return []
        needs = communicators.distinct(self.topology, self._place, self.plan.ranks, self._needs)
        return [self._key(need) for need in needs]

    @cached_property
    def _needs(self) -> dict[Axis, communicators.Membership]:
        """What this rank needs from the start, by axis."""
        if not self._member:
            return {}
        known = self._pool.planned.setdefault((self.plan.ranks, self.topology.members), {})
        return communicators.memberships(self.topology, self._place, self.plan.ranks, known)

    def keys_of_all(self) -> list[Key]:
        """Return the groups that all ranks of the state together need from the start. *Pure*, O(world)."""
        return [self._key(need) for need in communicators.memberships_of_all(self.topology, self.plan.ranks)]

    def take(self, groups: dict[Key, Group]) -> None:
        """Keep groups that the pool gave, by axis. *Local.*"""
        self._held.update(groups)
        if not self._member:
            return
        for axis, need in self._needs.items():
            group = self._groups[axis] = self._held[self._key(need)]
            if need.lane == "data":
                member = GroupMember(group, len(need.ranks), self._indices[axis], self._pool, self, axis)
                self.collectives.know(axis, member)
        if "loss" in self.topology.spec.roles:
            loss = self.topology.role("loss")
            self.collectives.know(loss, self.member(loss))

    def member(self, axis: Axis) -> GroupMember:
        """Return this rank's place in the group that collectives over an axis use; made at first use. *Collective.*"""
        self.require_ready("ops")
        if not self.is_real:
            self.refuse_simulated("ops")
        need = self._need(axis, "data")
        return GroupMember(self._group_of(need), len(need.ranks), self._indices[axis], self._pool, self, axis)

    def group_along(self, layout: Layout) -> Group:
        """Return the group of ranks that differ in the digits of a layout; made at first use. *Collective.*"""
        grid = (rank + self.topology.rank_offset for rank in layout.ranks(self.topology.position(self._place)))
        return self._group_of(communicators.Membership(communicators.RankList(map(self.session_rank, grid)), "data"))

    def member_over(self, ranks: tuple[int, ...]) -> GroupMember:
        """Return this rank's place among session ranks, members or not; made at first use. *Collective over them.*"""
        group = self._group_of(communicators.Membership(communicators.RankList(ranks), "data"))
        return GroupMember(group, len(ranks), ranks.index(self._pool.rank), self._pool, self)

    def mesh_members(self, mesh: DeviceMesh) -> MeshMembers:
        """Return all ranks of a mesh, for exchanges whose groups torch picks. *Local.*"""
        return MeshMembers(self, self._pool, mesh)

    def _group_for(self, axis: Axis) -> Group:
        self.require_ready("group")
        self.size(axis)
        return self._group_of(self._need(axis, communicators.lane_of(self.topology, axis)))

    def _need(self, axis: Axis, lane: communicators.Lane) -> communicators.Membership:
        """Return the ranks of this rank's group along an axis, in a lane; not in compiled code."""
        if torch.compiler.is_compiling():
            refuse_unmade(axis)
        known = self._needs.get(axis)
        if known is not None:
            return known._replace(lane=lane if len(known.ranks) > 1 else "data")
        return communicators.membership(self.topology, axis, lane, self._place, self.plan.ranks)

    def _group_of(self, need: communicators.Membership) -> Group:
        key = self._key(need)
        found = self._held.get(key)
        if found is not None:
            return found
        if self._pool.is_real and not self._pool.has(key):
            where = f"{self.label}: the first collective over the ranks {listed(need.ranks)}"
            said = f"a group of the ranks {listed(need.ranks)} ({need.ranks.digest}) in lane {key.lane!r}, number "
            said += f"{self._pool.generation(key)} of its kind"
            agree_on_group(where, need.ranks, self._pool.rank, self._pool.session, said)
        self._held.update(self._pool.acquire([key], self, f"{self.label}: the first collective"))
        if self._timeout_s is not None and self._pool.is_real:
            private.set_timeout(self._held[key], timedelta(seconds=self._timeout_s))
        return self._held[key]

    def warm_up(self, *axes: Axis) -> None:
        super().warm_up(*axes)
        for axis in axes:
            if self.size(axis) > 1:
                self.collectives.know(axis, self.member(axis))
        for _, group in sorted(self._held.items()):  # Collective order: one that all ranks share.
            if group.size() > 1 and self._pool.is_real:
                with exchange("warm_up", GroupMember(group, group.size(), group.rank(), self._pool, self)):
                    dist.all_reduce(torch.zeros(1, device=self.device_type), group=group)

    def set_timeout(self, timeout_s: float) -> None:
        super().set_timeout(timeout_s)
        self._timeout_s = check_timeout("set_timeout", timeout_s)
        if not self._pool.is_real:
            return
        self.host.barrier()  # a rank that still waits under the old time must not be met under a shorter one
        if self.device_type != "cpu":
            torch.accelerator.synchronize()
        for group in self._held.values():
            private.set_timeout(group, timedelta(seconds=timeout_s))

    def _key(self, need: communicators.Membership) -> Key:
        return self._pool.key(need, self.device_type, self.plan.group_options, self._owner)

    # -- meshes ----------------------------------------------------------------------------------------------------

    @property
    def mesh(self) -> DeviceMesh:
        """All ranks of the state over its base axes, sizes of 1 included."""
        self.require_ready("mesh")
        return self.meshes.root()

    @property
    def device_mesh(self) -> NamedMesh:
        """`mesh`, asked by any axis of the state: `device_mesh["dp_shard_sp"]`, `.get_group("sp")`."""
        self.require_ready("device_mesh")
        return self.meshes.named()

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """What `fully_shard(mesh=...)` takes: 1-D, or 2-D (replicate, shard) where replicas exist."""
        self.require_ready("fsdp_mesh")
        return self.meshes.fsdp()

    def submesh(self, *axes: str) -> DeviceMesh:
        self.require_ready("submesh")
        for axis in axes:
            self.size(axis)
        return self.meshes.cut(axes)

    def axes(self, axis: Axis) -> tuple[str, ...]:
        self.size(axis)
        names = expand_axes(self.topology, (axis,) if isinstance(axis, str) else axis)
        return tuple(self.meshes.dim_name(name) for name in names if self.size(name) > 1)

    def pspec(self, *entries: Any, partial: str | Iterable[str] = ()) -> tuple[Placement, ...]:
        return self.sharding(P(*entries, partial=partial))[1]

    def sharding(self, spec: P) -> Sharding:
        self.require_ready("sharding")
        return self.meshes.sharding(P.of(spec))

    def spec_of(self, x: DTensor) -> P:
        """Return how a DTensor on one of the state's array meshes is split: `sharding` backwards. *Local.*"""
        self.require_ready("spec_of")
        if not isinstance(x, DTensor):
            raise ShardingError(f"spec_of: found a {type(x).__qualname__}. Give a DTensor.", found=type(x))
        return self.meshes.spec_of(x.device_mesh, x.placements)

    # -- this rank -------------------------------------------------------------------------------------------------

    @property
    def held_ranks(self) -> tuple[int, ...]:
        """The session rank of this process."""
        if not self.is_real:
            self.refuse_simulated("this process' rank")
        return self.world.local_ranks  # torch cannot trace a property read through super()

    def refuse_simulated(self, where: str) -> None:
        """Refuse to say which rank this code is while torch runs it as several. *Local.*

        Raises:
            RankError: It runs in torch's LocalTensorMode.
        """
        ranks = private.simulated_ranks()
        if ranks:
            raise RankError(
                f"{self.label}, {where}: torch's LocalTensorMode runs this code as the ranks {listed(ranks)} at once, "
                f"and dualmesh would answer for rank {self._pool.rank} alone. Name a rank (rank=...), give the state's "
                f"groups and meshes to torch's own collectives, or simulate ranks with backend='sim'.",
                ranks=ranks,
            )

    def sizes_here(self, axis: Axis) -> tuple[int, ...]:
        return self.topology.group_sizes(axis, (self._place,))

    def index(self, axis: Axis, rank: int | None = None) -> Any:
        return super().index(axis, rank) if rank is not None else self._indices[axis]

    def _index_for(self, axis: Axis) -> int:
        self.size(axis)
        if not self.is_real:
            self.refuse_simulated(f"index along {axis!r}")
        found: int = self._own_index(axis)
        return found

    def require_ready(self, where: str) -> None:
        if self._released or not self._member or dist.group.WORLD is not self._default:
            if torch.compiler.is_compiling():
                refuse()
            super().require_ready(where)

    def forked(self) -> None:
        """Answer sizes and ranks only: this process is a copy of the one whose groups these are. *Local.*"""
        self._is_forked = True
        self._default = None
        self._groups.clear()
        self._pool.forget()

    @property
    def is_live(self) -> bool:
        return super().is_live and not self._is_forked

    @property
    def _ending(self) -> str:
        if self._is_forked:
            return "is another process', of which this one is a fork: its groups do not work here"
        return super()._ending

    def return_groups(self) -> None:
        """Give the groups back to the pool. *Local.*"""
        self._pool.release(self)

    def release(self) -> None:
        super().release()
        self._held.clear()
        self.meshes.clear()
        self.collectives.clear()


class _SimulatedTable(AxisTable):
    """The indices of one rank of a fake world, asked for anew each time: torch may run the code as several ranks."""

    def __getitem__(self, axis: Axis) -> Any:
        return self._make(axis)


def _suffix(plan: StatePlan) -> str:
    """Return what tells the meshes of a state apart from equal ones on other groups."""
    options = "".join(f"{name}={value}" for name, value in plan.group_options)
    return f"@{plan.owner}{options}" if plan.own_groups or options else ""
