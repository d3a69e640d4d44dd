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
from dualmesh.sequence.seed import (
    gather_outputs,
    gather_seq_scatter_heads_qkv,
    pad_tensor,
    reduce_sequence_parallel_loss,
    slice_input_tensor,
    slice_input_tensor_scale_grad,
    sp_gather_seqs,
    sp_pad,
    sp_pad_and_slice,
    sp_take_own_seq,
    unpad_tensor,
)
from dualmesh.sequence.ulysses import gather_heads_scatter_seq, gather_seq_scatter_heads, ulysses_attention

__all__ = [
    "balanced",
    "gather_heads_scatter_seq",
    "gather_outputs",
    "gather_seq_scatter_heads",
    "gather_seq_scatter_heads_qkv",
    "gather_sequence",
    "pad_sequence",
    "pad_tensor",
    "reduce_sequence_parallel_loss",
    "ring_attention",
    "roll",
    "sequence_positions",
    "slice_input_tensor",
    "slice_input_tensor_scale_grad",
    "slice_sequence",
    "sp_gather_seqs",
    "sp_pad",
    "sp_pad_and_slice",
    "sp_take_own_seq",
    "ulysses_attention",
    "unpad_sequence",
    "unpad_tensor",
]
