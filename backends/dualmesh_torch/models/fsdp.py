"""FSDP2 by a plan: which modules are wrapped over which mesh, and which parameters are DTensors before.

Which spec a parameter gets is in `dualmesh.arrays.plan`; meshes are in `meshes`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dualmesh.errors import ShardingError, listed
from dualmesh.sharding.param_paths import Pattern
from dualmesh.sharding.partition_spec import P, split_axes
from dualmesh.topology.roles import expand_axes, has_token_roles, param_axes, replica_axes, token_axes
from dualmesh.topology.topology import Axis
from dualmesh_torch.arrays.copies import make_up, summed_ranks

if TYPE_CHECKING:
    from dualmesh_torch.state import TorchState

NOT_SPLIT = (
    "apply: FSDP2 splits every parameter of a unit over {axes}, but {path!r} has {spec!r}. Name the axes in one dim, "
    "fastest there: dm.P({example!r}); or leave its module out of the units."
)
NO_REST = (
    "apply: {path!r} has {spec!r}, and view {view!r} does not say which of its axes shards parameters. Axes: {axes}. "
    "Say it in the view, roles={{'params': 'axis'}}, or here, units={{'{unit}': 'axis'}}; or leave its module out of "
    "the units."
)
SPANNED = (
    "apply: view {view!r} spans {kept}, over which parameters have replicas (role 'replicate'), and no axis of it "
    "counts them alone. Factor the view so that one does, or lay it over the other axes."
)
MIXED = (
    "apply: the unit {unit!r} holds parameters for two meshes: {first!r} is split over {one}, {second!r} over {other}. "
    "Make a unit of its own of the module that holds the second, for example units=('**.experts', ...)."
)
NOT_SUMMED = (
    "apply: {path!r} has {spec!r}, and in the unit {unit!r} FSDP2 sums its gradient over {axes}, the ranks {found}, "
    "but in {label} it is a sum over the ranks {ranks}: tokens differ along {tokens}. Name in the spec what else it is "
    "split over, or make its module a unit of its own that FSDP2 splits over the usual axes: {usual}. What is never "
    "trained is not asked: requires_grad_(False) before."
)
AGAINST = (
    "apply: {path!r} has {spec!r}, which splits dim {dim} over {axes} against mesh order. FSDP2 takes them in the "
    "order {order}."
)


class _Split(NamedTuple):
    """How one parameter of a unit is split."""

    axes: tuple[str, ...]
    """Over which FSDP splits it, as they are called."""
    dim: int
    before: dict[str, int]
    """{axis: dim} over which it is a DTensor before."""
    view: str | None


def wrap_units(
    model: nn.Module,
    specs: Mapping[nn.Parameter, P],
    units: Mapping[str, tuple[str, ...] | None],
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
    names: dict[nn.Parameter, str] = {}
    for path, unit, asked in chosen:
        own = {clean(f"{path}.{name}" if path else name): p for name, p in unit.named_parameters() if p not in managed}
        managed |= set(own.values())
        names |= {parameter: where for where, parameter in own.items()}
        plans.append((unit, _plan(path, {where: (p, specs[p]) for where, p in own.items()}, asked, state)))
    for (path, _, _), (_, splits) in zip(chosen, plans, strict=True):
        for parameter, split in splits.items():
            if parameter.requires_grad:
                _refuse_other_sums(path, names[parameter], specs[parameter], split, state)
    for unit, splits in plans:
        _wrap(unit, splits, state)
    return model


def _chosen(
    model: nn.Module, units: Mapping[str, tuple[str, ...] | None], clean: Callable[[str], str]
) -> Iterator[tuple[str, nn.Module, tuple[str, ...] | None]]:
    """Yield (path, module, the axes asked for it), inner ones first."""
    named = [(clean(name), module) for name, module in model.named_modules()]
    for text in units:
        if not any(Pattern(text).matches(path) for path, _ in named):
            raise ShardingError(f"apply: the unit {text!r} matches no module. Modules: {listed(p for p, _ in named)}.")
    found = []
    for path, module in named:
        first = next((text for text in units if Pattern(text).matches(path)), None)
        if first is not None:
            found.append((path, module, units[first]))
    yield from sorted(found, key=lambda one: -(one[0].count(".") + (one[0] != "")))


def _plan(
    unit: str,
    parameters: Mapping[str, tuple[nn.Parameter, P]],
    asked: tuple[str, ...] | None,
    state: "TorchState",
) -> dict[nn.Parameter, _Split]:
    splits: dict[nn.Parameter, _Split] = {}
    first: tuple[str, _Split] | None = None
    for path, (parameter, spec) in parameters.items():
        split = splits[parameter] = _split_axes(unit, path, spec, asked, state)
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


def _split_axes(unit: str, path: str, spec: P, asked: tuple[str, ...] | None, state: "TorchState") -> _Split:
    topology = state.topology
    used = {*expand_axes(topology, spec.axes), *expand_axes(topology, asked or ())}
    view = next((name for name, one in topology.spec.named_views if set(one.axes) & used), None)
    order = state.meshes.grid_of(view)
    named = asked or (topology.role("params") if view is None else param_axes(topology, view))
    if not named:
        raise ShardingError(
            NO_REST.format(
                view=view, axes=listed(topology.spec.views[view or ""].axes), path=path, spec=spec, unit=unit
            ),
            path=path,
            spec=spec,
        )
    axes = expand_axes(topology, named)
    large = tuple(name for name in axes if topology.size(name) > 1)
    dim: int | None = None
    before: dict[str, int] = {}
    for place, entry in enumerate(spec.entries):
        inside = [name for name in expand_axes(topology, split_axes(entry)) if topology.size(name) > 1]
        if large and tuple(inside[-len(large) :]) == large:
            dim, inside = place, inside[: -len(large)]
        if inside != sorted(inside, key=lambda name: order.index(name) if name in order else -1):
            raise ShardingError(
                AGAINST.format(path=path, spec=spec, dim=place, axes=listed(inside), order=listed(order)), spec=spec
            )
        before |= dict.fromkeys(inside, place)
    kept = expand_axes(topology, replica_axes(topology, view))
    if (dim is None and large) or set(before) & {*axes, *kept}:
        raise ShardingError(
            NOT_SPLIT.format(axes=listed(axes), path=path, spec=spec, example=named[0] if len(named) == 1 else named),
            path=path,
            spec=spec,
        )
    return _Split(named, dim or 0, before, view)


def _refuse_other_sums(unit: str, path: str, spec: P, split: _Split, state: "TorchState") -> None:
    """Refuse a parameter whose gradient FSDP2 would not sum over exactly the ranks whose tokens differ."""
    topology = state.topology
    if not has_token_roles(topology):
        return  # nobody can tell: `sum_gradients` asks for the role
    own = state.own_rank()
    kept = expand_axes(topology, replica_axes(topology, split.view))
    reduced = (*kept, *split.axes)
    runs = [state.ranks(axes) for axes in (kept, split.axes) if axes]
    wanted = summed_ranks(state, token_axes(topology), split.view)
    # Tensor parallel axes split too, but their ranks have the same tokens.
    beside = [[ranks for ranks in map(state.ranks, split.before) if set(ranks) & set(some) != {own}] for some in wanted]
    if not any(make_up([*runs, *more], some, own) for more, some in zip(beside, wanted, strict=True)):
        if split.view is not None and not set(kept) <= set(state.meshes.grid_of(split.view)):
            raise ShardingError(SPANNED.format(view=split.view, kept=listed(kept)), view=split.view)
        tokens, named = wanted[0], (reduced, token_axes(topology))
        large = [[name for name in axes if topology.size(name) > 1] or axes for axes in named]
        raise ShardingError(
            NOT_SUMMED.format(
                **{"unit": unit, "path": path, "spec": spec, "label": state.label, "ranks": listed(tokens)},
                **{"axes": listed(large[0]), "tokens": listed(large[1]), "usual": listed(param_axes(topology))},
                found=listed(sorted({rank for run in runs for rank in run})),
            ),
            path=path,
            spec=spec,
        )


def _wrap(unit: nn.Module, splits: Mapping[nn.Parameter, _Split], state: "TorchState") -> None:
    if not splits:
        fully_shard(unit, mesh=state.fsdp_mesh)
        return
    fsdp, other = _meshes(list(splits.values()), state)
    dims: dict[nn.Parameter, int] = {}
    for owner in unit.modules():
        for name, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            split = splits.get(parameter)
            if split is None:
                continue
            called = {state.meshes.dim_name(axis): dim for axis, dim in split.before.items()}
            placed = _before(parameter, called, other)
            if placed is not parameter:
                setattr(owner, name, placed)
            dims[placed] = split.dim
    fully_shard(unit, mesh=fsdp, shard_placement_fn=lambda parameter: Shard(dims[parameter]))


def _before(parameter: nn.Parameter, dims: Mapping[str, int], mesh: DeviceMesh | None) -> nn.Parameter:
    """Return the parameter laid out over the axes beside FSDP's; as it is where there are none."""
    if mesh is None or not dims:
        return parameter
    placements = [Shard(dims[name]) if name in dims else Replicate() for name in mesh.mesh_dim_names or ()]
    found = distribute_tensor(parameter, mesh, placements, src_data_rank=None)
    placed = nn.Parameter(found.detach(), requires_grad=parameter.requires_grad)
    placed.__dict__.update(parameter.__dict__)
    return placed


def _meshes(splits: Sequence[_Split], state: "TorchState") -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return FSDP's mesh and the one of the axes beside it, cut from one root as FSDP2 wants."""
    topology, (named, _, _, view) = state.topology, splits[0]
    used = {name for split in splits for name in split.before}
    others = [name for name in state.meshes.grid_of(view) if name in used]
    beside = state.submesh(*others) if others else None
    if view is None and named == topology.role("params"):
        return state.fsdp_mesh, beside
    replicas, shard = _replicas(view, state), named[0] if len(named) == 1 else named
    return state.meshes.cut((shard,) if replicas is None else (replicas, shard)), beside


def _replicas(view: str | None, state: "TorchState") -> Axis | None:
    """Return the axis that counts the replicas of what a view shards, None where there are none.

    Raises:
        ShardingError: The view mixes them with what it shards over.
    """
    topology = state.topology
    named = replica_axes(topology, view)
    kept = expand_axes(topology, named)
    if topology.size(kept) == 1:
        return None
    grid = state.meshes.grid_of(view)
    # A name of the role's own comes first, unless the view spans what it stands for: meshes do not mix the two.
    for name in (*(name for name in named if set(expand_axes(topology, (name,))) <= set(grid)), *grid):
        if topology.layout(name) == topology.layout(kept):
            return name
    if not set(kept) <= set(grid):
        raise ShardingError(SPANNED.format(view=view, kept=listed(kept)), view=view)
    return kept
