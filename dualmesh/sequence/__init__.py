"""Sequence parallelism, written once over `ops` and the array API.

A sequence is split along one dim over an axis: "ulysses" trades it for heads around attention, "cp" passes keys and
values around a ring, "sp" is both.
"""

from dualmesh.sequence.blocks import (
    balanced,
    gather_sequence,
    pad_sequence,
    roll,
    sequence_positions,
    slice_sequence,
    unpad_sequence,
)
from dualmesh.sequence.ring import ring_attention
from dualmesh.sequence.ulysses import gather_heads_scatter_seq, gather_seq_scatter_heads, ulysses_attention

__all__ = [
    "balanced",
    "gather_heads_scatter_seq",
    "gather_seq_scatter_heads",
    "gather_sequence",
    "pad_sequence",
    "ring_attention",
    "roll",
    "sequence_positions",
    "slice_sequence",
    "ulysses_attention",
    "unpad_sequence",
]
