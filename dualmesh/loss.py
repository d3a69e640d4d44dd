"""The loss and its gradients with every factor equal to one.

The differentiated objective is the sum over ranks of each rank's scalar; this module makes trainers need no size.
"""

import math
from typing import Any

from dualmesh import ops
from dualmesh.ambient import meant
from dualmesh.errors import ArgumentError, ArrayTypeError
from dualmesh.lazy import array_api_compat
from dualmesh.state import ParallelState
from dualmesh.topology import Axis


def token_mean(
    loss_sum: Any, count: Any, axis: Axis | None = None, *, total: Any = None, state: ParallelState | None = None
) -> tuple[Any, Any]:
    """Return (objective, value) of a mean over all tokens of all ranks.

    objective = loss_sum / total; the sum over ranks of the objectives is the global mean, so gradients are summed
    and no factor appears. value = that mean on every rank, for the log, cut off from the gradient. Ranks without
    tokens contribute 0; with no token anywhere both are 0. A loss of 16 bits is divided in float32.

    *Collective over the axis.*

    Args:
        loss_sum: This rank's summed loss, a floating-point scalar, shape ().
        count: This rank's number of tokens, a number or a scalar array.
        axis: The axis over which tokens differ; None: the role "loss".
        total: The number of tokens of all ranks (and of all micro-batches); None: the sum of `count` over the axis.
    """
    owner = meant("token_mean", state)
    over = owner.topology.role("loss") if axis is None else axis
    if not hasattr(loss_sum, "dtype"):
        raise ArrayTypeError(f"token_mean: loss_sum is {loss_sum!r}. Give a floating-point scalar array.", x=loss_sum)
    for name, number in (("count", count), ("total", total)):
        is_plain = isinstance(number, int | float) and math.isfinite(number)
        if not (is_plain or hasattr(number, "dtype") or (number is None and name == "total")):
            raise ArgumentError(f"token_mean: {name} is {number!r}. Give a number or a scalar array.", **{name: number})
    xp = array_api_compat.array_namespace(loss_sum)
    if loss_sum.dtype.itemsize < 4:
        loss_sum = xp.astype(loss_sum, xp.float32)  # 16 bits count no tokens: float16 ends at 65504
    cut = owner.collectives.stop_gradient if owner.size(over) > 1 else _unchanged
    if total is None:
        own = xp.zeros_like(loss_sum) + count
        total = ops.all_reduce(cut(own), over, state=owner)
    whole = xp.zeros_like(loss_sum) + total
    objective = loss_sum / xp.where(whole > 0, whole, xp.ones_like(whole))
    return objective, ops.all_reduce(cut(objective), over, state=owner)


def _unchanged(x: Any) -> Any:
    return x


def sum_gradients(model: Any, *, state: ParallelState | None = None) -> None:
    """Make every gradient reduction that wrappers in `model` do (FSDP2, DDP) a plain sum. *Local.*

    With `token_mean`'s objective the gradient of the global loss is the sum over ranks. JAX needs nothing.
    """
    owner = meant("sum_gradients", state)
    owner.programs.sum_gradients(model)


def sync_gradients(params: Any, axis: Axis | None = None, *, state: ParallelState | None = None) -> Any:
    """Sum the gradients of replicated, unwrapped parameters over the axis that they are replicated on.

    *Collective over the axis.* Torch: `params` are parameters or a module; their `.grad` is summed in place. JAX:
    `params` is a tree of per-rank gradients inside `shard_map`; the summed tree is returned.

    Args:
        axis: The axis; None: the role "loss".
    """
    owner = meant("sync_gradients", state)
    over = owner.topology.role("loss") if axis is None else axis
    owner.require_ready("sync_gradients")
    return params if owner.size(over) == 1 else owner.programs.sync_gradients(params, over)


def global_norm(tree: Any, ord: float = 2, axis: Axis | None = None, *, state: ParallelState | None = None) -> Any:
    """Return the norm of all arrays in a tree, taken as one vector; each element counts once. *Collective.*

    Args:
        tree: Nested containers of global arrays: DTensors, JAX arrays; of gradients to clip, for example. A plain
            torch tensor, or a DTensor beyond its own mesh, counts as equal on every rank.
        ord: The order of the norm, above 0; inf is the largest absolute value.
        axis: The axis along which per-rank blocks differ: blocks of a tensor-parallel module, say. Give blocks and
            replicated arrays in two calls and put their norms together.
    """
    owner = meant("global_norm", state)
    if isinstance(ord, bool) or not isinstance(ord, int | float) or not ord > 0:
        raise ArgumentError(f"global_norm: ord={ord!r}. Give a number above 0, or inf.", ord=ord)
    owner.require_ready("global_norm")
    split = axis if axis is not None and owner.size(axis) > 1 else None
    return owner.programs.global_norm(tree, float(ord), split)
