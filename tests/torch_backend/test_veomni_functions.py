"""Every public function of the VeOmni drop-in, once, on two ranks: numbers written down from the source's formulas.

What needs more than a line is in `test_veomni_numbers`, and what runs as a program in `test_veomni`.
"""

import inspect
from types import SimpleNamespace

import dualmesh as dm
from tests.worlds import torch_world


def every_function():
    """Return {name: what it gave} for every public function, on 2 ranks of ulysses; x is 10 * rank + 0, 1, ..."""
    import torch
    import torch.distributed as dist

    from dualmesh_torch import veomni as v

    rank = dist.get_rank()
    found = {"init_parallel_state": v.init_parallel_state(dp_size=1, ulysses_size=2, device_type="cpu").sp_size}
    state = v.get_parallel_state()
    x, whole = torch.arange(4.0) + 10 * rank, torch.arange(6.0)
    heads = x.reshape(1, 2, 2, 1)  # (batch, part of the sequence, heads, width)
    one, hidden = torch.eye(2), x.reshape(1, 2, 2)
    weights = {"q_weight": one, "k_weight": 2 * one, "v_weight": 3 * one}
    accelerator = SimpleNamespace(
        **{"dp_size": 2, "dp_replicate_size": 1, "dp_shard_size": 2, "tp_size": 1, "pp_size": 1, "cp_size": 1},
        **{"ulysses_size": 1, "extra_parallel_sizes": [1], "extra_parallel_placement_innermost": [False]},
        **{"extra_parallel_names": ["ep"], "fsdp_config": SimpleNamespace(fsdp_mode="ddp"), "enable_async": True},
    )
    q, k, value = v.async_ulysses_qkv_projection(hidden, 1, 2, **weights, head_dim=1)
    calls = {
        "all2all_splits": lambda: v.all2all_splits([2, 1], [1, 2], 2, rank),
        "all_to_all_images": lambda: v.all_to_all_images(x[:, None], [1, 3], [1, 1] if rank == 0 else [3, 3])[:, 0],
        "all_to_all_tensor": lambda: v.all_to_all_tensor(x.reshape(2, 2), 1, 0, state.ulysses_group),
        "async_ulysses_output_projection": lambda: v.async_ulysses_output_projection(q, 1, 2, one)[0],
        "async_ulysses_qkv_projection": lambda: (q + 10 * k + 100 * value)[0, :, 0, 0],
        "divide_qkv_linear_bias": lambda: torch.stack(v.divide_qkv_linear_bias(whole, 0)),
        "divide_qkv_linear_weight": lambda: torch.stack(v.divide_qkv_linear_weight(whole[:, None], 0))[..., 0],
        "gather_heads_scatter_seq": lambda: v.gather_heads_scatter_seq(x.reshape(1, 4, 1), 2, 1)[0],
        "gather_outputs": lambda: v.gather_outputs(x[: 1 + rank], 0),
        "gather_seq_scatter_heads": lambda: v.gather_seq_scatter_heads(heads, 1, 2, 3)[0, :, 0, 0],
        "gather_seq_scatter_heads_qkv": lambda: v.gather_seq_scatter_heads_qkv(whole[None] + 10 * rank, 0),
        "get_context_parallel_group": lambda: v.get_context_parallel_group(check_initialized=False),
        "get_context_parallel_rank": v.get_context_parallel_rank,
        "get_context_parallel_world_size": v.get_context_parallel_world_size,
        "get_data_parallel_group": lambda: v.get_data_parallel_group().size(),
        "get_data_parallel_rank": v.get_data_parallel_rank,
        "get_data_parallel_world_size": v.get_data_parallel_world_size,
        "get_parallel_state": lambda: v.get_parallel_state().sp_rank,
        "get_parallel_state_by_name": lambda: v.get_parallel_state_by_name("base").sp_rank,
        "get_ulysses_sequence_parallel_group": lambda: v.get_ulysses_sequence_parallel_group().size(),
        "get_ulysses_sequence_parallel_rank": v.get_ulysses_sequence_parallel_rank,
        "get_ulysses_sequence_parallel_world_size": v.get_ulysses_sequence_parallel_world_size,
        "get_unified_sequence_parallel_group": lambda: v.get_unified_sequence_parallel_group().size(),
        "get_unified_sequence_parallel_rank": v.get_unified_sequence_parallel_rank,
        "get_unified_sequence_parallel_world_size": v.get_unified_sequence_parallel_world_size,
        "has_overlap": lambda: v.has_overlap(0, 3, 2, 9),
        "init_parallel_state_from_accelerator": lambda: (
            v.init_parallel_state_from_accelerator(accelerator, "other").dp_size
        ),
        "is_context_parallel_initialized": v.is_context_parallel_initialized,
        "is_ulysses_sequence_parallel_initialized": v.is_ulysses_sequence_parallel_initialized,
        "pad_tensor": lambda: v.pad_tensor(x, 0, 2, 7),
        "padding_tensor_for_seqeunce_parallel": lambda: v.padding_tensor_for_seqeunce_parallel(x[:3], 0),
        "reduce_sequence_parallel_loss": lambda: v.reduce_sequence_parallel_loss(x[0], torch.tensor(1 + 3 * rank)),
        "remove_last_rank_padding": lambda: v.remove_last_rank_padding(x, 0, 5),
        "requires_mesh": lambda: v.requires_mesh(lambda self: self.sp_rank)(state),
        "roll_with_sequence_parallel": lambda: v.roll_with_sequence_parallel(x, 1, 0),
        "set_parallel_state": lambda: v.set_parallel_state(state) is state,
        "set_ulysses_sequence_parallel_group": lambda: v.set_ulysses_sequence_parallel_group(None),
        "slice_input_tensor": lambda: v.slice_input_tensor(whole[:5], 0, True, 9),
        "slice_input_tensor_scale_grad": lambda: v.slice_input_tensor_scale_grad(whole, 0),
        "sp_gather_seqs": lambda: v.sp_gather_seqs(x[: 1 + rank], 0),
        "sp_pad": lambda: v.sp_pad(whole[:3], pad_value=9),
        "sp_pad_and_slice": lambda: v.sp_pad_and_slice(whole[:5], 0, 9, 2),
        "sp_take_own_seq": lambda: v.sp_take_own_seq(whole[:3], 0, [1, 2], rank),
        "unpad_tensor": lambda: v.unpad_tensor(whole, 0, 2),
        "unpadding_tensor_for_seqeunce_parallel": lambda: v.unpadding_tensor_for_seqeunce_parallel(whole, 0, 5),
        "vlm_images_a2a_meta": lambda: v.vlm_images_a2a_meta(rank, 2, [2, 1], torch.tensor([[1, 1, 0, 1]])),
        "clear_parallel_state": v.clear_parallel_state,
    }
    with v.use_parallel_state("base"):
        found["use_parallel_state"] = dm.scope_name()
    for name, call in calls.items():
        found[name] = _plain(call())
    functions = {name for name in v.__all__ if inspect.isfunction(getattr(v, name)) and name != "stand_in"}
    return found, sorted(functions ^ set(found))


def _plain(value):
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


def test_every_public_function_gives_the_sources_number():
    """Written down from the source's formulas, for both ranks: left rank 0, right rank 1."""
    both = {
        "all2all_splits": ([[1, 1], [1, 0]], [[0, 1], [1, 1]]),
        "all_to_all_images": ([0, 10], [1, 2, 3, 11, 12, 13]),
        "all_to_all_tensor": ([[0], [2], [10], [12]], [[1], [3], [11], [13]]),
        "async_ulysses_output_projection": ([[0, 1], [2, 3]], [[10, 11], [12, 13]]),
        "async_ulysses_qkv_projection": ([0, 642, 3210, 3852], [321, 963, 3531, 4173]),
        "clear_parallel_state": (None, None),
        "divide_qkv_linear_bias": ([[0, 1], [2, 3], [4, 5]],) * 2,
        "divide_qkv_linear_weight": ([[0, 1], [2, 3], [4, 5]],) * 2,
        "gather_heads_scatter_seq": ([[0, 10], [1, 11]], [[2, 12], [3, 13]]),
        "gather_outputs": ([0, 10, 11],) * 2,
        "gather_seq_scatter_heads": ([0, 2, 10], [1, 3, 11]),
        "gather_seq_scatter_heads_qkv": ([[0, 2, 4], [10, 12, 14]], [[1, 3, 5], [11, 13, 15]]),
        "get_context_parallel_group": (None, None),
        "get_context_parallel_rank": (0, 0),
        "get_context_parallel_world_size": (1, 1),
        "get_data_parallel_group": (1, 1),
        "get_data_parallel_rank": (0, 0),
        "get_data_parallel_world_size": (1, 1),
        "get_parallel_state": (0, 1),
        "get_parallel_state_by_name": (0, 1),
        "get_ulysses_sequence_parallel_group": (2, 2),
        "get_ulysses_sequence_parallel_rank": (0, 1),
        "get_ulysses_sequence_parallel_world_size": (2, 2),
        "get_unified_sequence_parallel_group": (2, 2),
        "get_unified_sequence_parallel_rank": (0, 1),
        "get_unified_sequence_parallel_world_size": (2, 2),
        "has_overlap": ([True, 1],) * 2,
        "init_parallel_state": (2, 2),
        "init_parallel_state_from_accelerator": (2, 2),
        "is_context_parallel_initialized": (False, False),
        "is_ulysses_sequence_parallel_initialized": (True, True),
        "pad_tensor": ([0, 1, 2, 3, 7, 7], [10, 11, 12, 13, 7, 7]),
        "padding_tensor_for_seqeunce_parallel": ([0, 1, 2, 0], [10, 11, 12, 0]),
        "reduce_sequence_parallel_loss": (8, 8),
        "remove_last_rank_padding": ([0, 1, 2, 3], [10]),
        "requires_mesh": (0, 1),
        "roll_with_sequence_parallel": ([13, 0, 1, 2], [3, 10, 11, 12]),
        "set_parallel_state": (True, True),
        "set_ulysses_sequence_parallel_group": (None, None),
        "slice_input_tensor": ([0, 1, 2], [3, 4, 9]),
        "slice_input_tensor_scale_grad": ([0, 1, 2], [3, 4, 5]),
        "sp_gather_seqs": ([[0, 10, 11], [1, 2], 0], [[0, 10, 11], [1, 2], 1]),
        "sp_pad": ([0, 1, 2, 9],) * 2,
        "sp_pad_and_slice": ([0, 1, 2, 3], [4, 9, 9, 9]),
        "sp_take_own_seq": ([0], [1, 2]),
        "unpad_tensor": ([0, 1, 2, 3],) * 2,
        "unpadding_tensor_for_seqeunce_parallel": ([0, 1, 2, 3, 4],) * 2,
        "use_parallel_state": ("base", "base"),
        "vlm_images_a2a_meta": ([[2, 0], [2, 0], [[1, 1]]], [[0, 1], [0, 1], [[0, 1]]]),
    }
    for rank, (found, missing) in enumerate(torch_world(every_function, world_size=2)):
        assert missing == []
        assert found == {name: values[rank] for name, values in both.items()}
