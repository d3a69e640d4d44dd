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
    token_weighted_mean,
    unpad_sequence,
)
from dualmesh.sequence.ring import ring_attention, segment_ids
from dualmesh.sequence.ulysses import gather_heads_scatter_seq, gather_seq_scatter_heads, ulysses_attention
from dualmesh.sequence.veomni import (
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
from dualmesh.sequence.veomni_getters import (
    get_context_parallel_group,
    get_context_parallel_rank,
    get_context_parallel_world_size,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_world_size,
    get_ulysses_sequence_parallel_group,
    get_ulysses_sequence_parallel_rank,
    get_ulysses_sequence_parallel_world_size,
    get_unified_sequence_parallel_group,
    get_unified_sequence_parallel_rank,
    get_unified_sequence_parallel_world_size,
    is_context_parallel_initialized,
    is_ulysses_sequence_parallel_initialized,
)

__all__ = [
    "balanced",
    "gather_heads_scatter_seq",
    "gather_outputs",
    "gather_seq_scatter_heads",
    "gather_seq_scatter_heads_qkv",
    "gather_sequence",
    "get_context_parallel_group",
    "get_context_parallel_rank",
    "get_context_parallel_world_size",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_ulysses_sequence_parallel_group",
    "get_ulysses_sequence_parallel_rank",
    "get_ulysses_sequence_parallel_world_size",
    "get_unified_sequence_parallel_group",
    "get_unified_sequence_parallel_rank",
    "get_unified_sequence_parallel_world_size",
    "is_context_parallel_initialized",
    "is_ulysses_sequence_parallel_initialized",
    "pad_sequence",
    "pad_tensor",
    "reduce_sequence_parallel_loss",
    "ring_attention",
    "roll",
    "segment_ids",
    "sequence_positions",
    "slice_input_tensor",
    "slice_input_tensor_scale_grad",
    "slice_sequence",
    "sp_gather_seqs",
    "sp_pad",
    "sp_pad_and_slice",
    "sp_take_own_seq",
    "token_weighted_mean",
    "ulysses_attention",
    "unpad_sequence",
    "unpad_tensor",
]
