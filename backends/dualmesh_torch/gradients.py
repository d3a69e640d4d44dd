"""Gradients of global arrays, and the reductions of wrappers made plain sums.

The objective is the sum over ranks of each rank's scalar, so no factor appears anywhere.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dualmesh.errors import ArrayTypeError, NotDifferentiableError
from dualmesh.tree import leaves
from dualmesh_torch import eager
from dualmesh_torch.exchanges import exchange
from dualmesh_torch.party import Party

SUM = dist.ReduceOp.SUM
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


def make_sums(model: Any) -> None:
    """Make the reductions of FSDP2 and DDP in a model plain sums. *Local*; doing it twice changes nothing.

    Raises:
        ArrayTypeError: The model is no module.
    """
    if not isinstance(model, torch.nn.Module):
        raise ArrayTypeError(f"sum_gradients: found a {type(model).__qualname__}. Give a torch module.")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        elif isinstance(module, DistributedDataParallel) and not getattr(module, "dualmesh_sums", False):
            module.register_comm_hook(module.process_group, _summed_bucket)
            module.dualmesh_sums = True  # type: ignore[assignment]


def _summed_bucket(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    work: Any = dist.all_reduce(bucket.buffer(), SUM, group=group, async_op=True)
    summed: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
    return summed


def synced(params: Any, party: Party) -> Any:
    """Sum gradients in place over a group; one that is missing counts as zeros, a sparse one becomes dense.

    *Collective over the group*: also ranks whose gradient is sparse or missing reduce a dense one.

    Raises:
        ArrayTypeError: A parameter is a DTensor; nothing was summed then.
    """
    distinct = dict.fromkeys(_parameters(params))  # a tied parameter has one gradient
    for parameter in distinct:
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
            with exchange("sync_gradients", party, own):
                total = eager.all_reduce(own, party, op="sum")
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
