"""The loss and its gradients with every factor equal to one.

The differentiated objective is the sum over ranks of each rank's scalar; this module makes trainers need no size.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from dualmesh import ops
from dualmesh._support.checks import check_flag
from dualmesh._support.optional_imports import array_api_compat, np
from dualmesh.backend.state import ParallelState
from dualmesh.errors import ArgumentError, ArrayTypeError, ShapeError
from dualmesh.runtime.scope import resolve_state
from dualmesh.runtime.single_process import SingleProcessState
from dualmesh.topology.roles import expand_axes, stage_axes
from dualmesh.topology.topology import Axis, Topology


def token_mean(
    loss_sum: Any, count: Any, axis: Axis | None = None, *, total: Any = None, state: ParallelState | None = None
) -> tuple[Any, Any]:
    """Return (objective, value) of a mean over all tokens of all ranks.

    objective = loss_sum / total; the sum over ranks of the objectives is the global mean, so gradients are summed
    and no factor appears. value = that mean on every rank, for the log, cut off from the gradient (not before any state
    is registered, when nobody knows the framework). A rank with a count of 0 contributes 0 whatever its loss_sum is,
    NaN too; with no token anywhere both are 0. A loss of 16 bits is divided in float32.

    *Collective over the axis.*

    Args:
        loss_sum: This rank's summed loss, a floating-point scalar, shape ().
        count: This rank's number of tokens, a number or a scalar array, not negative. What cannot be looked at (traced,
            on an accelerator) and is negative makes both results NaN on every rank.
        axis: The axis over which tokens differ; None: the role "loss".
        total: The number of tokens of all ranks (and of all micro-batches), at least this rank's `count` and more than
            0, a number or a scalar array; None: the sum of `count` over the axis. One that cannot be looked at and is
            less than `count` makes both results NaN; 0 with a count of 0 is 0 there.

    Raises:
        ArgumentError: A count or total that is no such number.
        ArrayTypeError: `loss_sum` is no floating-point array; counts are booleans.
        ShapeError: One of them is no scalar.
    """
    owner = resolve_state("token_mean", state)
    over = owner.topology.role("loss") if axis is None else axis
    if not hasattr(loss_sum, "dtype"):
        raise ArrayTypeError(f"token_mean: loss_sum is {loss_sum!r}. Give a floating-point scalar array.", x=loss_sum)
    xp = array_api_compat.array_namespace(loss_sum)
    if not xp.isdtype(loss_sum.dtype, "real floating"):
        raise ArrayTypeError(
            f"token_mean: loss_sum has dtype {loss_sum.dtype}. Give floating-point numbers.", x=loss_sum
        )
    _check_scalar("loss_sum", loss_sum)
    own, whole = _number_of(owner, "count", count), _number_of(owner, "total", total)
    if whole is not None and (whole < (own or 0) or whole == 0):
        raise ArgumentError(
            f"token_mean: total={total!r} for count={count!r}. The total counts the tokens of all ranks and "
            f"micro-batches: at least this rank's, and more than 0. Leave it out to have the counts added up.",
            total=total,
            count=count,
        )
    if loss_sum.dtype.itemsize < 4:
        loss_sum = xp.astype(loss_sum, xp.float32)  # 16 bits count no tokens: float16 ends at 65504
    cut = _unchanged if isinstance(owner, SingleProcessState) else owner.collectives.stop_gradient
    zero = xp.zeros_like(loss_sum)
    held = cut(_as_dtype_of(xp, loss_sum, count))
    # A negative count that nobody could look at: not a number, on every rank, rather than a wrong mean.
    held = xp.where(held < 0, zero + math.nan, held) if own is None else held
    tokens = ops.all_reduce(held, over, state=owner) if total is None else cut(_as_dtype_of(xp, loss_sum, total))
    tokens = xp.where(tokens < held, zero + math.nan, tokens) if own is None or whole is None else tokens
    counted = loss_sum if own else xp.where(held == 0, zero, loss_sum)
    objective = counted / xp.where(tokens == 0, zero + 1, tokens)
    return objective, ops.all_reduce(cut(objective), over, state=owner)


def _number_of(owner: ParallelState, name: str, number: Any) -> float | None:
    """Return a count where it is known, None where it is not, or refuse it."""
    if number is None and name == "total":
        return None
    if hasattr(number, "dtype"):
        xp = array_api_compat.array_namespace(number)
        if xp.isdtype(number.dtype, "bool") or not xp.isdtype(number.dtype, ("integral", "real floating")):
            raise ArrayTypeError(
                f"token_mean: {name} has dtype {number.dtype}. Give a number of tokens.", **{name: number}
            )
        _check_scalar(name, number)
        if array_api_compat.is_numpy_array(number):
            known: float | None = float(number)
        else:
            known = None if isinstance(owner, SingleProcessState) else owner.collectives.known_number(number)
    elif isinstance(number, int | float) and not isinstance(number, bool):
        known = float(number)
    else:
        raise ArgumentError(f"token_mean: {name} is {number!r}. Give a number or a scalar array.", **{name: number})
    if known is not None and not (math.isfinite(known) and known >= 0):
        raise ArgumentError(f"token_mean: {name}={known}. Give a number of tokens, at least 0.", **{name: number})
    return known


def _check_scalar(name: str, x: Any) -> None:
    shape = tuple(x.shape)
    if shape:
        raise ShapeError(
            f"token_mean: {name} has shape {shape}. Give a scalar, shape (): the sum over this rank's tokens.",
            shape=shape,
        )


def _as_dtype_of(xp: Any, like: Any, number: Any) -> Any:
    """Return a number as a scalar array of the dtype of another: JAX may be set to promote nothing by itself."""
    if isinstance(number, np.generic | np.ndarray) and number.ndim == 0:
        number = number.item()
    return xp.zeros_like(like) + (xp.astype(number, like.dtype) if hasattr(number, "dtype") else number)


def _unchanged(x: Any) -> Any:
    return x


def sum_gradients(
    model: Any,
    axis: Axis | None = None,
    *,
    unwrapped: Any = (),
    blocks: Mapping[Axis, Any] | None = None,
    state: ParallelState | None = None,
) -> None:
    """Make the gradient reductions of the wrappers in `model` plain sums over exactly the ranks that must be summed.

    With `token_mean`'s objective the gradient of the global loss is the sum over the ranks whose tokens differ. Torch:
    wrappers are FSDP2, FSDP1 and DDP; call this once, after the last wrapper. Whatever would not be that sum is refused
    and nothing is changed: wrappers over other ranks, one around another, parameters that none reduces. Where gradients
    are values, as in JAX, there is nothing to do.

    *Local*, or collective over the axes that an expert's unit leaves out where it holds plain tensors: copies of each
    other are refused there.

    Args:
        model: A module. Parts that `dm.scoped` scoped belong to their own states.
        axis: The axes over which tokens differ; None: the role "loss" of each part's state.
        unwrapped: Parameters that no wrapper reduces; `sync_gradients` sums theirs.
        blocks: Parameters of which each index along an axis holds another part, as in `clip_grad_norm_`, where no
            DTensor says so: {"ep": experts.parameters()}.

    Raises:
        ShardingError: A gradient would not be the sum over the right ranks.
    """
    owner = resolve_state("sum_gradients", state)
    owner.require_live("sum_gradients")
    if axis is not None:
        owner.size(axis)
    if blocks is not None and not isinstance(blocks, Mapping):
        raise ArgumentError(f"sum_gradients: blocks={blocks!r}. Give a dict of axes to parameters.", blocks=blocks)
    if isinstance(unwrapped, Iterator):
        unwrapped = list(unwrapped)
    given: dict[str, Any] = {"axis": axis, "unwrapped": unwrapped or None, "blocks": blocks or None}
    owner.programs.sum_gradients(model, **{name: value for name, value in given.items() if value is not None})


def sync_gradients(params: Any, axis: Axis | None = None, *, state: ParallelState | None = None) -> Any:
    """Sum the gradients of replicated, unwrapped parameters over the axis that they are replicated on.

    *Collective over the axis.* Torch: `params` are parameters or a module; their `.grad` is summed in place. JAX:
    `params` is a tree of per-rank gradients inside `shard_map`; the summed tree is returned.

    Args:
        axis: The axis; None: the role "loss".
    """
    owner = resolve_state("sync_gradients", state)
    over = owner.topology.role("loss") if axis is None else axis
    owner.require_ready("sync_gradients")
    return params if owner.size(over) == 1 else owner.programs.sync_gradients(params, over)


def global_norm(tree: Any, ord: float = 2, axis: Axis | None = None, *, state: ParallelState | None = None) -> Any:
    """Return the norm of all arrays in a tree, taken as one vector; each element counts once. *Collective.*

    Args:
        tree: Nested containers of global arrays: DTensors, JAX arrays; of gradients to clip, for example. A plain
            torch tensor, or a DTensor beyond its own mesh, counts as equal on every rank that holds it; an expert whose
            mesh leaves out axes of its view, as different along those.
        ord: The order of the norm, above 0; inf is the largest absolute value.
        axis: The axis along which per-rank blocks differ: blocks of a tensor-parallel module, say. Give blocks and
            replicated arrays in two calls and put their norms together.
    """
    owner = resolve_state("global_norm", state)
    order = _order_of("global_norm", "ord", ord)
    owner.require_ready("global_norm")
    split = axis if axis is not None and owner.size(axis) > 1 else None
    return owner.programs.global_norm(tree, order, split)


def clip_grad_norm_(
    parameters: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    blocks: Mapping[Axis, Any] | None = None,
    state: ParallelState | None = None,
) -> Any:
    """Scale gradients in place so that their norm, of all taken as one vector, is at most `max_norm`. *Collective.*

    The norm is the root of order norm_type of the summed powers of all elements of the whole model, each once, or the
    largest magnitude for inf; then gradients are multiplied by min(1, max_norm / (norm + 1e-6)), as in torch. Torch
    only: where gradients are values, scale them by `global_norm`. Every rank of the state calls it, with or without
    parameters.

    Args:
        parameters: A module, whose names tell apart what ranks hold, or parameters; those without a gradient count as
            0, sparse gradients by their values.
        blocks: Parameters of which each index along an axis holds another part: {"tp": mlp.parameters()} where
            per-rank code splits plain tensors. The mesh of a DTensor is known, the view of an expert too, and along
            the axes of the role "stages" all parameters are taken to differ, unless those are named here.

    Returns:
        The norm before, a scalar, the same on every rank.

    Raises:
        ArgumentError: Ranks hold different numbers of tensors that look alike, or another rank refused what it got.
        NonFiniteError: It is NaN or infinite, and `error_if_nonfinite`.
    """
    owner = resolve_state("clip_grad_norm_", state)
    order = _order_of("clip_grad_norm_", "norm_type", norm_type)
    if isinstance(max_norm, bool) or not isinstance(max_norm, int | float) or not max_norm >= 0:
        raise ArgumentError(f"clip_grad_norm_: max_norm={max_norm!r}. Give a number, at least 0.", max_norm=max_norm)
    if blocks is not None and not isinstance(blocks, Mapping):
        raise ArgumentError(f"clip_grad_norm_: blocks={blocks!r}. Give a dict of axes to parameters.", blocks=blocks)
    flag = check_flag("clip_grad_norm_", "error_if_nonfinite", error_if_nonfinite)
    owner.require_ready("clip_grad_norm_")
    if isinstance(parameters, Iterator):
        parameters = list(parameters)
    stages = dict.fromkeys(_stages_unnamed(owner.topology, blocks or {}), parameters)
    return owner.programs.clip_grad_norm_(parameters, float(max_norm), order, {**stages, **(blocks or {})}, flag)


def _stages_unnamed(topology: Topology, blocks: Mapping[Axis, Any]) -> list[Axis]:
    """Return the axes of pipeline stages that no key of the blocks names, be it together as a combined axis. *Pure.*"""
    stages = stage_axes(topology)
    keys = [expand_axes(topology, axis if isinstance(axis, tuple) else (axis,)) for axis in blocks]
    named = {name for key in keys if set(key) <= set(stages) for name in key}
    return [name for name in stages if name not in named]


def _order_of(where: str, name: str, order: Any) -> float:
    if isinstance(order, bool) or not isinstance(order, int | float) or not order > 0:
        raise ArgumentError(f"{where}: {name}={order!r}. Give a number above 0, or inf.", **{name: order})
    return float(order)
