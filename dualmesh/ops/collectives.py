"""The collectives: per-rank blocks in, per-rank blocks out, one meaning on every backend.

Arguments are checked in `checks`; what happens to the arrays is in the backends (`Collectives`), the gradient
contract in `transpose_rules`.
"""

from collections.abc import Iterable
from typing import Any

from dualmesh._support.checks import check_flag, check_items
from dualmesh.backend.pending import Finished, Pending
from dualmesh.backend.state import ParallelState
from dualmesh.errors import ArgumentError, listed
from dualmesh.ops.checks import (
    KINDS,
    admit_array,
    check_divides,
    check_reduction,
    checked_dim,
    checked_index,
    least_size,
    resolve_axis,
)
from dualmesh.topology.resolve import whole
from dualmesh.topology.topology import Axis


def all_reduce(x: Any, axis: Axis, op: str = "sum", *, state: ParallelState | None = None, async_: bool = False) -> Any:
    """Reduce elementwise over an axis; every index gets the result, of the shape of `x`.

    *Collective: call on every index of the axis, in the same order.* Gradient of sum and mean: the same all-reduce
    of the cotangents; max and min have none.

    Args:
        op: sum, mean, max or min.
        async_: Return at once, with something whose `wait()` gives the result. Torch communicates meanwhile; JAX
            schedules by itself and has it finished. The gradient is the same. Wait in the same order on every index
            (gradients are communicated in that order backwards), and leave `x` as it is until then.

    Raises:
        ArgumentError: `op` is not sum, mean, max or min.
        ArrayTypeError: The dtype has no such reduction (sums of bool, means of integers).
        NotDifferentiableError: max or min is differentiated.
    """
    owner, axis, size, kind = admit_array("ops.all_reduce", x, axis, state, unequal=True)
    check_reduction("ops.all_reduce", op, kind, KINDS)
    if async_:
        return _start(owner, "all_reduce", x, axis, size, op=op)
    return x if size == 1 else owner.collectives.all_reduce(x, axis, op=op)


def all_gather(x: Any, axis: Axis, dim: int = 0, *, state: ParallelState | None = None, async_: bool = False) -> Any:
    """Concatenate the blocks of all indices along `dim`, in index order.

    *Collective.* `x` has shape (..., n, ...), the result (..., size * n, ...). Gradient: reduce_scatter(sum).
    """
    owner, axis, size, _ = admit_array("ops.all_gather", x, axis, state)
    dim = checked_dim("ops.all_gather", x, dim)
    if async_:
        return _start(owner, "all_gather", x, axis, size, dim=dim)
    return x if size == 1 else owner.collectives.all_gather(x, axis, dim=dim)


def reduce_scatter(
    x: Any, axis: Axis, dim: int = 0, op: str = "sum", *, state: ParallelState | None = None, async_: bool = False
) -> Any:
    """Reduce over an axis and keep block `index` of `dim`.

    *Collective.* `x` has shape (..., size * n, ...), the result (..., n, ...). Gradient: all_gather (of sum; that of
    mean is divided by size).

    Raises:
        ShapeError: The size of the axis does not divide `dim`.
    """
    where = "ops.reduce_scatter"
    owner, axis, size, kind = admit_array(where, x, axis, state)
    check_reduction(where, op, kind, {name: KINDS[name] for name in ("sum", "mean")})
    dim = check_divides(where, x, dim, axis, size)
    if async_:
        return _start(owner, "reduce_scatter", x, axis, size, dim=dim, op=op)
    return x if size == 1 else owner.collectives.reduce_scatter(x, axis, dim=dim, op=op)


def all_to_all(
    x: Any, axis: Axis, split_dim: int, concat_dim: int, *, state: ParallelState | None = None, async_: bool = False
) -> Any:
    """Cut `split_dim` into blocks, send block j to index j, concatenate along `concat_dim` by sender index.

    *Collective.* `split_dim` shrinks by the size of the axis, `concat_dim` grows by it. Gradient: the inverse
    all_to_all(concat_dim, split_dim).
    """
    owner, axis, size, _ = admit_array("ops.all_to_all", x, axis, state)
    split_dim = check_divides("ops.all_to_all", x, split_dim, axis, size)
    concat_dim = checked_dim("ops.all_to_all", x, concat_dim)
    if async_:
        return _start(owner, "all_to_all", x, axis, size, split_dim=split_dim, concat_dim=concat_dim)
    return x if size == 1 else owner.collectives.all_to_all(x, axis, split_dim=split_dim, concat_dim=concat_dim)


def broadcast(x: Any, axis: Axis, src: int = 0, *, state: ParallelState | None = None) -> Any:
    """Return the block of index `src` on every index, bit for bit.

    *Collective.* Every index passes a block of the same shape. Gradient: the sum over indices to `src`, zeros
    elsewhere.

    Args:
        src: An index of the axis, 0..size-1, not a global rank.
    """
    owner, axis, size, _ = admit_array("ops.broadcast", x, axis, state, unequal=True)
    src = checked_index("ops.broadcast", "src", src, axis, least_size(owner, axis, size))
    return x if size == 1 else owner.collectives.broadcast(x, axis, src=src)


def shift(x: Any, axis: Axis, offset: int = 1, wrap: bool = True, *, state: ParallelState | None = None) -> Any:
    """Return the block of index i - offset on index i; zeros where that index is outside and `wrap` is False.

    *Collective.* Gradient: the shift by -offset.
    """
    where = "ops.shift"
    owner, axis, size, _ = admit_array(where, x, axis, state)
    step = offset if type(offset) is int else whole(offset)
    if step is None:
        raise ArgumentError(f"{where}: offset={offset!r} is no integer.", offset=offset)
    wrap = wrap is True or check_flag(where, "wrap", wrap)
    if wrap:
        step %= size
    return x if step == 0 else owner.collectives.shift(x, axis, offset=step, wrap=wrap, size=size)


def permute(x: Any, axis: Axis, pairs: Iterable[tuple[int, int]], *, state: ParallelState | None = None) -> Any:
    """Send the block of each pair's src index to its dst index; other indices get zeros.

    *Collective.* Gradient: the inverse permutation.

    Args:
        pairs: (src, dst) indices of the axis; no src and no dst twice. The same on every index.

    Raises:
        ArgumentError: A pair is out of range or repeats a src or a dst.
    """
    where = "ops.permute"
    owner, axis, size, _ = admit_array(where, x, axis, state, unequal=True)
    least = least_size(owner, axis, size)
    checked = []
    for pair in check_items(where, "pairs", pairs):
        indices = check_items(where, "pairs", pair)
        if len(indices) != 2:
            raise ArgumentError(f"{where}: {pair!r} is no pair. Give (src, dst) indices.", pair=pair)
        src, dst = indices
        checked.append((checked_index(where, "src", src, axis, least), checked_index(where, "dst", dst, axis, least)))
    for side, places in zip(("src", "dst"), zip(*checked, strict=True), strict=False):
        repeated = sorted({index for index in places if places.count(index) > 1})
        if repeated:
            raise ArgumentError(
                f"{where}: {side} {listed(repeated)} is named twice in {checked}. Name each src and each dst once.",
                pairs=tuple(checked),
            )
    return _permute(owner, x, axis, size, tuple(checked))


def take_block(x: Any, axis: Axis, dim: int, *, state: ParallelState | None = None) -> Any:
    """Return my block of a replicated array: block `index` of `dim` cut into size blocks. *Local.*

    Gradient: zeros outside the block; sums over ranks where the array is replicated.
    """
    owner, axis, size, _ = admit_array("ops.take_block", x, axis, state)
    dim = check_divides("ops.take_block", x, dim, axis, size)
    return x if size == 1 else owner.collectives.take_block(x, axis, dim=dim)


def axis_index(axis: Axis, *, state: ParallelState | None = None) -> Any:
    """Return this rank's index along an axis; a traced integer inside a JAX `shard_map`. *Local.*"""
    owner, axis, size = resolve_axis("ops.axis_index", axis, state, unequal=True)
    return 0 if size == 1 else owner.collectives.axis_index(axis)


def axis_size(axis: Axis, *, state: ParallelState | None = None) -> int:
    """Return the number of positions along an axis; traced in JAX where rank groups differ in size. *Pure.*"""
    owner, axis, _ = resolve_axis("ops.axis_size", axis, state, unequal=True)
    return owner.size(axis)


def _start(owner: ParallelState, verb: str, x: Any, axis: Axis, size: int, **settings: Any) -> Pending:
    return Finished(x) if size == 1 else owner.collectives.started(verb, x, axis, **settings)


def _permute(owner: ParallelState, x: Any, axis: Axis, size: int, pairs: tuple[tuple[int, int], ...]) -> Any:
    if len(pairs) == size and all(src == dst for src, dst in pairs):
        return x
    return owner.collectives.permute(x, axis, pairs=tuple(sorted(pairs)))
