"""Functions of global arrays: DTensors cut into blocks, the per-rank function, DTensors again.

The boundary carries the gradient contract: an input that several ranks hold gets the sum of their gradients, a result
that several ranks hold passes each of them its part.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from dualmesh.backend.transforms import Programs, warn_of_forgotten
from dualmesh.errors import ArgumentError, ArrayTypeError, NotDifferentiableError, ShardingError, listed
from dualmesh.sharding.partition_spec import P, check_axes, dim_layouts, global_shape
from dualmesh.sharding.tree import leaves, mapped, spec_tree
from dualmesh.topology.averaging import AveragingPlan
from dualmesh.topology.roles import expand_axes
from dualmesh.topology.topology import Axis
from dualmesh_torch import private, scope
from dualmesh_torch.arrays.arrays import TorchArrays, tensor_of
from dualmesh_torch.arrays.assembly import assemble
from dualmesh_torch.arrays.replication import check_replicated as check_equal
from dualmesh_torch.federated import average
from dualmesh_torch.transforms import boundary, gradients, input_blocks, norms, reductions
from dualmesh_torch.transforms.closure_inputs import refuse_captured

if TYPE_CHECKING:
    from dualmesh_torch.state import TorchState

NESTED = (
    "shard_map: called inside a shard_map, where arrays are already this rank's blocks. Call the function itself, or "
    "lift the outer function only."
)
MIXED = (
    "shard_map: the function mixes per-rank blocks with a DTensor that it captured. Everything that is laid out over "
    "ranks must be an argument, so that it arrives as this rank's block and gets its gradient."
)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.is_inside = False


_thread = _Thread()


class TorchPrograms(Programs):
    """Per-rank functions over the members of one state."""

    def __init__(self, state: "TorchState", arrays: TorchArrays) -> None:
        self._state = state
        self._arrays = arrays

    def shard_map(
        self,
        fn: Callable[..., Any],
        in_specs: Any,
        out_specs: Any,
        axes: tuple[str, ...] | None,
        check_replicated: bool,
    ) -> Callable[..., Any]:
        for what, specs in (("in_specs", in_specs), ("out_specs", out_specs)):
            self._check_specs(f"shard_map {what}", specs, axes)

        def program(*args: Any) -> Any:
            if _thread.is_inside:
                raise ArgumentError(NESTED)
            refuse_captured(fn)
            specs = spec_tree(in_specs, args, what="shard_map in_specs")
            blocks, tie = self._entered(mapped(self._block, args, specs), specs)
            guard = input_blocks.Blocks(leaves(blocks))
            results = _call(fn, blocks)
            guard.refuse_changed()
            specs = spec_tree(out_specs, results, what="shard_map out_specs")
            if tie is not None:
                results = mapped(lambda one: boundary.tie_result(tensor_of("shard_map", one), tie), results)
            found = mapped(lambda one, spec: self._whole(guard.own(one), spec), results, specs)
            if check_replicated:
                check_equal(self._state, list(leaves(found)), [P(*P.of(spec).entries) for spec in leaves(specs)])
            return found

        return program

    def value_and_grad(self, fn: Callable[..., Any], argnums: tuple[int, ...]) -> Callable[..., tuple[Any, Any]]:
        def differentiated(*args: Any) -> tuple[Any, Any]:
            if max(argnums) >= len(args):
                raise ArgumentError(f"value_and_grad: argnums={argnums}, but {len(args)} argument(s) were given.")
            with gradients.differentiating(leaves([args[n] for n in argnums])), torch.enable_grad():
                fresh = [mapped(_leaf, arg) if n in argnums else arg for n, arg in enumerate(args)]
                value = fn(*fresh)
            if not isinstance(value, torch.Tensor) or value.numel() != 1 or value.dim():
                raise NotDifferentiableError(
                    f"value_and_grad: the function returned {_describe(value)}. It must return one global scalar, "
                    f"shape ().",
                    found=type(value),
                )
            wanted = [leaf for n in argnums for leaf in leaves(fresh[n])]
            found = iter(gradients.of(value, wanted))
            return value.detach(), tuple(mapped(lambda _leaf: next(found), fresh[n]) for n in argnums)

        return differentiated

    def remat(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return scope.remat(fn)

    def sum_gradients(
        self, model: Any, axis: Axis | None = None, unwrapped: Any = (), blocks: Mapping[Axis, Any] | None = None
    ) -> None:
        reductions.make_sums(model, self._state, axis, unwrapped, blocks)

    def sync_gradients(self, params: Any, axis: Axis) -> Any:
        return gradients.sync(params, self._state.member(axis))

    def global_norm(self, tree: Any, order: float, axis: Axis | None) -> Any:
        return norms.of(self._state, tree, order, () if axis is None else (axis,))

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, order: float, blocks: Mapping[Axis, Any], error_if_nonfinite: bool
    ) -> Any:
        return norms.clip(self._state, parameters, max_norm, order, blocks, error_if_nonfinite)

    def federated_mean(self, tree: Any, plan: AveragingPlan) -> Any:
        state, axes = self._state, {"mean": "replica", "exchange": "federated", "broadcast": "replica"}
        rank = state.own_rank()
        home = state.ranks("federation", rank)
        return average(tree, plan, state.grid_rank(rank), lambda step: state.member(axes.get(step, "world")), home)

    def _block(self, x: Any, spec: P) -> torch.Tensor:
        """Return this rank's block."""
        laid_out = self._arrays.placed("shard_map", x, spec)
        if isinstance(x, DTensor) and x.placements != laid_out.placements and x.device_mesh == laid_out.device_mesh:
            self._warn_of_forgotten(x, spec, laid_out.placements)
        block: torch.Tensor = laid_out.to_local(grad_placements=laid_out.placements)
        return block

    def _entered(self, blocks: Any, specs: Any) -> tuple[Any, torch.Tensor | None]:
        """Return the blocks with their gradients summed over the ranks that hold the same, and what ties results."""
        pairs = list(zip(leaves(blocks), leaves(specs), strict=True))
        needing = [(block, self._others(spec)) for block, spec in pairs if block.requires_grad]
        if not needing or not torch.is_grad_enabled():
            return blocks, None
        shared = [(over, self._state.member(over)) if over else None for _, over in needing]
        found, tie = boundary.enter_blocks([block for block, _ in needing], shared)
        entered = iter(found)
        return mapped(lambda block: next(entered) if block.requires_grad else block, blocks), tie

    def _whole(self, result: Any, spec: P) -> DTensor:
        """Return the global array of what the ranks returned; each gets its part of the gradient."""
        block = tensor_of("shard_map", result)
        state = self._state
        if isinstance(block, DTensor):
            raise ArrayTypeError("shard_map: the function returned a DTensor. It must return per-rank blocks.")
        if spec.partial and state.size(spec.partial) > 1:
            if block.dtype is torch.bool:
                raise ArrayTypeError(f"shard_map: {spec!r} sums a bool result, which is not defined. Convert it first.")
            block = state.collectives.all_reduce(block, spec.partial, op="sum")
        spec = P(*spec.entries)
        shape = global_shape(state.topology, spec, block.shape, what="shard_map result")
        dim_layouts(state.topology, spec, shape, what="shard_map result")
        mesh, placements = state.sharding(spec)
        return assemble(block.contiguous(), mesh, placements, shape, _parts(placements))

    def _warn_of_forgotten(self, x: DTensor, spec: P, wanted: Sequence[Placement]) -> None:
        pairs = zip(x.device_mesh.mesh_dim_names or (), x.placements, wanted, strict=False)
        gone = [name for name, has, wants in pairs if isinstance(wants, Replicate) and has.is_shard()]
        if gone:
            warn_of_forgotten(spec, x.shape, gone)

    def _others(self, spec: P) -> tuple[str, ...]:
        """Return the axes over which arrays of a spec are equal: base axes of size > 1, or a view's beside them."""
        topology = self._state.topology
        used = set(expand_axes(topology, spec.axes))
        return tuple(name for name in self._state.meshes.array_axes(spec) if name not in used)

    def _check_specs(self, what: str, specs: Any, axes: tuple[str, ...] | None) -> None:
        if axes is not None:
            self._state.size(axes)
        for leaf in leaves(specs):
            spec = P.of(leaf)
            check_axes(self._state.topology, spec, what=what)
            outside = [name for name in spec.axes if axes is not None and name not in axes]
            if outside:
                raise ShardingError(
                    f"{what}: {spec!r} splits over {listed(outside)}, but axes={axes!r} leaves that to the framework. "
                    f"Name only these axes, or add it.",
                    spec=spec,
                    axes=axes,
                )


def _call(fn: Callable[..., Any], blocks: Sequence[Any]) -> Any:
    _thread.is_inside = True
    try:
        return fn(*blocks)
    except RuntimeError as error:
        if private.mixes_dtensors(error):
            raise ArrayTypeError(MIXED) from error
        raise
    finally:
        _thread.is_inside = False


def _parts(placements: Sequence[Placement]) -> list[Placement]:
    """A replicated result passes each rank a part of its gradient, such that the parts sum to it."""
    return [Partial() if isinstance(one, Replicate) else one for one in placements]


def _leaf(x: Any) -> torch.Tensor:
    return tensor_of("value_and_grad", x).detach().requires_grad_()


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
