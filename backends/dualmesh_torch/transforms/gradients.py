"""Gradients of global arrays, and of parameters that no wrapper reduces.

The objective is the sum over ranks of each rank's scalar, so no factor appears anywhere. What wrappers reduce is in
`reductions`.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dualmesh.errors import ArrayTypeError, NotDifferentiableError
from dualmesh.sharding.tree import leaves
from dualmesh_torch.collectives import eager
from dualmesh_torch.collectives.exchanges import exchange
from dualmesh_torch.collectives.group_member import GroupMember
from dualmesh_torch.models.models import refuse_flat

TWICE = (
    "value_and_grad: called inside a function that value_and_grad differentiates, by something that depends on its "
    "arguments. torch's DTensors have no gradients of gradients. Differentiate once, or by arguments that do not "
    "depend on the outer ones (detach)."
)
CUT = (
    "{where}: found a tensor of shape {shape} that needs a gradient, and its result would have none: it lays out host "
    "arrays. Lay out what is differentiated with dm.constrain or as an argument of dm.shard_map; where no gradient is "
    "wanted, call x.detach() first."
)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.is_differentiating = False


_thread = _Thread()


@contextmanager
def differentiating(wanted: Iterable[Any]) -> Iterator[None]:
    """Mark a block as what `value_and_grad` differentiates. *Local.*

    Args:
        wanted: What to differentiate by.

    Raises:
        NotDifferentiableError: It is such a block already, and what is wanted depends on its arguments.
    """
    outer = _thread.is_differentiating
    if outer and any(isinstance(x, torch.Tensor) and x.requires_grad for x in wanted):
        raise NotDifferentiableError(TWICE)
    _thread.is_differentiating = True
    try:
        yield
    finally:
        _thread.is_differentiating = outer


def refuse_cut(where: str, x: Any) -> None:
    """Refuse to lay out anew, cut off from its gradient, what is being differentiated. *Local.*

    Raises:
        NotDifferentiableError: It was computed from something that needs a gradient, or is differentiated by.
    """
    if isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled():
        if x.grad_fn is not None or _thread.is_differentiating:
            raise NotDifferentiableError(CUT.format(where=where, shape=tuple(x.shape)), shape=tuple(x.shape))


def of(value: torch.Tensor, wanted: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradient of a global scalar by each array, in the array's own placements. *Collective.*"""
    if not value.requires_grad:
        return [torch.zeros_like(leaf, requires_grad=False) for leaf in wanted]
    found = torch.autograd.grad(value, list(wanted), allow_unused=True)
    return [_like(leaf, gradient) for leaf, gradient in zip(wanted, found, strict=True)]


def _like(leaf: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    if gradient is None:
        return torch.zeros_like(leaf, requires_grad=False)
    if isinstance(leaf, DTensor) and isinstance(gradient, DTensor) and gradient.placements != leaf.placements:
        return gradient.redistribute(leaf.device_mesh, leaf.placements)
    return gradient


def sync(params: Any, member: GroupMember) -> Any:
    """Sum gradients in place over a group; one that is missing counts as zeros, a sparse one becomes dense.

    *Collective over the group*: also ranks whose gradient is sparse or missing reduce a dense one.

    Raises:
        ArrayTypeError: A parameter is a DTensor or a piece of FSDP1's, or the module is in DDP, whose gradients are
            reduced already; nothing was summed then.
    """
    distinct = dict.fromkeys(_parameters(params))  # a tied parameter has one gradient
    if isinstance(params, torch.nn.Module) and any(isinstance(m, DistributedDataParallel) for m in params.modules()):
        raise ArrayTypeError(
            "sync_gradients: found a module in DistributedDataParallel, which reduces its gradients itself. Call "
            "dm.sum_gradients(module) once instead; after no_sync() give the parameters."
        )
    for parameter in distinct:
        refuse_flat("sync_gradients", parameter)
        if isinstance(parameter.grad, DTensor) or isinstance(parameter, DTensor):
            raise ArrayTypeError(
                f"sync_gradients: found a DTensor parameter of shape {tuple(parameter.shape)}, whose gradients its "
                f"wrapper or shard_map sums. Give plain parameters only."
            )
    with torch.no_grad():
        for parameter in distinct:
            gradient = parameter.grad
            if not parameter.requires_grad:
                continue
            own = torch.zeros_like(parameter) if gradient is None else gradient.to_dense()
            with exchange("sync_gradients", member, own):
                total = eager.all_reduce(own, member, op="sum")
            if gradient is None or gradient.is_sparse:
                parameter.grad = total
            else:
                gradient.copy_(total)
    return params


def _parameters(params: Any) -> Iterator[torch.Tensor]:
    if isinstance(params, torch.nn.Module):
        yield from params.parameters()
    elif isinstance(params, torch.Tensor | dict | list | tuple):
        yield from leaves(params)
    elif isinstance(params, Iterable):
        yield from params
    else:
        raise ArrayTypeError(f"sync_gradients: found a {type(params).__qualname__}. Give parameters or a module.")
