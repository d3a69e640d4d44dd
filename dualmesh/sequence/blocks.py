"""Blocks of a sequence that is split along one dim over an axis: slice, gather, pad, roll, positions.

Attention over a split sequence is in `ulysses` and `ring`.
"""

from typing import Any

from dualmesh import ops
from dualmesh._support.optional_imports import array_api_compat
from dualmesh.backend.state import ParallelState
from dualmesh.errors import ArgumentError, ArrayTypeError, ShapeError
from dualmesh.ops.checks import checked_dim
from dualmesh.runtime.scope import resolve_state
from dualmesh.topology.resolve import positive, whole
from dualmesh.topology.topology import Axis


def slice_sequence(
    x: Any, dim: int, axis: Axis = "sp", *, value: float | None = None, state: ParallelState | None = None
) -> Any:
    """Return my block of a sequence that every index holds whole; padded to a multiple of size. *Local.*

    Gradient: zeros outside the block, so that the sum over ranks is the gradient of the whole sequence.

    Args:
        value: What the end is padded with, as in `pad_sequence`: labels want the class that the loss ignores, -100.

    Raises:
        ArrayTypeError: Integers or booleans would be padded, and no `value` says with what.
    """
    padded = _pad("sequence.slice_sequence", x, dim, axis, value, state)
    return ops.take_block(padded, axis, dim, state=state)


def gather_sequence(
    x: Any, dim: int, axis: Axis = "sp", *, unpadded_length: int | None = None, state: ParallelState | None = None
) -> Any:
    """Return the whole sequence on every index. *Collective over the axis.*

    Gradient: reduce_scatter(sum): every index' use of the whole sequence counts.
    """
    x = ops.all_gather(x, axis, dim, state=state)
    return x if unpadded_length is None else unpad_sequence(x, dim, unpadded_length)


def pad_sequence(
    x: Any, dim: int, axis: Axis = "sp", *, value: float | None = None, state: ParallelState | None = None
) -> Any:
    """Append `value` along `dim` up to the next multiple of the size of the axis. *Local.*

    Where nothing is missing, the array itself is returned, not a copy.

    Args:
        value: Floating-point arrays are padded with zeros where it is None. Integers and booleans mean something:
            tokens, labels, positions, masks; 0 is a class and a token, so there it must be said.

    Raises:
        ArrayTypeError: Integers or booleans would be padded, and no `value` says with what.
    """
    return _pad("sequence.pad_sequence", x, dim, axis, value, state)


def _pad(where: str, x: Any, dim: int, axis: Axis, value: float | None, state: ParallelState | None) -> Any:
    dim = checked_dim(where, x, dim)
    missing = -x.shape[dim] % ops.axis_size(axis, state=state)
    if missing == 0:
        return x
    xp = array_api_compat.array_namespace(x)
    try:
        has_zero = xp.isdtype(x.dtype, ("real floating", "complex floating"))
    except TypeError as error:  # the answer for JAX's typed random keys
        raise ArrayTypeError(
            f"{where}: found dtype {x.dtype}, shape {tuple(x.shape)}, which has no numbers to pad with. Give an array "
            f"of numbers; of random keys, pad jax.random.key_data(keys) with value=..., or make as many as are needed.",
            dim=dim,
            shape=tuple(x.shape),
        ) from error
    if value is None and not has_zero:
        raise ArrayTypeError(
            f"{where}: dim {dim} of shape {tuple(x.shape)} needs {missing} more of dtype {x.dtype}, and 0 may mean "
            f"something there: a class, a token, a position. Give value=..., for example -100 for labels and False for "
            f"a mask.",
            dim=dim,
            shape=tuple(x.shape),
        )
    shape = (*x.shape[:dim], missing, *x.shape[dim + 1 :])
    filling = _checked_filling(where, xp, x.dtype, 0 if value is None else value)
    padding = xp.full(shape, filling, dtype=x.dtype, device=array_api_compat.device(x))
    return xp.concat([x, padding], axis=dim)


def _checked_filling(where: str, xp: Any, dtype: Any, value: Any) -> Any:
    """Return a value that an array of a dtype can hold as it is, or refuse it."""
    fits = isinstance(value, int | float)
    if xp.isdtype(dtype, "bool"):
        fits = isinstance(value, bool)
    elif xp.isdtype(dtype, "integral"):
        limits, number = xp.iinfo(dtype), whole(value)
        fits = number is not None and limits.min <= number <= limits.max
    if not fits:
        raise ArrayTypeError(f"{where}: value={value!r} is none of dtype {dtype}, which it would pad.", value=value)
    return value


def unpad_sequence(x: Any, dim: int, length: int) -> Any:
    """Cut `dim` to its first `length` elements. *Local.*

    The result shares the memory of `x` where its framework has views (torch, numpy).
    """
    where = "sequence.unpad_sequence"
    dim = checked_dim(where, x, dim)
    length = positive(where, "length", length, least=0)
    if length > x.shape[dim]:
        raise ShapeError(
            f"{where}: length {length} is more than dim {dim} of shape {tuple(x.shape)} has.", length=length, dim=dim
        )
    return x if length == x.shape[dim] else x[(*(slice(None),) * dim, slice(0, length))]


def roll(x: Any, shift: int, dim: int, axis: Axis = "sp", *, state: ParallelState | None = None) -> Any:
    """Roll the whole sequence of which `x` is my block: element i of it moves to i + shift, cyclically.

    *Collective over the axis.* Sends one whole block and one remainder at most. Gradient: the roll by -shift.
    """
    where = "sequence.roll"
    dim = checked_dim(where, x, dim)
    steps = whole(shift)
    if steps is None:
        raise ArgumentError(f"{where}: shift={shift!r} is no integer.", shift=shift)
    block = x.shape[dim]
    if block == 0:
        return x
    whole_blocks, rest = divmod(steps % (block * ops.axis_size(axis, state=state)), block)
    near = ops.shift(x, axis, whole_blocks, state=state) if whole_blocks else x
    if rest == 0:
        return near
    lead = (slice(None),) * dim
    tail = ops.shift(x[(*lead, slice(block - rest, block))], axis, whole_blocks + 1, state=state)
    xp = array_api_compat.array_namespace(x)
    return xp.concat([tail, near[(*lead, slice(0, block - rest))]], axis=dim)


def sequence_positions(like: Any, length: int, axis: Axis = "sp", *, state: ParallelState | None = None) -> Any:
    """Return the positions of my block in the whole sequence, integers of shape (length,). *Local.*

    Args:
        like: An array whose framework and device the result takes.
        length: The length of my block.
        axis: The axis over which the sequence is split in index order.
    """
    xp = array_api_compat.array_namespace(like)
    steps = xp.arange(length, device=array_api_compat.device(like))
    return steps + ops.axis_index(axis, state=state) * length


def balanced(x: Any, dim: int, size: int, *, inverse: bool = False) -> Any:
    """Reorder a whole sequence so that equal slices of it cost equal work under a causal mask. *Pure.*

    The sequence is cut into 2 * size chunks and slice i gets chunks i and 2 * size - 1 - i. Apply it to tokens,
    targets and positions alike before they are split; `inverse` puts a gathered sequence back in order.

    Raises:
        ShapeError: 2 * size does not divide the sequence.
    """
    where = "sequence.balanced"
    dim = checked_dim(where, x, dim)
    size = positive(where, "size", size)
    length = x.shape[dim]
    if length % (2 * size):
        raise ShapeError(
            f"{where}: dim {dim} of shape {tuple(x.shape)} has size {length}, which 2 * {size} chunks do not divide. "
            f"Pad it to {-(-length // (2 * size)) * 2 * size}.",
            dim=dim,
            size=size,
            shape=tuple(x.shape),
        )
    chunk = length // (2 * size)
    order = [chunk_index for i in range(size) for chunk_index in (i, 2 * size - 1 - i)]
    if inverse:
        order = sorted(range(2 * size), key=order.__getitem__)
    xp = array_api_compat.array_namespace(x)
    lead = (slice(None),) * dim
    return xp.concat([x[(*lead, slice(i * chunk, (i + 1) * chunk))] for i in order], axis=dim)


def token_weighted_mean(mean: Any, count: Any, axis: Axis = "sp", *, state: ParallelState | None = None) -> Any:
    """Return the mean over the tokens of all indices, from each index' mean; 0 where nobody has tokens. *Collective.*

    Every index gets the value. Gradient of the own mean: own tokens / all tokens, with no sum, as every index counts
    one and the same loss: two indices with 3 tokens and 1 get 0.75 and 0.25. `dm.token_mean` is for sums of losses.

    Args:
        mean: The mean over this index' tokens, a scalar; may be NaN where it has none.
        count: The number of this index' tokens.
        axis: What the tokens are split over.
    """
    owner = resolve_state("sequence.token_weighted_mean", state)
    xp = array_api_compat.array_namespace(mean)
    # Counts are summed as they are, and shares made in 32 bits at least: 16 bits do not hold a count above 256.
    own = count if hasattr(count, "dtype") else xp.asarray(count, device=array_api_compat.device(mean))
    own = owner.collectives.stop_gradient(own)
    total = ops.all_reduce(own, axis, state=state)
    shares = xp.float32 if mean.dtype.itemsize < 4 else mean.dtype
    share = xp.astype(own, shares) / xp.astype(xp.where(total > 0, total, xp.ones_like(total)), shares)
    part = xp.where(own > 0, mean, xp.zeros_like(mean)) * xp.astype(share, mean.dtype)
    return ops.leave(part, axis, state=state)
