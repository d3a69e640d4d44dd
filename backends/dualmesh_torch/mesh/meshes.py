"""The device meshes of one state, all on groups of the pool: roots, what is cut from them, and the array mesh.

Which ranks an axis joins is planned in the core; what lies on the meshes is in `arrays`.
"""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from dualmesh._support.warn import caution
from dualmesh.errors import ShardingError, listed
from dualmesh.sharding import placements
from dualmesh.sharding.partition_spec import P, check_axes
from dualmesh.topology.communicators import lane_of
from dualmesh.topology.layout import Digit, Layout
from dualmesh.topology.roles import expand_axes, replica_axes
from dualmesh.topology.topology import Axis
from dualmesh_torch import private
from dualmesh_torch.mesh.named_mesh import NamedMesh

if TYPE_CHECKING:
    from dualmesh_torch.state import TorchState

Sharding = tuple[DeviceMesh, tuple[Placement, ...]]
WIDE = (
    "{label}: its array mesh has {count} dims ({names}). The first DTensor operation of each kind takes about 0.1 s on "
    "3 dims, 1 s on 4, 6 s on 5, a minute on 6. Lay arrays out in a state with fewer axes, or keep them in shard_map."
)


class Meshes:
    """Meshes made when first asked for and kept; nothing here communicates."""

    def __init__(self, state: "TorchState", suffix: str) -> None:
        self._state = state
        self._suffix = suffix
        self._roots: dict[tuple[Axis, ...], DeviceMesh] = {}
        self._cut: dict[tuple[Axis, ...], DeviceMesh] = {}
        self._arrays: dict[str | None, tuple[DeviceMesh, tuple[Digit, ...]]] = {}
        self._shardings: dict[P, Sharding] = {}
        self._all: NamedMesh | None = None

    def clear(self) -> None:
        """Forget all meshes. *Local.*"""
        for kept in (self._roots, self._cut, self._arrays, self._shardings):
            kept.clear()
        self._all = None

    def named(self) -> NamedMesh:
        """Return the mesh of all base axes, which also knows the combined ones. *Local.*"""
        if self._all is None:
            self._all = NamedMesh(self._state, self.root())
        return self._all

    def dim_name(self, axis: Axis) -> str:
        """Return what an axis is called in a mesh; states with groups of their own mark theirs. *Pure.*

        DTensor takes meshes of equal ranks and names for one, whatever their groups are.
        """
        return (axis if isinstance(axis, str) else "_".join(axis)) + self._suffix

    def root(self, axes: Sequence[Axis] | None = None) -> DeviceMesh:
        """Return a mesh of its own over axes; None: over all base axes. *Local.*"""
        axes = tuple(self._state.topology.base_axes if axes is None else axes)
        found = self._roots.get(axes)
        if found is None:
            groups = [self._state.group(axis) for axis in axes]
            names = tuple(name for axis in axes for name in ((axis,) if isinstance(axis, str) else axis))
            found = self._roots[axes] = self._over(groups, self._state.ranks(names), axes)
        return found

    def cut(self, axes: tuple[Axis, ...]) -> DeviceMesh:
        """Return the mesh of some axes, cut from the root that has them in this order where one has. *Local.*

        There is one root of the base axes and one of each view, so that meshes of one factorisation share theirs.

        Raises:
            ShardingError: They mix two factorisations of the same ranks.
        """
        found = self._cut.get(axes)
        if found is None:
            self._view_of(axes, [name for axis in axes for name in ((axis,) if isinstance(axis, str) else axis)])
            found = self._cut[axes] = self._found(axes)
        return found

    def fsdp(self) -> DeviceMesh:
        """Return the mesh that shards parameters: (params,), or (replicate, params) where replicas exist. *Local.*"""
        topology = self._state.topology
        params = self._named(topology.role("params"))
        replicate = self._named(topology.spec.roles.get("replicate", ()))
        has_replicas = replicate != () and self._state.size(replicate) > 1
        return self.cut((replicate, params) if has_replicas else (params,))

    def sharding(self, spec: P) -> Sharding:
        """Return (mesh, placements) of a spec. *Local.*

        Raises:
            ShardingError: It mixes axes of two views, or DTensor cannot express it.
        """
        found = self._shardings.get(spec)
        if found is None:
            check_axes(self._state.topology, spec)
            mesh, digits = self._array_mesh(self._view_of(spec, spec.axes))
            planned = placements.placements_of(self._state.topology, spec, digits)
            found = self._shardings[spec] = mesh, tuple(_native(one, spec) for one in planned)
        return found

    def spec_of(self, mesh: DeviceMesh, native: Sequence[Placement]) -> P:
        """Return the spec that placements on a mesh over the state's ranks mean: `sharding` backwards. *Local.*

        Raises:
            ShardingError: The mesh leaves ranks out or is no grid of them, or no spec means the same.
        """
        digits = self._digits_of(mesh)
        if digits is None:
            raise ShardingError(
                f"{self._state.label}: {mesh} is no grid of all its ranks, {listed(self._state.members)}. Lay the "
                f"array out with dm.distribute or dm.constrain.",
                mesh=mesh,
            )
        return placements.spec_for(self._state.topology, [_placement_plan(one) for one in native], digits)

    def _digits_of(self, mesh: DeviceMesh) -> tuple[Digit, ...] | None:
        """Return a mesh's dims as digits of a rank's place in the state, or None: they are none."""
        places = {rank: place for place, rank in enumerate(self._state.members)}
        shape, ranks = tuple(mesh.mesh.shape), mesh.mesh.flatten().tolist()
        if len(ranks) != len(places) or set(ranks) != set(places):
            return None
        steps = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        strides = [places[ranks[step]] if size > 1 else 1 for step, size in zip(steps, shape, strict=True)]
        if ranks[0] != self._state.members[0] or min(strides) < 1:
            return None
        digits = tuple(map(Digit, shape, strides))
        spelt = Layout.of(digits)
        is_grid = all(spelt.offset(index) == places[rank] for index, rank in enumerate(ranks))
        return digits if is_grid else None

    def array_axes(self, spec: P) -> tuple[str, ...]:
        """Return the axes of the array mesh on which a spec lies, outermost first. *Pure.*"""
        return tuple(self._array_axes(self._view_of(spec, spec.axes)))

    def grid_of(self, view: str | None, *, called: bool = False) -> tuple[str, ...]:
        """Return the base axes, those that a view spans replaced by its own. *Pure.*

        Args:
            view: The view; None: the base axes.
            called: Whether a base axis of copies has the name that the view's role "replicate" gives it.
        """
        topology = self._state.topology
        axes = list(topology.base_axes)
        if view is None:
            return tuple(axes)
        spanned = set(expand_axes(topology, topology.spec.views[view].over))
        start = min(axes.index(name) for name in spanned)
        named = replica_axes(topology, view) if called else ()
        names = {run[0]: name for name in named if len(run := expand_axes(topology, (name,))) == 1}
        before, after = (
            [names.get(name, name) for name in part if name not in spanned] for part in (axes[:start], axes[start:])
        )
        return (*before, *topology.spec.views[view].axes, *after)

    def _found(self, axes: tuple[Axis, ...]) -> DeviceMesh:
        views = (self.grid_of(view, called=True) for view in self._state.topology.spec.views)
        for root in (self._merged_axes(), self._state.topology.base_axes, *views):
            places = [root.index(axis) for axis in axes if axis in root]
            if len(places) == len(axes) and places == sorted(set(places)):
                mesh = self.root(root)
                return mesh if len(axes) == mesh.ndim else mesh[tuple(self.dim_name(axis) for axis in axes)]
        return self.root(axes)

    def _merged_axes(self) -> tuple[Axis, ...]:
        """The base axes with those that shard parameters, and those that replicate them, read as one each."""
        topology = self._state.topology
        axes: tuple[Axis, ...] = topology.base_axes
        for part in ("params", "replicate"):
            run = expand_axes(topology, topology.spec.roles.get(part, ()))
            starts = [i for i in range(len(axes)) if run and axes[i : i + len(run)] == run]
            if starts:
                axes = (*axes[: starts[0]], self._named(run), *axes[starts[0] + len(run) :])
        return axes

    def _named(self, axes: tuple[str, ...]) -> Axis:
        """Return the name of an axis that reads several as one, or the axes themselves where none is declared.

        Where only one of them is larger than 1 it is that one, as VeOmni calls it, if wrappers may use its group.
        """
        topology = self._state.topology
        run = expand_axes(topology, axes)
        large = [name for name in run if topology.size(name) > 1] or list(run[:1])
        if len(run) == 1 or (len(large) == 1 and lane_of(topology, large[0]) == "param"):
            return large[0]
        names = [name for name in topology.spec.combined if expand_axes(topology, (name,)) == run]
        return names[0] if names else run

    def _view_of(self, what: object, axes: Sequence[str]) -> str | None:
        """Return the view that axes belong to, None for base axes only; refuse axes of several factorisations."""
        topology = self._state.topology
        used = set(expand_axes(topology, axes))
        views = {name: view for name, view in topology.spec.named_views if used & set(view.axes)}
        if not views:
            return None
        found = [f"view {name!r}" for name in views]
        view = next(iter(views.values()))
        found += sorted(map(repr, used & set(expand_axes(topology, view.over)) - set(view.axes)))
        if len(found) > 1:
            raise ShardingError(
                f"{what!r} mixes axes of {listed(found)}, which factor the same ranks in different ways. A mesh and a "
                f"spec have axes of one view, beside base axes that it does not span: use two, one for each.",
                asked=what,
                views=tuple(views),
            )
        return next(iter(views))

    def _array_mesh(self, view: str | None) -> tuple[DeviceMesh, tuple[Digit, ...]]:
        found = self._arrays.get(view)
        if found is None:
            found = self._arrays[view] = self._array_mesh_of(self._array_axes(view))
        return found

    def _array_axes(self, view: str | None) -> list[str]:
        """The axes of size > 1 on which arrays are split."""
        topology = self._state.topology
        large = [name for name in self.grid_of(view) if topology.size(name) > 1]
        return sorted(large, key=lambda name: -topology.layout(name).digits[0].stride)

    def _array_mesh_of(self, axes: list[str]) -> tuple[DeviceMesh, tuple[Digit, ...]]:
        state, topology = self._state, self._state.topology
        if not axes:
            return self.cut((topology.base_axes[0],)), (Digit(1, 1),)
        if len(axes) > placements.QUIET_DIMS:
            caution(WIDE.format(label=state.label, count=len(axes), names=listed(axes)))
        layouts = [topology.layout(name) for name in axes]
        digits = tuple(digit for layout in layouts for digit in layout.digits)
        if len(digits) == len(axes):
            return self.cut(tuple(axes)), digits
        dims = [f"{name}.{i}" for name, layout in zip(axes, layouts, strict=True) for i in range(len(layout.digits))]
        groups = [state.group_along(Layout.of([digit])) for digit in digits]
        return self._over(groups, state.ranks(tuple(axes)), tuple(dims)), digits

    def _over(self, groups: list[Any], ranks: Sequence[int], axes: tuple[Axis, ...]) -> DeviceMesh:
        shape = [group.size() for group in groups]
        mesh = torch.tensor(ranks, dtype=torch.int).reshape(shape)
        names = tuple(self.dim_name(axis) for axis in axes)
        device_type = self._state.device_type
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], device_type, mesh=mesh, mesh_dim_names=names)
        return DeviceMesh.from_group(groups, device_type, mesh=mesh, mesh_dim_names=names)


def _native(planned: placements.Placement, spec: P) -> Placement:
    if isinstance(planned, placements.Replicate):
        return Replicate()
    if isinstance(planned, placements.Shard):
        return Shard(planned.dim)
    if isinstance(planned, placements.Partial):
        return Partial(planned.reduce_op)
    strided = private.strided_shard(planned.dim, planned.split_factor)
    if strided is None:
        raise ShardingError(
            f"{spec!r} splits a dim against mesh order, which this version of torch cannot express. List the axes in "
            f"the order of the state's base axes.",
            spec=spec,
        )
    placement: Placement = strided
    return placement


def _placement_plan(native: Placement) -> placements.Placement:
    factor = private.split_factor_of(native)
    if factor is not None:
        return placements.StridedShard(native.dim, factor)  # type: ignore[attr-defined]
    if isinstance(native, Shard):
        return placements.Shard(native.dim)
    return placements.Partial(native.reduce_op) if isinstance(native, Partial) else placements.Replicate()
