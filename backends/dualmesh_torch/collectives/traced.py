"""The collectives of `transpose_rules` in compiled code: functional operators that torch.compile traces.

Outside compiled code `eager` and the gradients in `collectives` take their place.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from dualmesh.backend.transpose_rules import WITHOUT_GRADIENT, Call, call, gradient
from dualmesh.topology.topology import Axis
from dualmesh_torch.collectives import ragged, tensor_parallel
from dualmesh_torch.collectives.block_layout import fronted, gathered_shape, joined
from dualmesh_torch.collectives.compile_errors import refuse_gradient
from dualmesh_torch.collectives.dtypes import carried, resolved, summable, uncarried, unsummable
from dualmesh_torch.collectives.eager import Pairs
from dualmesh_torch.collectives.group_member import Party
from dualmesh_torch.collectives.ragged import Counts
from dualmesh_torch.private import FUNCTIONAL

Tensor = torch.Tensor


def all_reduce(x: Tensor, party: Party, *, op: str) -> Tensor:
    """Reduce elementwise."""
    if not x.numel():
        return x.clone()
    total = FUNCTIONAL.all_reduce(summable("ops.all_reduce", x), "sum" if op == "mean" else op, party.name)
    total = FUNCTIONAL.wait_tensor(total)
    return unsummable(total / party.size if op == "mean" else total, x.dtype)


def all_gather(x: Tensor, party: Party, *, dim: int) -> Tensor:
    """Concatenate along a dim."""
    if not x.numel():
        return x.new_empty(gathered_shape(x, dim, party.size))
    sent = carried(x.contiguous())
    blocks = FUNCTIONAL.wait_tensor(FUNCTIONAL.all_gather_into_tensor(sent, party.size, party.name))
    found = uncarried(blocks, x.dtype)
    return found if dim == 0 else joined(torch.unflatten(found, 0, (party.size, x.shape[0])), dim)


def reduce_scatter(x: Tensor, party: Party, *, dim: int, op: str) -> Tensor:
    """Reduce, keep block `index`."""
    blocks = summable("ops.reduce_scatter", fronted(x, dim, party.size))
    if not blocks.numel():
        return unsummable(blocks.new_empty(blocks.shape[1:]), x.dtype)
    # The operator scatters dim 0, which must hold the blocks one after another.
    whole = blocks.flatten(0, 1) if blocks.dim() > 1 else blocks
    total = FUNCTIONAL.wait_tensor(FUNCTIONAL.reduce_scatter_tensor(whole, "sum", party.size, party.name))
    total = total.view(blocks.shape[1:])
    return unsummable(total / party.size if op == "mean" else total, x.dtype)


def all_to_all(x: Tensor, party: Party, *, split_dim: int, concat_dim: int) -> Tensor:
    """Trade blocks of one dim for blocks of another."""
    sent = fronted(x, split_dim, party.size).contiguous()
    if not sent.numel():
        return joined(sent, concat_dim)
    each = [1] * party.size
    found = FUNCTIONAL.wait_tensor(FUNCTIONAL.all_to_all_single(_rows(sent), each, each, party.name))
    return joined(uncarried(found.view(-1), x.dtype).view(sent.shape), concat_dim)


def broadcast(x: Tensor, party: Party, *, src: int) -> Tensor:
    """Return the bits of index `src`."""
    if not x.numel():
        return x.clone()
    found = FUNCTIONAL.wait_tensor(FUNCTIONAL.broadcast(carried(x.contiguous().view(-1)), src, party.name))
    return uncarried(found, x.dtype).view(x.shape)


def reduce(x: Tensor, party: Party, *, src: int) -> Tensor:
    """Sum to index `src`, zeros elsewhere: the transpose of `broadcast`."""
    total = all_reduce(x, party, op="sum")
    return total if party.index == src else torch.zeros_like(total)


def permute(x: Tensor, party: Party, *, pairs: Pairs) -> Tensor:
    """Send to a pair's dst, receive from a pair's src, zeros where there is none."""
    target = next((dst for src, dst in pairs if src == party.index), None)
    source = next((src for src, dst in pairs if dst == party.index), None)
    return _sent(x, party, target, source)


def shift(x: Tensor, party: Party, *, offset: int, wrap: bool) -> Tensor:
    """Send `offset` indices on, around the end or zeros where nothing comes."""
    return _sent(x, party, party.at(party.index + offset, wrap), party.at(party.index - offset, wrap))


def _sent(x: Tensor, party: Party, target: int | None, source: int | None) -> Tensor:
    if not x.numel():
        return x.clone()
    if party.size == 1:
        return torch.zeros_like(x)
    flat = carried(x.contiguous().view(-1))
    count = flat.shape[0]
    out = [count if index == source else 0 for index in range(party.size)]
    into = [count if index == target else 0 for index in range(party.size)]
    sent = flat if target is not None else flat[:0]
    found = FUNCTIONAL.wait_tensor(FUNCTIONAL.all_to_all_single(sent, out, into, party.name))
    if source is None:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    return uncarried(found, x.dtype).view(x.shape)


def _rows(blocks: Tensor) -> Tensor:
    """Return blocks (count, ...) as carried rows (count, bytes or elements)."""
    return carried(blocks.flatten(1) if blocks.dim() > 1 else blocks.unsqueeze(1))


def traded(rows: Tensor, party: Party, into: Counts, out: Counts) -> Tensor:
    """Send `out[i]` rows to index i, receive `into[i]` rows from it."""
    found: Tensor = FUNCTIONAL.wait_tensor(FUNCTIONAL.all_to_all_single(rows, list(into), list(out), party.name))
    return found


def _summed_apart(x: Tensor, party: Party, *, op: str) -> Tensor:
    """Sum as `all_reduce` does, told apart from it by a shape.

    Torch makes equal computations of one graph one, results included, though they have different gradients.
    """
    return all_reduce(x.unsqueeze(0), party, op=op).squeeze(0)


VERBS: dict[str, Callable[..., Tensor]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "broadcast": broadcast,
    "reduce": reduce,
    "permute": permute,
    "shift": shift,
    "ragged_all_to_all": partial(ragged.all_to_all, traded),
    "enter": tensor_parallel.enter,
    "leave": partial(tensor_parallel.leave, _summed_apart),
}


def applied(verb: str, x: Tensor, axis: Axis, party: Party, settings: dict[str, Any]) -> Tensor:
    """Return what a collective makes of a block, with its gradient. *Collective over the party.*"""
    if x.requires_grad and torch.is_grad_enabled():
        if settings.get("op") in WITHOUT_GRADIENT:
            refuse_gradient(axis, settings["op"])
        found: Tensor = _apply(x, call(verb, axis, party.size, **settings), party)
        return found
    return VERBS[verb](resolved(x), party, **settings)


def backward(cotangent: Tensor, forward: Call, party: Party) -> Tensor:
    """Return the cotangent of what a collective was given. *Collective over the party.*"""
    # The graph of a gradient is kept only where gradients of gradients are asked for.
    run = _apply if torch.is_grad_enabled() and cotangent.requires_grad else _carried_out
    found: Tensor = run(cotangent, gradient(forward), party)
    return found


def _carried_out(x: Tensor, what: Call, party: Party) -> Tensor:
    found = VERBS[what.verb](resolved(x), party, **dict(what.settings))
    return found if what.scale == 1.0 else found * what.scale


class _Linear(torch.autograd.Function):
    """Any collective and, as its gradient, the one that the op table names."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Call, party: Party) -> Tensor:
        ctx.call, ctx.party = forward, party
        found = _carried_out(x, forward, party)
        # Torch 2.11 gives a gradient of zeros to a result that is an intermediate under two names, as `.contiguous()`
        # returns one that lies so already; not seen in 2.13. The view costs nothing in compiled code.
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None, None]:
        (cotangent,) = cotangents
        return backward(cotangent, ctx.call, ctx.party), None, None


_apply: Any = _Linear.apply
