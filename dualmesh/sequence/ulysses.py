"""Ulysses: trade a split sequence for split heads around attention, and back.

Blocks of sequences without heads are in `blocks`, attention that passes keys around is in `ring`.
"""

from collections.abc import Callable
from typing import Any

from dualmesh import ops
from dualmesh._support.optional_imports import array_api_compat
from dualmesh.backend.state import ParallelState
from dualmesh.errors import ShapeError
from dualmesh.ops.checks import checked_dim, resolve_axis
from dualmesh.sequence.blocks import pad_sequence, unpad_sequence
from dualmesh.topology.topology import Axis


def gather_seq_scatter_heads(
    x: Any,
    *,
    seq_dim: int,
    head_dim: int,
    axis: Axis = "ulysses",
    unpadded_length: int | None = None,
    state: ParallelState | None = None,
) -> Any:
    """Trade a split sequence for split heads: what Ulysses attention does before attention.

    *Collective over the axis.* Shape: `seq_dim` grows from s to size * s, `head_dim` shrinks from h to h / size.
    With fewer heads than positions (grouped KV heads), each head is repeated so that every index holds one; size
    must be a multiple of h. Gradient: the exact transpose.

    Args:
        x: This rank's block, (..., s, ..., h, ...).
        seq_dim: The dim that is split over the axis.
        head_dim: The dim of heads, all of them here.
        unpadded_length: Cut the gathered sequence to this length (see `pad_sequence`).
    """
    where = "sequence.gather_seq_scatter_heads"
    seq_dim, head_dim = _two_dims(where, x, seq_dim, head_dim)
    _, axis, size = resolve_axis(where, axis, state)
    x = _repeated_heads(where, x, head_dim, size, axis)
    x = ops.all_to_all(x, axis, split_dim=head_dim, concat_dim=seq_dim, state=state)
    return x if unpadded_length is None else unpad_sequence(x, seq_dim, unpadded_length)


def gather_heads_scatter_seq(
    x: Any, *, seq_dim: int, head_dim: int, axis: Axis = "ulysses", state: ParallelState | None = None
) -> Any:
    """Trade split heads for a split sequence: what Ulysses attention does after attention.

    *Collective over the axis.* Shape: `seq_dim` is padded with zeros to a multiple of size, then shrinks by size;
    `head_dim` grows from h to size * h. Gradient: the exact transpose.
    """
    seq_dim, head_dim = _two_dims("sequence.gather_heads_scatter_seq", x, seq_dim, head_dim)
    x = pad_sequence(x, seq_dim, axis, state=state)
    return ops.all_to_all(x, axis, split_dim=seq_dim, concat_dim=head_dim, state=state)


def ulysses_attention(
    query: Any,
    key: Any,
    value: Any,
    attend: Callable[[Any, Any, Any], Any],
    *,
    axis: Axis = "ulysses",
    seq_dim: int = 1,
    head_dim: int = 2,
    unpadded_length: int | None = None,
    state: ParallelState | None = None,
) -> Any:
    """Run attention over whole sequences and split heads; blocks of the sequence in, a block of the sequence out.

    *Collective over the axis.* Heads that do not divide are made to: key/value heads are repeated where that
    suffices, else heads are padded with zeros, the same number of query heads to each key/value head as before, and
    the padding is dropped again. Gradient: exact.

    Args:
        query: This rank's block, with heads at `head_dim` and positions at `seq_dim`.
        key: As `query`; the number of heads divides that of `query`.
        value: As `key`.
        attend: Called with whole sequences of some heads: (query, key, value) -> output, with the query's heads.
        unpadded_length: The length of the whole sequence, when its blocks were padded.

    Raises:
        ShapeError: The heads of key do not divide those of query, or key and value differ.
    """
    where = "sequence.ulysses_attention"
    head_dim = checked_dim(where, query, head_dim)
    size = ops.axis_size(axis, state=state)
    heads, kv_heads = query.shape[head_dim], key.shape[head_dim]
    if kv_heads != value.shape[head_dim] or kv_heads == 0 or heads % kv_heads:
        raise ShapeError(
            f"{where}: query, key and value have {heads}, {kv_heads} and {value.shape[head_dim]} heads in dim "
            f"{head_dim}. Key and value need the same number, a divisor of query's.",
            heads=heads,
            kv_heads=kv_heads,
        )
    kept = heads
    if kv_heads % size and (heads % size or size % kv_heads):
        padded = -(-kv_heads // size) * size
        query = _padded_heads(query, head_dim, padded * (heads // kv_heads))
        key, value = _padded_heads(key, head_dim, padded), _padded_heads(value, head_dim, padded)
    query, key, value = (
        gather_seq_scatter_heads(
            x, seq_dim=seq_dim, head_dim=head_dim, axis=axis, unpadded_length=unpadded_length, state=state
        )
        for x in (query, key, value)
    )
    mixed = gather_heads_scatter_seq(
        attend(query, key, value), seq_dim=seq_dim, head_dim=head_dim, axis=axis, state=state
    )
    return mixed if mixed.shape[head_dim] == kept else mixed[(*(slice(None),) * head_dim, slice(0, kept))]


def _repeated_heads(where: str, x: Any, head_dim: int, size: int, axis: Axis) -> Any:
    """Repeat grouped heads so that every index gets one."""
    heads = x.shape[head_dim]
    if heads % size == 0:
        return x
    if heads == 0 or size % heads:
        raise ShapeError(
            f"{where}: dim {head_dim} of shape {tuple(x.shape)} has {heads} heads, which axis {axis!r} of size {size} "
            f"neither divides nor is a multiple of. Heads must be a multiple or a divisor of {size}.",
            heads=heads,
            size=size,
            axis=axis,
        )
    xp = array_api_compat.array_namespace(x)
    return xp.repeat(x, size // heads, axis=head_dim)


def _padded_heads(x: Any, head_dim: int, heads: int) -> Any:
    xp = array_api_compat.array_namespace(x)
    shape = (*x.shape[:head_dim], heads - x.shape[head_dim], *x.shape[head_dim + 1 :])
    return xp.concat([x, xp.zeros(shape, dtype=x.dtype, device=array_api_compat.device(x))], axis=head_dim)


def _two_dims(where: str, x: Any, seq_dim: int, head_dim: int) -> tuple[int, int]:
    seq, head = checked_dim(where, x, seq_dim), checked_dim(where, x, head_dim)
    if seq == head:
        raise ShapeError(f"{where}: seq_dim {seq_dim} and head_dim {head_dim} are one dim. Name two.", dim=seq)
    return seq, head
