"""Exchanges of unequal parts: the collective of expert dispatch.

Equal parts are exchanged by `collectives.all_to_all`.
"""

import operator
from typing import Any

from dualmesh._support.checks import check_items
from dualmesh.backend.state import ParallelState
from dualmesh.errors import ArgumentError, ShapeError
from dualmesh.ops.checks import admit_array, checked_dim
from dualmesh.topology.resolve import positive
from dualmesh.topology.topology import Axis


def ragged_all_to_all(
    x: Any,
    axis: Axis,
    send_counts: Any,
    recv_counts: Any,
    *,
    rows: int | None = None,
    state: ParallelState | None = None,
) -> Any:
    """Send the first send_counts[0] rows to index 0, the next send_counts[1] to index 1, ...; receive likewise.

    *Collective over the axis.* recv_counts[i] here must be what index i sends here. The result has the received
    rows, by sender index, then zeros up to `rows`. Rows of `x` beyond the sum of `send_counts` are not sent. Gradient:
    the exchange back, with the counts traded; rows that were not sent get zeros.

    Args:
        x: (n, ...), rows in the order of the index that they go to.
        axis: The axis over which rows are exchanged.
        send_counts: Rows for each index, size integers: a sequence, or a 1-D array (traced in JAX).
        recv_counts: Rows from each index, likewise.
        rows: Rows of the result; None: the sum of `recv_counts`, which must then be concrete. In JAX a rank cannot
            have more rows than another, so there it is needed when counts are traced or differ.

    Raises:
        ShapeError: Counts that are not one per index, or add up to more rows than there are.
    """
    where = "ops.ragged_all_to_all"
    owner, axis, size, _ = admit_array(where, x, axis, state)
    checked_dim(where, x, 0)
    for name, counts in (("send_counts", send_counts), ("recv_counts", recv_counts)):
        _check_counts(where, name, counts, size)
    rows = None if rows is None else positive(where, "rows", rows, least=0)
    sent, received = plain_counts(send_counts), plain_counts(recv_counts)
    _check_rows(where, "send_counts", sent, x.shape[0])
    if received is not None:
        rows = sum(received) if rows is None else rows
        _check_rows(where, "recv_counts", received, rows)
    if rows is None:
        raise ArgumentError(
            f"{where}: recv_counts is traced, so the number of rows of the result is not known. Give rows=, an upper "
            f"bound that is the same on every rank."
        )
    return owner.collectives.ragged_all_to_all(
        x,
        axis,
        send_counts=send_counts if sent is None else sent,
        recv_counts=recv_counts if received is None else received,
        rows=rows,
        sent_rows=x.shape[0],
    )


def _check_counts(where: str, name: str, counts: Any, size: int) -> None:
    shape = tuple(counts.shape) if hasattr(counts, "shape") else (len(check_items(where, name, counts)),)
    if shape != (size,):
        raise ShapeError(f"{where}: {name} has shape {shape}. Give one count per index: ({size},).", shape=shape)


def plain_counts(counts: Any) -> tuple[int, ...] | None:
    """Return counts as ints, or None where their values are not known yet (traced)."""
    try:
        return tuple(operator.index(count) for count in (counts.tolist() if hasattr(counts, "tolist") else counts))
    except (TypeError, ValueError) as error:
        if "Tracer" in type(error).__name__ or "Concretization" in type(error).__name__:
            return None
        raise ArgumentError(f"ops.ragged_all_to_all: {counts!r} are no counts: {error}.", counts=counts) from None


def _check_rows(where: str, name: str, counts: tuple[int, ...] | None, rows: int) -> None:
    if counts is None:
        return
    if min(counts) < 0:
        raise ArgumentError(f"{where}: {name}={counts} has a negative count.", counts=counts)
    if sum(counts) > rows:
        raise ShapeError(
            f"{where}: {name}={counts} add up to {sum(counts)}, more than the {rows} rows there are.", counts=counts
        )
