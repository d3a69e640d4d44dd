"""The norm of many tensors at once, each element counted once, and gradients scaled to it.

Every copy of an element but one is left out where it lies, and one all-reduce of two numbers over the state adds up
the rest: ranks without tensors take part, and every rank gets the same bits. Gradients themselves are in `gradients`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from dualmesh.errors import ArgumentError, ArrayTypeError, NonFiniteError
from dualmesh.topology import Axis
from dualmesh.tree import leaves
from dualmesh_torch import private

if TYPE_CHECKING:
    from dualmesh_torch.state import TorchState

Counted = tuple[torch.Tensor, tuple[Axis, ...]]
"""A tensor, and the axes beyond its own mesh along which each index has another block of it."""


@torch.no_grad()
def of(state: "TorchState", counted: Sequence[Counted], order: float) -> torch.Tensor:
    """Return the norm of all tensors together, on every rank; no gradient. *Collective over the state.*"""
    held = [_local(tensor) for tensor, _ in counted]
    own = [local for local, one in zip(held, counted, strict=True) if local.numel() and _is_counted_here(state, *one)]
    norms = [torch.linalg.vector_norm(_wide(local), order).double().to(state.device_type) for local in own]
    parts = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64, device=state.device_type)
    # Gloo's maximum loses NaN, so it travels beside the number.
    own_total = parts.nan_to_num(nan=0.0, posinf=inf).max() if order == inf else (parts**order).sum()
    total = torch.stack([own_total, parts.isnan().any().double()])
    if state.world_size > 1:
        reduce = dist.ReduceOp.MAX if order == inf else dist.ReduceOp.SUM
        dist.all_reduce(total, reduce, group=state.party("world").group)
    norm = torch.where(total[1] > 0, torch.nan, total[0] if order == inf else total[0] ** (1 / order))
    is_double = any(local.dtype in (torch.float64, torch.complex128) for local in held)
    return norm if is_double else norm.float()


@torch.no_grad()
def clip(
    state: "TorchState",
    parameters: Any,
    max_norm: float,
    order: float,
    blocks: Mapping[Axis, Any],
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """Scale gradients in place to a norm of at most `max_norm`; return the norm before. *Collective over the state.*

    Raises:
        ArgumentError: Blocks that are not among the parameters.
        NonFiniteError: The norm is NaN or infinite, and that is refused.
    """
    every = dict.fromkeys(_parameters(parameters))
    split: dict[torch.Tensor, tuple[Axis, ...]] = {}
    for axis, some in blocks.items():
        state.size(axis)
        for parameter in dict.fromkeys(_parameters(some)):
            if parameter not in every:
                raise ArgumentError(
                    f"clip_grad_norm_: blocks[{axis!r}] has a parameter of shape {tuple(parameter.shape)} that is not "
                    f"among the parameters. Give all of them as the first argument.",
                    axis=axis,
                )
            split[parameter] = (*split.get(parameter, ()), axis)
    gradients = {parameter: parameter.grad for parameter in every if parameter.grad is not None}
    norm = of(state, [(gradient, split.get(parameter, ())) for parameter, gradient in gradients.items()], order)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise NonFiniteError(
            f"clip_grad_norm_: the norm of order {order} is {norm.item()}, so gradients cannot be scaled by it. Skip "
            f"the step, or leave error_if_nonfinite out.",
            norm=norm.item(),
        )
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients.values():
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        local.mul_(factor.to(local.device))
    return norm


def _parameters(given: Any) -> Iterator[torch.Tensor]:
    """Yield the parameters of a module, a tree or any iterable."""
    if isinstance(given, torch.nn.Module):
        found: Iterable[Any] = given.parameters()
    elif isinstance(given, torch.Tensor | Mapping | list | tuple):
        found = leaves(given)
    else:
        found = given if isinstance(given, Iterable) else [given]
    for one in found:
        if not isinstance(one, torch.Tensor):
            raise ArrayTypeError(f"clip_grad_norm_: found a {type(one).__qualname__}. Give parameters or a module.")
        yield one


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard; values still to be summed are summed. *Collective over the mesh then.*"""
    if not isinstance(tensor, DTensor):
        return tensor
    if any(isinstance(one, Partial) for one in tensor.placements):
        whole = [Replicate() if isinstance(one, Partial) else one for one in tensor.placements]
        tensor = tensor.redistribute(tensor.device_mesh, whole)
    shard: torch.Tensor = tensor.to_local()
    return shard


def _wide(local: torch.Tensor) -> torch.Tensor:
    if not (local.is_floating_point() or local.is_complex()):
        return local.double()
    return local.float() if local.itemsize < 4 else local


def _is_counted_here(state: "TorchState", tensor: torch.Tensor, axes: tuple[Axis, ...]) -> bool:
    """Tell whether this rank holds the copy that counts: the one with the state's first rank among its holders."""
    rank = state.own_rank()
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            return False
        place = tuple(
            0 if one.is_shard() or private.split_factor_of(one) is not None else index
            for one, index in zip(tensor.placements, coordinate, strict=True)
        )
        rank = int(mesh.mesh[place])
        axes = (*axes, *_left_out(state, mesh))
    for axis in axes:
        rank = state.ranks(axis, rank)[0]
    return state.topology.position(state.grid_rank(rank)) == 0


def _left_out(state: "TorchState", mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the axes of a view that a mesh of the same view leaves out: there each index has experts of its own."""
    names = set(mesh.mesh_dim_names or ())
    for _, view in state.topology.spec.named_views:
        present = [axis for axis in view.axes if state.meshes.dim_name(axis) in names]
        if present:
            return tuple(axis for axis in view.axes if axis not in present)
    return ()
