"""The exchange of unequal runs of rows, in static shapes.

Equal blocks are exchanged by `collectives`.
"""

# mypy: allow-untyped-calls
# jax leaves some of its public functions unannotated.

from typing import Any

import jax.numpy as jnp
from jax import lax

from dualmesh_jax.collectives.line import Line


def exchange_rows(x: Any, line: Line, send_counts: Any, recv_counts: Any, rows: int) -> Any:
    """Send runs of rows to the indices in order; return what arrives by sender, then zeros up to `rows`.

    Every pair of ranks exchanges a block of the longest run that there can be, padded: `lax.ragged_all_to_all` would
    send less, but has no rule on CPU.
    """
    longest = min(x.shape[0], rows)
    result = jnp.zeros((rows, *x.shape[1:]), x.dtype)
    if result.size == 0 or longest == 0:
        return result
    send, received = jnp.asarray(send_counts, jnp.int32), jnp.asarray(recv_counts, jnp.int32)
    blocks = jnp.take(x, _places(send, longest, x.shape[0]), axis=0, mode="fill", fill_value=0)
    if len(send_counts) > 1:
        blocks = lax.all_to_all(blocks, line.names, 0, 0, axis_index_groups=line.groups, tiled=True)
    return result.at[_places(received, longest, rows)].set(blocks, mode="drop")


def _places(counts: Any, longest: int, nowhere: int) -> Any:
    """Return the row of each place in blocks of padded runs, (size, longest); `nowhere` for padding."""
    place = jnp.arange(longest, dtype=jnp.int32)[None, :]
    starts = jnp.cumsum(counts) - counts
    return jnp.where(place < counts[:, None], starts[:, None] + place, nowhere)
