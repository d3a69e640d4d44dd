"""The seed's names: what `veomni.distributed.parallel_state` and `.sequence_parallel` export, over what dualmesh has.

Modules written for the seed import from here instead; `stand_in()` puts them where the seed's own imports look. What
differs from a function of dualmesh is the order of its arguments, or a rule of the seed that its docstring says.
"""

import inspect
from typing import Any

import torch.distributed as dist

import dualmesh as dm
from dualmesh import scope
from dualmesh.errors import ScopeError
from dualmesh.initialization import get_parallel_state_by_name
from dualmesh.registry import registry
from dualmesh.scope import get_parallel_state, use_parallel_state
from dualmesh.sequence import (
    get_context_parallel_group,
    get_context_parallel_rank,
    get_context_parallel_world_size,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_world_size,
    get_ulysses_sequence_parallel_group,
    get_unified_sequence_parallel_group,
    get_unified_sequence_parallel_rank,
    get_unified_sequence_parallel_world_size,
    is_context_parallel_initialized,
    is_ulysses_sequence_parallel_initialized,
    pad_tensor,
    sp_gather_seqs,
    sp_pad,
    sp_pad_and_slice,
    sp_take_own_seq,
    unpad_tensor,
)
from dualmesh.session import clear_parallel_state
from dualmesh.state import ParallelState
from dualmesh_torch import seed_modules
from dualmesh_torch.seed_autograd import AllToAllOfSequences, GatherOfSequence, SliceOfSequence
from dualmesh_torch.seed_autograd import MeanOfLosses as ReduceLoss
from dualmesh_torch.seed_functions import (
    all_to_all_images,
    all_to_all_tensor,
    async_ulysses_output_projection,
    async_ulysses_qkv_projection,
    divide_qkv_linear_bias,
    divide_qkv_linear_weight,
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
    unpadding_tensor_for_seqeunce_parallel,
    vlm_images_a2a_meta,
)

_SIGNATURE = inspect.signature(dm.init_parallel_state)
_ALONE = "a single process"
_FROM_ACCELERATOR = (
    *("dp_size", "dp_replicate_size", "dp_shard_size", "tp_size", "pp_size", "cp_size", "ulysses_size"),
    *("extra_parallel_sizes", "extra_parallel_placement_innermost", "extra_parallel_names"),
)


def init_parallel_state(*args: Any, **kwargs: Any) -> ParallelState:
    """Register a state, as `dm.init_parallel_state` does; with `name=None` it takes no name that one would look up."""
    bound = _SIGNATURE.bind(*args, **kwargs)
    if bound.arguments.get("name", "base") is not None:
        return dm.init_parallel_state(*bound.args, **bound.kwargs)
    taken = registry.names()
    name = next(f"unnamed {n}" for n in range(len(taken) + 1) if f"unnamed {n}" not in taken)
    bound.arguments["name"] = name
    state = dm.init_parallel_state(*bound.args, **bound.kwargs)
    if state.names[0] != name:  # it was there already
        registry.unname(name)
    return state


def init_parallel_state_from_accelerator(accelerator: Any, name: str | None) -> ParallelState:
    """Register the state that a trainer's settings describe: any object with the seed's fields. *Collective.*"""
    sizes = {field: getattr(accelerator, field) for field in _FROM_ACCELERATOR}
    mode = accelerator.fsdp_config.fsdp_mode
    return init_parallel_state(**sizes, dp_mode=mode, async_enabled=accelerator.enable_async, name=name)


def set_parallel_state(parallel_state: ParallelState | None) -> ParallelState | None:
    """Make a state the default and return the one before; `use_parallel_state` is the scoped way. *Local.*

    None means a single process, as in the seed: a state over this rank alone, whose collectives are the identity.

    Raises:
        ScopeError: A scope is open, whose state would stay the ambient one.
    """
    if scope.current_scope() is not None:
        raise ScopeError(
            f"set_parallel_state: the scope {dm.scope_name()!r} is open, and its state would stay ambient. Use "
            f"use_parallel_state, or leave the scope first.",
            name=dm.scope_name(),
        )
    before = scope.default_state()
    if parallel_state is None and dist.is_initialized():
        alone = registry.named.get(_ALONE)
        is_there = alone is not None and alone.is_live
        if not is_there:
            alone = dm.init_parallel_state(dp_size=1, ranks=(dist.get_rank(),), backend="torch", name=_ALONE)
        parallel_state = alone
    scope.set_default(parallel_state, parallel_state.names[0] if parallel_state is not None else "base")
    return before


def stand_in() -> None:
    """Let imports of the seed's two modules find these names, in place of the seed's. *Local*; twice does nothing more.

    A `veomni` package that is installed keeps all its other modules, which then run over dualmesh's states.

    Raises:
        BackendImportError: The seed's own modules were imported before.
    """
    seed_modules.put_in_place(globals())


# Private names of the seed that its own modules and tests use.
_init_parallel_state = init_parallel_state
_SeqAllToAll, _Slice, _Gather = AllToAllOfSequences, SliceOfSequence, GatherOfSequence

__all__ = [
    "ParallelState",
    "ReduceLoss",
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
    "init_parallel_state",
    "init_parallel_state_from_accelerator",
    "is_context_parallel_initialized",
    "is_ulysses_sequence_parallel_initialized",
    "pad_tensor",
    "padding_tensor_for_seqeunce_parallel",
    "reduce_sequence_parallel_loss",
    "remove_last_rank_padding",
    "roll_with_sequence_parallel",
    "set_parallel_state",
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
