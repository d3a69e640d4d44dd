"""`JaxState`: a topology on a mesh that it may share, in JAX's own names.

Meshes are made in `meshes`; what is computed on arrays is in `collectives`, `arrays` and `programs`.
"""

# mypy: allow-untyped-calls
# jax leaves some of its public functions unannotated.

from collections.abc import Hashable, Iterable
from functools import cached_property
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec, get_abstract_mesh

from dualmesh.backend.state import AxisTable, ParallelState
from dualmesh.backend.state_plan import StatePlan, World
from dualmesh.errors import MembershipError, ShardingError, listed
from dualmesh.sharding.partition_spec import P, check_axes, split_axes
from dualmesh.topology.topology import Axis
from dualmesh_jax.arrays.arrays import JaxArrays
from dualmesh_jax.arrays.specs import spec_for
from dualmesh_jax.cache_keys import give_key
from dualmesh_jax.collectives.collectives import JaxCollectives
from dualmesh_jax.collectives.line import Line
from dualmesh_jax.devices import carried_by_gloo
from dualmesh_jax.host import JaxHostObjects
from dualmesh_jax.mesh.meshes import SharedMesh, mesh_of
from dualmesh_jax.models.models import JaxModels
from dualmesh_jax.store import JaxStore
from dualmesh_jax.transforms.programs import JaxPrograms

LEFT_OUT = (
    "axis {axis!r} of {label} leaves out rank {rank} of the state. In JAX one program runs as all ranks of a state: "
    "list the others too, each as a group of one, or register these groups as a state of their own."
)
PARTIAL = (
    "{where}: {spec!r} is partial over {axes}. dm.shard_map sums what its out_specs call so; beside that JAX has "
    "values still to be summed (`unreduced`) on Explicit axes only, where state.pspec and state.sharding name them: "
    "dm.init_distributed(axis_types='explicit'). Leave partial out here."
)


class JaxState(ParallelState):
    """A topology over JAX devices. Native groups are tuples of mesh axis names, what `jax.lax` collectives take."""

    backend = "jax"
    arrays: JaxArrays

    def __init__(self, plan: StatePlan, world: World, shared: SharedMesh, store: JaxStore | None) -> None:
        super().__init__(plan, world)
        self.shared = shared
        self.store = store
        devices = zip(shared.order, shared.devices, strict=True)
        self.process_of: dict[int, int] = {rank: device.process_index for rank, device in devices}
        self.key = give_key(self, shared.serial)
        self._native = AxisTable(self._native_for)
        self._lines = AxisTable(self._line_for)
        self.line = self._lines.__getitem__
        self.collectives = JaxCollectives(self)
        self.arrays = JaxArrays(self)
        self.programs = JaxPrograms(self)
        self.models = JaxModels(self)
        self.host = JaxHostObjects(self)

    @property
    def meaning(self) -> Hashable:
        return self.key

    @property
    def members(self) -> tuple[int, ...]:
        """The session ranks of the state, in grid order."""
        return self.shared.order

    @cached_property
    def processes(self) -> tuple[int, ...]:
        """The processes that hold ranks of the state, rising."""
        return tuple(sorted(set(self.process_of.values())))

    @property
    def mesh(self) -> Mesh:
        """All devices of the state over the atoms that its axes are made of; shared with other states."""
        self.require_live("mesh")
        return self.shared.mesh

    @property
    def fsdp_mesh(self) -> Mesh:
        """The devices that share parameters: (params,), or (replicate, params) where replicas exist."""
        params = self.topology.role("params")
        replicate = self.topology.spec.roles.get("replicate", ())
        axes = (replicate, params) if self.size(replicate) > 1 else (params,)
        return self._submesh("fsdp_mesh", ("replicate", "params")[-len(axes) :], axes)

    def submesh(self, *axes: str) -> Mesh:
        """Return a mesh of some axes in the order given; shardings on it do not mix with those on `mesh`."""
        return self._submesh("submesh", axes, axes)

    def _submesh(self, where: str, names: tuple[str, ...], axes: tuple[Axis, ...]) -> Mesh:
        self.require_live(where)
        joined = tuple(name for axis in axes for name in split_axes(axis))
        covers = self.size(joined) == self.world_size
        ranks = self.ranks(joined, self.members[0] if covers else None)
        devices = dict(zip(self.members, self.shared.devices, strict=True))
        return mesh_of([devices[rank] for rank in ranks], [self.size(axis) for axis in axes], names)

    def axes(self, axis: Axis) -> tuple[str, ...]:
        names: tuple[str, ...] = self._native[axis]
        return names

    def pspec(self, *entries: Any, partial: str | Iterable[str] = ()) -> PartitionSpec:
        return self._translated("pspec", P(*entries, partial=partial))

    def sharding(self, spec: P) -> NamedSharding:
        return NamedSharding(self.mesh, self._translated("sharding", P.of(spec)))

    def _translated(self, where: str, spec: P) -> PartitionSpec:
        """Return JAX's form of a spec; a sum still to be taken is `unreduced`, which JAX has on Explicit axes only."""
        if not self.shared.is_explicit or not spec.partial:
            return self.native_spec(where, spec)
        split = self.native_spec(where, P(*spec.entries))
        check_axes(self.topology, spec, what=where)
        return PartitionSpec(*split, unreduced=set(self.axes(spec.partial)))

    def spec_of(self, x: Any) -> P:
        """Return how an array, or a NamedSharding, on the state's mesh is split: `sharding` backwards. *Local.*

        Raises:
            ShardingError: It lies elsewhere, or no spec means the same.
        """
        sharding = x if isinstance(x, NamedSharding) else getattr(x, "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.mesh != self.mesh:
            raise ShardingError(
                f"spec_of: {sharding if sharding is not None else type(x)} is not on the mesh of {self.label}, "
                f"{self.mesh}. Lay the array out with dm.distribute or dm.constrain.",
                found=sharding,
            )
        return spec_for(self.topology, self.shared.refined, sharding.spec)

    def native_spec(self, where: str, spec: P) -> PartitionSpec:
        """Return JAX's form of a spec, in the names of the mesh. *Local.*

        Raises:
            ShardingError: The spec is partial, which only what leaves `shard_map` can be.
        """
        if spec.partial:
            raise ShardingError(PARTIAL.format(where=where, spec=spec, axes=listed(spec.partial)), spec=spec)
        check_axes(self.topology, spec, what=where)
        return PartitionSpec(*(self._entry(split_axes(entry)) for entry in spec.entries))

    def _entry(self, axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
        names = self.axes(axes)
        return names[0] if len(names) == 1 else names or None

    def sizes_here(self, axis: Axis) -> tuple[int, ...]:
        try:
            return self.topology.group_sizes(axis, self.topology.members)
        except MembershipError as error:
            raise MembershipError(
                LEFT_OUT.format(axis=axis, label=self.label, rank=self.session_rank(error.rank)),
                axis=axis,
                rank=error.rank,
            ) from None

    def _native_for(self, axis: Axis) -> tuple[str, ...]:
        self.group_sizes(axis)
        self.require_live("axes")
        return self.shared.axes(self.topology.layout(axis))

    def _line_for(self, axis: Axis) -> Line:
        groups = self.topology.rank_groups(axis)
        by_exchange = carried_by_gloo(self.shared.devices)
        if groups is None:
            return Line(self.axes(axis), by_exchange=by_exchange)
        self.sizes_here(axis)
        places = tuple(tuple(map(self.topology.position, group)) for group in groups)
        return Line(self.axes("world"), places, by_exchange)

    def _group_for(self, axis: Axis) -> tuple[str, ...]:
        return self.axes(axis)

    def _own_index(self, axis: Axis) -> Any:
        if self.group_sizes(axis) == (1,):
            return 0
        return self.line(axis).index() if self.is_manual(axis) else super()._own_index(axis)

    def _own_size(self, axis: Axis) -> Any:
        return self.line(axis).size() if self.is_manual(axis) else super()._own_size(axis)

    def is_manual(self, axis: Axis) -> bool:
        """Tell whether this code runs per rank along an axis: inside a `shard_map` over this state's mesh. *Local.*"""
        around = get_abstract_mesh()
        return (
            bool(around.manual_axes)
            and around.shape_tuple == self.shared.mesh.shape_tuple  # no two states' meshes that differ are alike in it
            and set(self.line(axis).names) <= set(around.manual_axes)
        )

    def release(self) -> None:
        super().release()
        self._native.clear()
        self._lines.clear()
