"""A trainer's own checks, written for the seed's API: registry, scopes, attributes, sequence-parallel getters.

Only the two import lines name dualmesh. Each rank calls `main`, inside a process group that it started itself.
"""

import pytest
import torch
import torch.distributed as dist

from dualmesh import (
    clear_parallel_state,
    get_parallel_state,
    get_parallel_state_by_name,
    init_parallel_state,
    use_parallel_state,
)
from dualmesh.sequence.veomni_getters import (
    get_context_parallel_group,
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


def register(world):
    """Register one state per module; the first is ambient."""
    thinker = init_parallel_state(
        dp_size=world // 2, dp_shard_size=world // 2, ulysses_size=2, dp_mode="fsdp2", device_type="cpu", name="thinker"
    )
    talker = init_parallel_state(
        dp_size=world,
        dp_replicate_size=2,
        dp_shard_size=world // 2,
        extra_parallel_sizes=(2, 1),
        extra_parallel_placement_innermost=(False, False),
        extra_parallel_names=("ep", "emb"),
        device_type="cpu",
        name="talker",
    )
    assert init_parallel_state(dp_size=world // 2, ulysses_size=2, device_type="cpu", name="vision") is thinker
    assert get_parallel_state() is thinker
    assert get_parallel_state_by_name("talker") is talker
    return thinker, talker


def check_thinker(state, rank, world):
    """Two data ranks, each a pair of sequence ranks."""
    assert state.is_initialized
    assert (state.world_size, state.global_rank, state.dp_mode, state.device_type) == (world, rank, "fsdp2", "cpu")
    assert (state.dp_size, state.dp_rank, state.dp_enabled) == (world // 2, rank // 2, True)
    assert (state.sp_size, state.sp_rank, state.sp_enabled) == (2, rank % 2, True)
    assert (state.ulysses_size, state.ulysses_rank, state.ulysses_enabled) == (2, rank % 2, True)
    assert (state.fsdp_size, state.fsdp_rank, state.fsdp_enabled) == (world, rank, True)
    assert (state.cp_size, state.cp_group, state.cp_rank, state.tp_enabled, state.tp_group) == (
        1,
        None,
        -1,
        False,
        None,
    )
    assert state.is_first_pp_stage
    assert state.is_last_pp_stage
    assert state.dp_shard_sp_enabled
    assert (state.dp_shard_sp_size, state.dp_shard_sp_rank) == (world, rank)
    assert state.fsdp_mesh.size() == world
    assert dist.get_process_group_ranks(state.sp_group) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert not state.any_extra_parallel_enabled
    assert (state.ep_enabled, state.ep_size, state.ep_group) == (False, 1, None)


def check_talker(state, rank, world):
    """Replicated shards, experts beside them."""
    assert (state.dp_replicate_size, state.dp_replicate_rank) == (2, rank // (world // 2))
    assert (state.dp_shard_size, state.dp_shard_rank) == (world // 2, rank % (world // 2))
    assert state.fsdp_mesh.shape == (2, world // 2)
    assert state.fsdp_mesh.mesh_dim_names[0] == "dp_replicate"
    assert (state.ep_size, state.ep_rank, state.ep_enabled) == (2, rank % 2, True)
    assert (state.extra_parallel_sizes["ep"], state.extra_parallel_enabled("emb")) == (2, False)
    assert (state.extra_parallel_rank("ep"), state.extra_parallel_group("ep")) == (rank % 2, state.ep_group)
    assert state.extra_parallel_fsdp_device_mesh["ep"].mesh_dim_names[-2:] == ("ep_fsdp", "ep")
    assert (state.ep_fsdp_size, state.extra_parallel_fsdp_size("ep")) == (world // 2, world // 2)
    assert state.ep_fsdp_mesh.mesh_dim_names == ("ep", "ep_fsdp")
    assert state.ep_fsdp_mesh.get_group("ep_fsdp") is state.extra_parallel_fsdp_device_mesh["ep"].get_group("ep_fsdp")
    assert state.ep_gradient_divide_factor == world
    assert (state.sp_enabled, state.sp_group) == (False, None)


def check_getters(rank, world):
    """The functions that modules call: they follow the ambient state."""
    assert (get_data_parallel_world_size(), get_data_parallel_rank()) == (world // 2, rank // 2)
    assert dist.get_world_size(get_data_parallel_group()) == world // 2
    group = get_ulysses_sequence_parallel_group()
    assert is_ulysses_sequence_parallel_initialized()
    assert group is get_parallel_state().ulysses_group
    assert get_ulysses_sequence_parallel_rank() == get_ulysses_sequence_parallel_rank(group) == dist.get_rank(group)
    assert get_ulysses_sequence_parallel_world_size() == get_ulysses_sequence_parallel_world_size(group) == 2
    assert get_unified_sequence_parallel_group() is get_parallel_state().sp_group
    assert (get_unified_sequence_parallel_rank(), get_unified_sequence_parallel_world_size()) == (rank % 2, 2)
    assert (get_context_parallel_world_size(), get_context_parallel_group(check_initialized=False)) == (1, None)
    assert not is_context_parallel_initialized()
    with use_parallel_state("talker"):
        assert get_ulysses_sequence_parallel_group() is None
        assert (get_ulysses_sequence_parallel_rank(), get_ulysses_sequence_parallel_world_size()) == (0, 1)


@use_parallel_state("thinker")
def summed_over_sequence(x):
    """Reduce over the ambient sequence group, whatever is ambient outside."""
    total = x.clone()
    dist.all_reduce(total, group=get_parallel_state().sp_group)
    return total


def main(rank, world):
    """Run every check on this rank."""
    thinker, talker = register(world)
    check_thinker(thinker, rank, world)
    check_talker(talker, rank, world)
    check_getters(rank, world)
    with use_parallel_state(talker) as state:
        assert get_parallel_state() is state is talker
        first = rank // 2 * 2
        assert summed_over_sequence(torch.tensor(float(rank))).item() == 2 * first + 1
        gathered = torch.empty(2, dtype=torch.int64)
        dist.all_gather_into_tensor(gathered, torch.tensor([rank]), group=state.ep_group)
        assert gathered.tolist() == [first, first + 1]
        with pytest.raises(RuntimeError, match="a step fails"), use_parallel_state("thinker"):
            raise RuntimeError("a step fails")
        assert get_parallel_state() is talker
    assert get_parallel_state() is thinker
    with pytest.raises(ValueError, match=r"not registered.*thinker"):
        get_parallel_state_by_name("nobody")
    dist.barrier()
    clear_parallel_state()
    return True
