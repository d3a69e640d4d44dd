"""The collectives on per-rank blocks, with one meaning and one gradient contract on every backend.

Collectives of sequences are in `sequence`, of plain Python objects in `host`.
"""

from dualmesh.ops.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    axis_index,
    axis_size,
    broadcast,
    permute,
    reduce_scatter,
    shift,
    take_block,
)
from dualmesh.ops.pairs import enter, leave
from dualmesh.ops.ragged import ragged_all_to_all

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "axis_index",
    "axis_size",
    "broadcast",
    "enter",
    "leave",
    "permute",
    "ragged_all_to_all",
    "reduce_scatter",
    "shift",
    "take_block",
]
