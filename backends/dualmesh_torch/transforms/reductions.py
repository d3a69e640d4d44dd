"""The gradient reductions of wrappers, made plain sums over exactly the ranks that must be summed, or refused.

A gradient is a sum over all ranks whose tokens differ (the role "loss") and that hold the same block of the parameter.
What a wrapper reduces over is read from the wrapper, not from how it was made; gradients of arrays are in `gradients`.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dualmesh.errors import ArgumentError, ArrayTypeError, ShardingError, listed
from dualmesh.runtime.registry import registry
from dualmesh.topology.roles import has_token_roles, token_axes
from dualmesh.topology.topology import Axis
from dualmesh_torch import private
from dualmesh_torch.arrays.copies import is_split, left_out_axes, make_up, ranks_along, summed_ranks, view_of
from dualmesh_torch.arrays.replication import digest_of
from dualmesh_torch.models.models import clean, named_tensors
from dualmesh_torch.models.scoped_modules import scope_of

if TYPE_CHECKING:
    from dualmesh_torch.state import TorchState

Runs = tuple[tuple[int, ...], ...]

UNWRAPPED = (
    "sum_gradients: no wrapper reduces the gradient of {paths}, and in {label} tokens differ along {axes}, over the "
    "ranks {ranks}. Wrap first and call this last: fully_shard(module, mesh=state.fsdp_mesh), for example. Parameters "
    "that dm.sync_gradients sums after every backward are named: dm.sum_gradients(model, unwrapped=parameters)."
)
WRONG_RANKS = (
    "sum_gradients: {wrapper} sums the gradient of {path!r} over {found}, but in {label} it is a sum over the ranks "
    "{ranks}, along {axes}: there tokens differ{split}. Wrap over all of them: state.fsdp_mesh for FSDP2, "
    "state.group({axes_code}) for DDP. Of a parameter that differs along an axis say so: "
    "dm.sum_gradients(model, blocks={{axis: parameters}}). Of a part that runs in another state, dm.scoped says so."
)
REPEATED = (
    "sum_gradients: the gradient of {path!r} is reduced by {first} and by {second}, which counts ranks twice. Wrap "
    "each module once."
)
NO_SUM = "sum_gradients: {wrapper} cannot be made a plain sum: {reason}."
SORTED = (
    "its mesh has the ranks {mesh} along a dim whose group has them as {found}, so that replicas of different "
    "shards are added up. Use state.fsdp_mesh, or DeviceMesh.from_group over groups in the order of the mesh"
)
LIKE_COPIES = (
    "sum_gradients: {wrapper} leaves out {axes}, where each index is taken to have experts of its own, but {path!r} "
    "{found} there. A copy must be summed over {axes} too: wrap it over state.fsdp_mesh, in a unit of its own. If each "
    "index does have its own, say so: dm.sum_gradients(model, blocks={{{axis!r}: parameters}})."
)
ELSEWHERE = "sum_gradients: another rank of {label} refused the same model; its error says why. Nothing was changed."


class Managed(NamedTuple):
    """A parameter that a wrapper reduces."""

    parameter: nn.Parameter
    before: tuple[DeviceMesh, Sequence[Any]] | None = None
    """The mesh and placements of the DTensor that it is for the wrapper, if it is one."""


class Reduction(NamedTuple):
    """What one wrapper does to gradients."""

    wrapper: str
    """What it is called in messages."""
    parameters: tuple[Managed, ...]
    runs: Runs
    """The ranks that it reduces over, one list for each of its reductions."""
    mesh: DeviceMesh | None
    refusal: str | None
    """Why it cannot be made a sum, or None."""
    make_sum: Callable[[], None]


class _Place(NamedTuple):
    """Where a parameter is used, and in which state."""

    path: str
    state: "TorchState"


def make_sums(
    model: Any, state: "TorchState", axis: Axis | None, unwrapped: Any, blocks: Mapping[Axis, Any] | None
) -> None:
    """Make the gradient reductions of the wrappers in a model plain sums; see `dualmesh.sum_gradients`.

    *Local*, or collective along the axes that an expert's unit leaves out where that holds plain tensors. Nothing is
    changed where something is refused.

    Raises:
        ArrayTypeError: The model is no module.
        ShardingError: A gradient would not be the sum over the right ranks.
    """
    if not isinstance(model, nn.Module):
        raise ArrayTypeError(f"sum_gradients: found a {type(model).__qualname__}. Give a torch module.")
    left = {parameter for _, parameter in named_tensors("sum_gradients", unwrapped)}
    split: dict[torch.Tensor, list[Axis]] = {}
    for along, some in (blocks or {}).items():
        state.size(along)
        for _, parameter in named_tensors("sum_gradients", some):
            split.setdefault(parameter, []).append(along)
    places = _places(model, state)
    found = list(_reductions(model))
    doubtful: list[tuple[Reduction, Managed, _Place, tuple[str, ...]]] = []
    refusal: Exception | None = None
    try:
        _refuse_wrong_cover(found, places, left, axis, split)
        for reduction in found:
            for managed in reduction.parameters:
                for place in places.get(managed.parameter, ()):
                    out = _check_ranks(reduction, managed, place, axis, split.get(managed.parameter, []))
                    if out:
                        doubtful.append((reduction, managed, place, out))
    except (ArgumentError, ShardingError) as error:  # said when the others know, so that nobody waits for this rank
        refusal = error
    _refuse_copies(doubtful, refusal)
    for reduction in found:
        reduction.make_sum()


def _places(model: nn.Module, state: "TorchState") -> dict[torch.Tensor, list[_Place]]:
    """Return where every parameter that needs a gradient is used; a part that `dm.scoped` scoped has its own state."""
    found: dict[torch.Tensor, list[_Place]] = {}
    seen: set[tuple[nn.Module, int]] = set()

    def walk(module: nn.Module, path: str, ambient: "TorchState") -> None:
        scope = scope_of(module)
        own: Any = ambient if scope is None else registry.get(scope) if isinstance(scope, str) else scope
        if (module, id(own)) in seen:
            return
        seen.add((module, id(own)))
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad:
                found.setdefault(parameter, []).append(_Place(clean(f"{path}.{name}" if path else name), own))
        for name, child in module.named_children():
            walk(child, f"{path}.{name}" if path else name, own)

    walk(model, "", state)
    return found


def _refuse_wrong_cover(
    found: Sequence[Reduction],
    places: Mapping[torch.Tensor, list[_Place]],
    left: set[torch.Tensor],
    axis: Axis | None,
    split: Mapping[torch.Tensor, Sequence[Axis]],
) -> None:
    """Refuse parameters that no wrapper reduces, or two do, and wrappers that do something else than to sum."""
    by: dict[torch.Tensor, Reduction] = {}
    for reduction in found:
        if reduction.refusal is not None and reduction.parameters:
            raise ShardingError(NO_SUM.format(wrapper=reduction.wrapper, reason=reduction.refusal))
        for managed in reduction.parameters:
            first = by.setdefault(managed.parameter, reduction)
            path = next((place.path for place in places.get(managed.parameter, ())), "?")
            if first is not reduction:
                raise ShardingError(REPEATED.format(path=path, first=first.wrapper, second=reduction.wrapper))
            if managed.parameter in left:
                raise ArgumentError(
                    f"sum_gradients: unwrapped= has {path!r}, whose gradient {reduction.wrapper} reduces. Leave it out "
                    f"of unwrapped=, and out of dm.sync_gradients.",
                    path=path,
                )
    bare = [
        place
        for parameter, some in places.items()
        if parameter not in by and parameter not in left
        for place in some
        if not _is_whole(parameter, place.state, axis, split.get(parameter, ()))
    ]
    if bare:
        where = bare[0].state
        axes, ranks = listed(_large_axes(where, axis)), listed(_token_ranks(where, axis))
        more = f" and {len(bare) - 4} more" if len(bare) > 4 else ""
        paths = listed([repr(place.path) for place in bare[:4]]) + more
        raise ShardingError(UNWRAPPED.format(paths=paths, label=where.label, axes=axes, ranks=ranks))


def _is_whole(parameter: torch.Tensor, state: "TorchState", axis: Axis | None, split: Sequence[Axis]) -> bool:
    """Tell whether the gradient of a parameter that nothing reduces is whole: each rank has other blocks, or alone."""
    beside = list(map(state.ranks, split))
    if isinstance(parameter, DTensor):
        beside += [along for _, along in _split_runs(parameter.device_mesh, parameter.placements)]
    tokens, own = _token_ranks(state, axis), state.own_rank()
    return make_up([along for along in beside if set(along) & set(tokens) != {own}], tokens, own)


def _check_ranks(
    reduction: Reduction, managed: Managed, place: _Place, axis: Axis | None, split: Sequence[Axis]
) -> tuple[str, ...]:
    """Refuse a reduction over other ranks than it must be; return the axes along which it is taken to be split.

    Each of these is an axis of an expert's view that nothing but the wrapper's mesh says anything of.
    """
    state, own = place.state, place.state.own_rank()
    beside = [] if managed.before is None else _split_runs(*managed.before)
    beside += [("_".join(_names(name)), state.ranks(name)) for name in split]
    names = () if reduction.mesh is None else reduction.mesh.mesh_dim_names or ()
    out = _left_out(reduction, managed, state)
    wanted = summed_ranks(state, _token_axes(state, axis), view_of(state, (*names, *(name for name, _ in beside))))
    for tokens in wanted:
        # Tensor parallel axes split too, but their ranks have the same tokens.
        runs = [*reduction.runs, *(along for _, along in beside if set(along) & set(tokens) != {own})]
        if make_up(runs, tokens, own):
            return ()
        if out and make_up([*runs, *map(state.ranks, out)], tokens, own):
            return out
    tokens, told = wanted[0], [name for name, along in beside if set(along) & set(wanted[0]) != {own}]
    found = " and ".join(f"the ranks {listed(run)}" for run in reduction.runs) or "this rank alone"
    axes = _large_axes(state, axis)
    raise ShardingError(
        WRONG_RANKS.format(
            **{"wrapper": reduction.wrapper, "path": place.path, "found": found, "label": state.label},
            **{"ranks": listed(tokens), "axes": listed(axes), "axes_code": repr(axes[0] if len(axes) == 1 else axes)},
            split=f", and it is split along {listed(told)}" if told else "",
        ),
        path=place.path,
        ranks=tokens,
    )


def _names(axis: Axis) -> tuple[str, ...]:
    return (axis,) if isinstance(axis, str) else tuple(axis)


def _token_axes(state: "TorchState", axis: Axis | None) -> tuple[str, ...]:
    if axis is None:
        if state.world_size > 1 and not has_token_roles(state.topology):
            state.topology.role("loss")  # refuses, and says how to declare it
        return token_axes(state.topology)
    return _names(axis)


def _large_axes(state: "TorchState", axis: Axis | None) -> tuple[str, ...]:
    axes = _token_axes(state, axis)
    return tuple(name for name in axes if state.size(name) > 1) or axes


def _token_ranks(state: "TorchState", axis: Axis | None) -> tuple[int, ...]:
    axes = _token_axes(state, axis)
    return state.ranks(axes) if axes else (state.own_rank(),)


def _split_runs(mesh: DeviceMesh, placements: Sequence[Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Return (name, ranks) of every mesh dim along which each index has another part."""
    names = mesh.mesh_dim_names or [f"dim {n}" for n in range(mesh.ndim)]
    dims = [n for n, placement in enumerate(placements) if is_split(placement)]
    return [(names[n], tuple(ranks_along(mesh, [m == n for m in range(mesh.ndim)]))) for n in dims]


def _left_out(reduction: Reduction, managed: Managed, state: "TorchState") -> tuple[str, ...]:
    """Return the axes of a view that its wrapper's mesh leaves out and nothing else says anything of."""
    if reduction.mesh is None:
        return ()
    out = [axis for axis in left_out_axes(state, reduction.mesh) if state.size(axis) > 1]
    said = () if managed.before is None else managed.before[0].mesh_dim_names or ()
    return () if any(state.meshes.dim_name(axis) in said for axis in out) else tuple(out)


def _refuse_copies(
    doubtful: Sequence[tuple[Reduction, Managed, _Place, tuple[str, ...]]], refusal: Exception | None
) -> None:
    """Refuse what is taken for experts of each index, but is alike on two. *Collective along the axes left out.*

    What was refused before is raised when all ranks know.
    """
    places = {(id(place.state), out): (place.state, out) for _, _, place, out in doubtful}
    wrong: Exception | None = None
    for state, out in places.values():
        mine = [one for one in doubtful if one[2].state is state and one[3] == out]
        numbers = [_digest(managed.parameter) for _, managed, _, _ in mine]
        for_all = state.host.all_gather((numbers, refusal is not None), out)
        if any(is_refused for _, is_refused in for_all):
            wrong = ArgumentError(ELSEWHERE.format(label=state.label))
            continue
        columns = list(zip(*(theirs for theirs, _ in for_all), strict=False))
        for (reduction, _, place, _), column in zip(mine, columns, strict=False):
            kinds = [one for one in column if one != ""]
            if len(set(kinds)) < len(kinds) or None in kinds:
                found = "has no values yet that could tell" if None in kinds else "has the same values on two"
                words = {"wrapper": reduction.wrapper, "axes": listed(out), "axis": out[0] if len(out) == 1 else out}
                wrong = wrong or ShardingError(
                    LIKE_COPIES.format(path=place.path, found=found, **words), path=place.path
                )
    if refusal is not None or wrong is not None:
        raise refusal or wrong  # type: ignore[misc]


def _digest(parameter: torch.Tensor) -> str | None:
    """Return what tells the values of a shard from others; "" for none, None where there is no memory yet."""
    block = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if block.is_meta:
        return None
    return digest_of(block.detach()) if block.numel() else ""


def _reductions(model: nn.Module) -> Iterator[Reduction]:
    for path, module in model.named_modules():
        where = f" {clean(path)!r}" if clean(path) else ""
        if isinstance(module, FSDPModule):
            yield from _of_fsdp2(module, where)
        elif isinstance(module, FullyShardedDataParallel):
            yield from _of_fsdp1(module, where)
        elif isinstance(module, DistributedDataParallel):
            yield _of_ddp(module, where)
        elif private.is_composable_ddp(module):
            parameters = tuple(Managed(parameter) for parameter in module.parameters() if parameter.requires_grad)
            reason = (
                "it averages in a DistributedDataParallel that exists from the first forward on. Use "
                "DistributedDataParallel, or torch.distributed.fsdp.fully_shard"
            )
            yield Reduction(f"replicate(){where}", parameters, (), None, reason, _nothing)


def _nothing() -> None:
    return None


def _of_fsdp2(module: FSDPModule, where: str) -> Iterator[Reduction]:
    def make_sum() -> None:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)

    for group in private.fsdp2_groups(module):
        runs = tuple(tuple(ranks_along(group.mesh, [n == dim for n in range(group.mesh.ndim)])) for dim in group.dims)
        parameters = tuple(Managed(*one) for one in group.parameters)
        refusal = group.refusal
        in_groups = tuple(_ranks_of(group.mesh.get_group(dim)) for dim in group.dims)
        if len(runs) > 1 and in_groups[-1] != runs[-1] and refusal is None:  # the order of replicas is none
            refusal = SORTED.format(found=listed(in_groups[-1]), mesh=listed(runs[-1]))
        yield Reduction(f"the FSDP2 unit{where}", parameters, runs, group.mesh, refusal, make_sum)


def _of_fsdp1(module: FullyShardedDataParallel, where: str) -> Iterator[Reduction]:
    unit = private.fsdp1_unit(module)
    if unit is not None:
        parameters = tuple(Managed(parameter) for parameter in unit.parameters)
        runs = tuple(_ranks_of(group) for group in unit.groups)
        yield Reduction(f"FullyShardedDataParallel{where}", parameters, runs, None, unit.refusal, unit.make_sum)


def _of_ddp(module: DistributedDataParallel, where: str) -> Reduction:
    held = [
        parameter
        for name, parameter in module.module.named_parameters()
        if parameter.requires_grad and name not in module.parameters_to_ignore
    ]

    def make_sum() -> None:
        if hasattr(module, "dualmesh_sums"):
            return
        sums = _Sums(module, held)
        try:
            module.register_comm_hook(module.process_group, sums.reduce)
        except RuntimeError as error:
            reason = f"it has a communication hook already ({error})"
            raise ShardingError(NO_SUM.format(wrapper=f"DistributedDataParallel{where}", reason=reason)) from error
        module.dualmesh_sums = sums  # type: ignore[assignment]

    refusal = private.ddp_refusal(module, held, is_summed=hasattr(module, "dualmesh_sums"))
    runs = (_ranks_of(module.process_group),)
    return Reduction(f"DistributedDataParallel{where}", tuple(map(Managed, held)), runs, None, refusal, make_sum)


def _ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


class _Sums:
    """A hook of DDP that sums, also where a backward adds to gradients that were summed before.

    DDP reduces what has accumulated, so a sum would count an earlier one once for every rank. Before anything is added
    to it, it is therefore divided into equal shares: what `.grad` holds then always sums up to the gradient.
    """

    def __init__(self, module: DistributedDataParallel, parameters: Sequence[nn.Parameter]) -> None:
        self._size = dist.get_world_size(module.process_group)
        self._summed: set[torch.Tensor] = set()
        # The nodes of the graph that add to gradients; they are hooked only as long as somebody holds them.
        self._nodes = [torch.autograd.graph.get_gradient_edge(parameter).node for parameter in parameters]
        for node, parameter in zip(self._nodes, parameters, strict=True):
            node.register_prehook(functools.partial(self._divide, parameter))

    @torch.no_grad()
    def _divide(self, parameter: nn.Parameter, _: Any) -> None:
        if parameter in self._summed:
            self._summed.discard(parameter)
            if parameter.grad is not None:
                parameter.grad.div_(self._size)

    def reduce(
        self,
        group: dist.ProcessGroup,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        """Sum a bucket; what this backward added nothing to was summed before, and is still to be divided."""
        buffer = bucket.buffer()
        gradients = [buffer] if buffer.is_sparse else bucket.gradients()
        for parameter, gradient in zip(bucket.parameters(), gradients, strict=True):
            if parameter in self._summed:
                gradient.div_(self._size)
            self._summed.add(parameter)
        work: Any = dist.all_reduce(buffer, dist.ReduceOp.SUM, group=group, async_op=True)
        summed: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
        return summed
