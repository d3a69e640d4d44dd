"""VeOmni's names: what `veomni.distributed.parallel_state` and `.sequence_parallel` export, over what dualmesh has.

Modules written for VeOmni import from here instead; `stand_in()` puts them where its own imports look. What differs
from a function of dualmesh is the order of its arguments, its gradient, or a rule that its docstring says.
"""

from dualmesh.backend.state import ParallelState
from dualmesh.runtime.init import get_parallel_state_by_name
from dualmesh.runtime.scope import get_parallel_state
from dualmesh.sequence import (
    get_context_parallel_group,
    get_context_parallel_rank,
    get_context_parallel_world_size,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_world_size,
    get_unified_sequence_parallel_group,
    get_unified_sequence_parallel_rank,
    get_unified_sequence_parallel_world_size,
    is_context_parallel_initialized,
    pad_tensor,
    sp_pad,
    sp_pad_and_slice,
    sp_take_own_seq,
    unpad_tensor,
)
from dualmesh_torch.veomni import autograd, modules, projections
from dualmesh_torch.veomni.autograd import (
    AllToAllOfSequences,
    AsyncUlyssesOutputProjection,
    AsyncUlyssesQKVProjection,
    GatherOfSequence,
    ReduceLoss,
    SliceOfSequence,
)
from dualmesh_torch.veomni.functions import (
    all_to_all_tensor,
    gather_heads_scatter_seq,
    gather_outputs,
    gather_seq_scatter_heads,
    gather_seq_scatter_heads_qkv,
    get_ulysses_sequence_parallel_rank,
    get_ulysses_sequence_parallel_world_size,
    padding_tensor_for_seqeunce_parallel,
    reduce_sequence_parallel_loss,
    remove_last_rank_padding,
    roll_with_sequence_parallel,
    slice_input_tensor,
    slice_input_tensor_scale_grad,
    sp_gather_seqs,
    unpadding_tensor_for_seqeunce_parallel,
)
from dualmesh_torch.veomni.groups import (
    get_ulysses_sequence_parallel_group,
    is_ulysses_sequence_parallel_initialized,
    set_ulysses_sequence_parallel_group,
)
from dualmesh_torch.veomni.images import all2all_splits, all_to_all_images, has_overlap, vlm_images_a2a_meta
from dualmesh_torch.veomni.projections import (
    async_ulysses_output_projection,
    async_ulysses_qkv_projection,
    divide_qkv_linear_bias,
    divide_qkv_linear_weight,
)
from dualmesh_torch.veomni.states import (
    clear_parallel_state,
    init_parallel_state,
    init_parallel_state_from_accelerator,
    requires_mesh,
    set_parallel_state,
    use_parallel_state,
)

_DIT = {
    "AsyncUlyssesOutputProjection": autograd.AsyncUlyssesOutputProjectionDit,
    "AsyncUlyssesQKVProjection": autograd.AsyncUlyssesQKVProjectionDit,
    "async_ulysses_output_projection": projections.async_ulysses_output_projection_dit,
    "async_ulysses_qkv_projection": projections.async_ulysses_qkv_projection_dit,
}
"""The names of `async_ulysses_dit` that mean something else there."""


def stand_in() -> None:
    """Let imports of VeOmni's two modules find these names, in place of VeOmni's. *Local*; twice does nothing more.

    A `veomni` package that is installed keeps all its other modules, which then run over dualmesh's states.

    Raises:
        BackendImportError: VeOmni's own modules were imported before.
    """
    modules.put_in_place({name: globals()[name] for name in (*__all__, *_PRIVATE)}, {"async_ulysses_dit": _DIT})


# Private names of VeOmni that its own modules and tests use.
_init_parallel_state = init_parallel_state
_SeqAllToAll, _Slice, _Gather = AllToAllOfSequences, SliceOfSequence, GatherOfSequence
_PRIVATE = ("_init_parallel_state", "_SeqAllToAll", "_Slice", "_Gather")

__all__ = [
    "AsyncUlyssesOutputProjection",
    "AsyncUlyssesQKVProjection",
    "ParallelState",
    "ReduceLoss",
    "all2all_splits",
    "all_to_all_images",
    "all_to_all_tensor",
    "async_ulysses_output_projection",
    "async_ulysses_qkv_projection",
    "clear_parallel_state",
    "divide_qkv_linear_bias",
    "divide_qkv_linear_weight",
    "gather_heads_scatter_seq",
    "gather_outputs",
    "gather_seq_scatter_heads",
    "gather_seq_scatter_heads_qkv",
    "get_context_parallel_group",
    "get_context_parallel_rank",
    "get_context_parallel_world_size",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_parallel_state",
    "get_parallel_state_by_name",
    "get_ulysses_sequence_parallel_group",
    "get_ulysses_sequence_parallel_rank",
    "get_ulysses_sequence_parallel_world_size",
    "get_unified_sequence_parallel_group",
    "get_unified_sequence_parallel_rank",
    "get_unified_sequence_parallel_world_size",
    "has_overlap",
    "init_parallel_state",
    "init_parallel_state_from_accelerator",
    "is_context_parallel_initialized",
    "is_ulysses_sequence_parallel_initialized",
    "pad_tensor",
    "padding_tensor_for_seqeunce_parallel",
    "reduce_sequence_parallel_loss",
    "remove_last_rank_padding",
    "requires_mesh",
    "roll_with_sequence_parallel",
    "set_parallel_state",
    "set_ulysses_sequence_parallel_group",
    "slice_input_tensor",
    "slice_input_tensor_scale_grad",
    "sp_gather_seqs",
    "sp_pad",
    "sp_pad_and_slice",
    "sp_take_own_seq",
    "stand_in",
    "unpad_tensor",
    "unpadding_tensor_for_seqeunce_parallel",
    "use_parallel_state",
    "vlm_images_a2a_meta",
]
