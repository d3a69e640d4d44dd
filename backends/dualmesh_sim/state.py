"""`SimState`: a topology over simulated ranks.

Inside `dm.shard_map` the state answers for the rank whose thread asks; outside, this process holds every rank.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dualmesh._support.optional_imports import np
from dualmesh.backend.plain_models import PlainModels
from dualmesh.backend.state import ParallelState
from dualmesh.backend.state_plan import StatePlan, World
from dualmesh.sharding.partition_spec import P, check_axes
from dualmesh.topology.topology import Axis
from dualmesh_sim.arrays import SimArrays
from dualmesh_sim.collectives import SimCollectives
from dualmesh_sim.host import SimHostObjects
from dualmesh_sim.programs import SimPrograms
from dualmesh_sim.rendezvous import place

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class SimMesh:
    """Named axes over session ranks: `ranks` has one dim per axis."""

    axis_names: tuple[str, ...]
    ranks: "NDArray[np.int64]"


@dataclass(frozen=True)
class SimSharding:
    """A spec bound to its state."""

    state: "SimState"
    spec: P


class SimState(ParallelState):
    """A topology over simulated ranks. Native groups are tuples of session ranks in index order."""

    backend = "sim"

    def __init__(self, plan: StatePlan, world: World, timeout_s: float) -> None:
        super().__init__(plan, world)
        self._members = super().members
        self.group = self._group_for  # a group is another one on every rank, so nothing is kept per axis
        self.collectives = SimCollectives(self)
        self.arrays = arrays = SimArrays(self)
        self.models = PlainModels(self)
        self.programs = SimPrograms(self, arrays, timeout_s)
        self.host = SimHostObjects(self)

    @property
    def members(self) -> tuple[int, ...]:
        return self._members

    @property
    def held_ranks(self) -> tuple[int, ...]:
        """The rank of this thread inside `dm.shard_map`, all ranks outside."""
        here = place()
        return self.world.local_ranks if here is None else (here.rank,)

    @property
    def mesh(self) -> SimMesh:
        """All ranks of the state over its base axes."""
        self.require_live("mesh")
        names = self.topology.base_axes
        sizes = [self.size(name) for name in names]
        return SimMesh(names, np.array(self.members, dtype=np.int64).reshape(sizes))

    @property
    def fsdp_mesh(self) -> SimMesh:
        """The ranks that share this rank's parameters: (params,), or (replicate, params) where replicas exist."""
        self.require_live("fsdp_mesh")
        roles = self.topology.spec.roles
        params = self.topology.role("params")
        replicate = roles.get("replicate", ())
        shape = [self.size(axes) for axes in ((replicate, params) if self.size(replicate) > 1 else (params,))]
        names = ("replicate", "params")[-len(shape) :]
        ranks = self.ranks((*replicate, *params))
        return SimMesh(names, np.array(ranks, dtype=np.int64).reshape(shape))

    def submesh(self, *axes: str) -> SimMesh:
        self.require_live("submesh")
        sizes = [self.size(axis) for axis in axes]
        ranks = self.ranks(axes)
        return SimMesh(axes, np.array(ranks, dtype=np.int64).reshape(sizes))

    def axes(self, axis: Axis) -> tuple[str, ...]:
        self.size(axis)
        names = (axis,) if isinstance(axis, str) else axis
        return tuple(name for name in names if self.size(name) > 1)

    def pspec(self, *entries: Any, partial: str | Iterable[str] = ()) -> P:
        spec = P(*entries, partial=partial)
        check_axes(self.topology, spec)
        return spec

    def sharding(self, spec: P) -> SimSharding:
        spec = P.of(spec)
        check_axes(self.topology, spec)
        return SimSharding(self, spec)

    def _group_for(self, axis: Axis) -> tuple[int, ...]:
        self.require_ready("group")
        return self.ranks(axis)
