"""FSDP2 by a plan: which modules are wrapped over which mesh, and which parameters are DTensors before.

Which spec a parameter gets is in `dualmesh.plan`; meshes are in `meshes`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dualmesh.errors import ShardingError, listed
from dualmesh.lanes import expanded
from dualmesh.partition_spec import P, split_axes
from dualmesh.paths import Pattern

if TYPE_CHECKING:
    from dualmesh_torch.state import TorchState

REST = "_fsdp"
"""How the axis of a view ends that is left for sharding parameters beside NAME."""

NOT_SPLIT = (
    "apply: FSDP2 splits every parameter of a unit over {axes}, but {path!r} has {spec!r}. Name the axes in one dim, "
    "fastest there: dm.P({example!r}); or leave its module out of the units."
)
MIXED = (
    "apply: the unit {unit!r} holds parameters for two meshes: {first!r} is split over {one}, {second!r} over {other}. "
    "Make a unit of its own of the module that holds the second, for example units=('**.experts', ...)."
)
AGAINST = (
    "apply: {path!r} has {spec!r}, which splits dim {dim} over {axes} against mesh order. FSDP2 takes them in the "
    "order {order}."
)


class _Split(NamedTuple):
    """How one parameter of a unit is split."""

    axes: tuple[str, ...]
    """Over which FSDP splits it, expanded."""
    dim: int
    before: dict[str, int]
    """{axis: dim} over which it is a DTensor before."""
    view: str | None


def wrapped(
    model: nn.Module,
    specs: Mapping[nn.Parameter, P],
    units: Sequence[str],
    state: "TorchState",
    clean: Callable[[str], str],
) -> nn.Module:
    """Return the model with its units wrapped, inner ones first. *Local.*

    Raises:
        ShardingError: A unit's parameter is not split as FSDP2 splits, or two of them over different meshes; nothing is
            wrapped then. A pattern matches no module.
    """
    chosen = list(_chosen(model, units, clean))
    plans = []
    managed: set[nn.Parameter] = set()
    for path, unit in chosen:
        own = {clean(f"{path}.{name}" if path else name): p for name, p in unit.named_parameters() if p not in managed}
        managed |= set(own.values())
        plans.append((unit, _plan(path, {where: (p, specs[p]) for where, p in own.items()}, state)))
    for unit, splits in plans:
        _wrap(unit, splits, state)
    return model


def _chosen(model: nn.Module, units: Sequence[str], clean: Callable[[str], str]) -> Iterator[tuple[str, nn.Module]]:
    named = [(clean(name), module) for name, module in model.named_modules()]
    for text in units:
        if not any(Pattern(text).matches(path) for path, _ in named):
            raise ShardingError(f"apply: the unit {text!r} matches no module. Modules: {listed(p for p, _ in named)}.")
    found = [pair for pair in named if any(Pattern(text).matches(pair[0]) for text in units)]
    yield from sorted(found, key=lambda pair: -(pair[0].count(".") + (pair[0] != "")))


def _plan(
    unit: str, parameters: Mapping[str, tuple[nn.Parameter, P]], state: "TorchState"
) -> dict[nn.Parameter, _Split]:
    splits: dict[nn.Parameter, _Split] = {}
    first: tuple[str, _Split] | None = None
    for path, (parameter, spec) in parameters.items():
        split = splits[parameter] = _split(path, spec, state)
        first = first or (path, split)
        if split.axes != first[1].axes:
            raise ShardingError(
                MIXED.format(
                    **{"unit": unit, "first": first[0], "one": listed(first[1].axes), "second": path},
                    other=listed(split.axes),
                ),
                unit=unit,
            )
    return splits


def _split(path: str, spec: P, state: "TorchState") -> _Split:
    topology = state.topology
    view = next((name for name, one in topology.spec.named_views if set(one.axes) & set(spec.axes)), None)
    if view is None:
        named: tuple[str, ...] = topology.role("params")
    else:
        named = tuple(name for name in topology.spec.views[view].axes if name.endswith(REST))
    axes = expanded(topology, named)
    large = tuple(name for name in axes if topology.size(name) > 1)
    order = [name for name in (topology.base_axes if view is None else topology.spec.views[view].axes)]
    dim: int | None = None
    before: dict[str, int] = {}
    for place, entry in enumerate(spec.entries):
        inside = [name for name in expanded(topology, split_axes(entry)) if topology.size(name) > 1]
        if large and tuple(inside[-len(large) :]) == large:
            dim, inside = place, inside[: -len(large)]
        if inside != sorted(inside, key=lambda name: order.index(name) if name in order else -1):
            raise ShardingError(
                AGAINST.format(path=path, spec=spec, dim=place, axes=listed(inside), order=listed(order)), spec=spec
            )
        before |= dict.fromkeys(inside, place)
    if (dim is None and large) or set(before) & set(axes):
        raise ShardingError(
            NOT_SPLIT.format(axes=listed(axes), path=path, spec=spec, example=named[0] if len(named) == 1 else named),
            path=path,
            spec=spec,
        )
    return _Split(axes, dim or 0, before, view)


def _wrap(unit: nn.Module, splits: Mapping[nn.Parameter, _Split], state: "TorchState") -> None:
    if not splits:
        fully_shard(unit, mesh=state.fsdp_mesh)
        return
    one = next(iter(splits.values()))
    fsdp, other = _meshes(one, state)
    dims: dict[nn.Parameter, int] = {}
    for owner in unit.modules():
        for name, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            split = splits.get(parameter)
            if split is None:
                continue
            placed = _before(parameter, split, other)
            if placed is not parameter:
                setattr(owner, name, placed)
            dims[placed] = split.dim
    fully_shard(unit, mesh=fsdp, shard_placement_fn=lambda parameter: Shard(dims[parameter]))


def _before(parameter: nn.Parameter, split: _Split, mesh: DeviceMesh | None) -> nn.Parameter:
    """Return the parameter laid out over the axes beside FSDP's; as it is where there are none."""
    if mesh is None or not split.before:
        return parameter
    names = mesh.mesh_dim_names or ()
    placements = [Shard(split.before[name]) if name in split.before else Replicate() for name in names]
    found = distribute_tensor(parameter, mesh, placements, src_data_rank=None)
    placed = nn.Parameter(found.detach(), requires_grad=parameter.requires_grad)
    placed.__dict__.update(parameter.__dict__)
    return placed


def _meshes(split: _Split, state: "TorchState") -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return FSDP's mesh and the one of the axes beside it, cut from one root as FSDP2 wants."""
    topology = state.topology
    if split.view is None:
        others = [n for n in topology.base_axes if topology.size(n) > 1 and n not in split.axes]
        others = [n for n in others if n not in expanded(topology, topology.spec.roles.get("replicate", ()))]
        return state.fsdp_mesh, state.submesh(*others) if others else None
    view = topology.spec.views[split.view].axes
    names = tuple(sorted(view, key=lambda name: tuple(view).index(name)))
    root = state.submesh(*names)
    called = {name: state.meshes.dim_name(name) for name in names}
    replicas = tuple(n for n in names if n.endswith("_replicate") and topology.size(n) > 1)
    others = [n for n in names if n not in split.axes and not n.endswith("_replicate") and topology.size(n) > 1]
    fsdp = root[tuple(called[name] for name in (*replicas, *split.axes))]
    return fsdp, root[tuple(called[name] for name in others)] if others else None
