"""The norm of many tensors at once, each element counted once, and gradients scaled to it.

Every copy of an element but one is left out where it lies, and one all-reduce over the state adds up the rest: ranks
without tensors take part, every rank gets the same bits, and all refuse where one does. Which copy counts is in
`copies`, gradients themselves are in `gradients`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate

from dualmesh.errors import ArgumentError, ArrayTypeError, NonFiniteError
from dualmesh.topology.topology import Axis
from dualmesh_torch.arrays.copies import Block, Held, blocks_of, first_holders, imbalance, is_here
from dualmesh_torch.collectives.exchanges import exchange
from dualmesh_torch.models.models import named_tensors, refuse_flat

if TYPE_CHECKING:
    from dualmesh_torch.state import TorchState

ELSEWHERE = "{where}: another rank of {label} refused what it was given; its error says why. No gradient was changed."


@torch.no_grad()
def of(state: "TorchState", tree: Any, order: float, axes: tuple[Axis, ...]) -> torch.Tensor:
    """Return the norm of all tensors of a tree together, on every rank; no gradient. *Collective over the state.*

    Raises:
        ArrayTypeError: A leaf is no tensor; where another rank found one, an `ArgumentError`.
    """
    return _norm(
        state, "global_norm", lambda: [Held(x, axes, name) for name, x in _tensors("global_norm", tree)], order
    )


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
        ArgumentError: Blocks that are not among the parameters, here or on another rank.
        NonFiniteError: The norm is NaN or infinite, and that is refused.
    """
    gradients: list[Held] = []

    def found() -> list[Held]:
        gradients.extend(_gradients(state, parameters, blocks))
        return gradients

    norm = _norm(state, "clip_grad_norm_", found, order)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise NonFiniteError(
            f"clip_grad_norm_: the norm of order {order} is {norm.item()}, so gradients cannot be scaled by it. Skip "
            f"the step, or leave error_if_nonfinite out.",
            norm=norm.item(),
        )
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient, _, _ in gradients:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        local.mul_(factor.to(local.device))
    return norm


def _norm(state: "TorchState", where: str, find: Callable[[], Sequence[Held]], order: float) -> torch.Tensor:
    """Return the norm of what `find` returns; all ranks refuse where one does. *Collective over the state.*"""
    shards: list[torch.Tensor] = []
    blocks: list[Block] = []
    refusal: Exception | None = None
    own: torch.Tensor | None = None
    try:
        held = [one for one in find() if is_here(one.tensor)]
        blocks = blocks_of(where, state, held)
        shards = [_local(where, tensor) for tensor, _, _ in held]
        own = _own_total(state, shards, [block.is_first or order == inf for block in blocks], order)
    except Exception as error:  # said when the others know, so that nobody waits for this rank
        refusal = error
    extra = (0.0, 0.0) if order == inf else imbalance(blocks)  # a largest value may be counted twice
    wide = any(shard.dtype in (torch.float64, torch.complex128) for shard in shards)
    total = _over_all(where, state, own, order, (float(refusal is not None), float(wide), *extra))
    _, _, refused, wides, *missing = total.tolist()
    if refusal is not None:
        raise refusal
    if refused:
        raise ArgumentError(ELSEWHERE.format(where=where, label=state.label))
    if any(missing):
        total = _over_all(where, state, _own_total(state, shards, first_holders(where, state, blocks), order), order)
    norm = torch.where(total[1] > 0, torch.nan, total[0] if order == inf else total[0] ** (1 / order))
    return norm if wides else norm.float()  # alike on all ranks, also those without tensors


def _own_total(
    state: "TorchState", shards: Sequence[torch.Tensor], counts: Sequence[bool], order: float
) -> torch.Tensor:
    """Return (sum of powers or largest value, whether NaN is there) of what counts here; gloo's maximum loses NaN."""
    own = [shard for shard, is_counted in zip(shards, counts, strict=True) if is_counted and shard.numel()]
    norms = [torch.linalg.vector_norm(_wide(shard), order).double().to(state.device_type) for shard in own]
    parts = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64, device=state.device_type)
    largest = parts.nan_to_num(nan=0.0, posinf=inf).max()
    return torch.stack([largest if order == inf else (parts**order).sum(), parts.isnan().any().double()])


def _over_all(
    where: str, state: "TorchState", own: torch.Tensor | None, order: float, extra: tuple[float, ...] = ()
) -> torch.Tensor:
    """Return what all ranks have together of own totals, and of further numbers. *Collective over the state.*"""
    numbers = torch.zeros(2 + len(extra), dtype=torch.float64, device=state.device_type)
    if own is not None:
        numbers[:2] = own
    numbers[2:] = torch.tensor(extra, dtype=torch.float64)
    if state.world_size > 1:
        reduce = dist.ReduceOp.MAX if order == inf else dist.ReduceOp.SUM
        member = state.member("world")
        with exchange(where, member, numbers):
            dist.all_reduce(numbers, reduce, group=member.group)
    return numbers


def _gradients(state: "TorchState", parameters: Any, blocks: Mapping[Axis, Any]) -> Iterator[Held]:
    """Yield the gradients of parameters, each with the axes along which it differs."""
    names = {parameter: name for name, parameter in _tensors("clip_grad_norm_", parameters)}
    split: dict[torch.Tensor, tuple[Axis, ...]] = {}
    for axis, some in blocks.items():
        state.size(axis)
        for parameter in dict.fromkeys(found for _, found in _tensors("clip_grad_norm_", some)):
            if parameter not in names:
                raise ArgumentError(
                    f"clip_grad_norm_: blocks[{axis!r}] has a parameter of shape {tuple(parameter.shape)} that is not "
                    f"among the parameters. Give all of them as the first argument.",
                    axis=axis,
                )
            split[parameter] = (*split.get(parameter, ()), axis)
    for parameter, name in names.items():
        if parameter.grad is not None:
            yield Held(parameter.grad, split.get(parameter, ()), name)


def _tensors(where: str, given: Any) -> Iterator[tuple[str | None, torch.Tensor]]:
    for name, tensor in named_tensors(where, given):
        refuse_flat(where, tensor, name)
        yield name, tensor


def _local(where: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of this rank's shard; what is still to be summed is. *Collective over the mesh then.*"""
    if isinstance(tensor, DTensor):
        if any(isinstance(one, Partial) for one in tensor.placements):
            whole = [Replicate() if isinstance(one, Partial) else one for one in tensor.placements]
            tensor = tensor.redistribute(tensor.device_mesh, whole)
        tensor = tensor.to_local()
    if tensor.layout is torch.strided:
        return tensor
    if tensor.layout is torch.sparse_coo:
        return tensor.coalesce().values()
    raise ArrayTypeError(f"{where}: found a tensor of layout {tensor.layout}. Give dense ones, or sparse ones as COO.")


def _wide(local: torch.Tensor) -> torch.Tensor:
    if not (local.is_floating_point() or local.is_complex()):
        return local.double()
    return local.float() if local.itemsize < 4 else local
