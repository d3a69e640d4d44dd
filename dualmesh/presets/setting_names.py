"""The names of other projects' settings, with their defaults; how they are read is in `importers`.

A name is here because the project has it. `None` stands for a setting that moves no rank, whatever its value.
"""

from collections.abc import Mapping
from typing import Any

TORCHTITAN: Mapping[str, Any] = {
    "data_parallel_replicate_degree": 1,
    "data_parallel_shard_degree": -1,
    "tensor_parallel_degree": 1,
    "pipeline_parallel_degree": 1,
    "context_parallel_degree": 1,
    "expert_parallel_degree": 1,
    "expert_tensor_parallel_degree": 1,
    **dict.fromkeys(
        (
            "fsdp_reshard_after_forward",
            "fsdp_defer_gradient_reduction",
            "fsdp_symm_mem_scope",
            "enable_sequence_parallel",
            "disable_loss_parallel",
            "enable_async_tensor_parallel",
            "enable_compiled_autograd",
            "pipeline_parallel_split_points",
            "module_fqns_per_model_part",
            "pipeline_parallel_module_fqns_per_model_part",
            "pipeline_parallel_first_stage_less_layers",
            "pipeline_parallel_last_stage_less_layers",
            "pipeline_parallel_layers_per_stage",
            "pipeline_parallel_schedule",
            "pipeline_parallel_schedule_csv",
            "pipeline_parallel_microbatch_size",
            "pipeline_parallel_max_outstanding_sends",
            "pipeline_parallel_expert_parallel_overlap",
            "num_pp_microbatches",
            "pp_max_unsharded_active_stages",
            "pp_num_unshard_lookahead_factor",
            "context_parallel_rotate_method",
            "context_parallel_load_balancer",
            "spmd_backend",
            "save_parallelism_file",
        )
    ),
}

MEGATRON_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "pipeline_model_parallel_split_rank": ((None,), "encoder and decoder stages share a pipeline. Use one state each."),
    "encoder_tensor_model_parallel_size": ((0, None), "it is a world of its own. Use a second state with ranks=."),
    "encoder_pipeline_model_parallel_size": ((0, None), "it is a world of its own. Use a second state with ranks=."),
    "get_embedding_ranks": ((None,), "it is code. Call it, and give its ranks to RankGroups."),
    "get_position_embedding_ranks": ((None,), "it is code. Call it, and give its ranks to RankGroups."),
}
"""Settings that move ranks, the values with which they do not, and what to do instead."""

MEGATRON: Mapping[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "data_parallel_size": -1,
    "num_distributed_optimizer_instances": 1,
    "hierarchical_context_parallel_sizes": None,
    "use_tp_pp_dp_mapping": False,
    "order": None,
    "rank_offset": 0,
    "use_sharp": False,
    "sharp_enabled_group": None,
    **{key: harmless[0] for key, (harmless, _) in MEGATRON_REFUSED.items()},
    **dict.fromkeys(
        (
            "virtual_pipeline_model_parallel_size",
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
            "pipeline_model_parallel_layout",
            "pipeline_model_parallel_comm_backend",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
            "overlap_p2p_communication",
            "sequence_parallel",
            "cp_comm_type",
            "nccl_communicator_config_path",
            "distributed_timeout_minutes",
            "distributed_backend",
            "create_gloo_process_groups",
            "high_priority_stream_groups",
            "use_distributed_optimizer",
            "overlap_grad_reduce",
            "overlap_param_gather",
            "use_torch_fsdp2",
            "use_megatron_fsdp",
            "local_world_size",
            "world_size",
            "rank",
        )
    ),
}

ACCELERATE: Mapping[str, Any] = {
    "dp_replicate_size": 1,
    "dp_shard_size": 1,
    "tp_size": 1,
    "cp_size": 1,
    "sp_size": 1,
    **dict.fromkeys(
        (
            "tp_handler",
            "cp_handler",
            "sp_handler",
            "cp_backend",
            "sp_backend",
            "cp_comm_strategy",
            "sp_seq_length",
            "sp_seq_length_is_variable",
            "sp_attn_implementation",
        )
    ),
}

MAXTEXT_AXES = (
    "diloco",
    "data",
    "stage",
    "fsdp",
    "fsdp_transpose",
    "sequence",
    "context",
    "context_usp_ulysses",
    "context_autoregressive",
    "tensor",
    "tensor_transpose",
    "tensor_sequence",
    "expert",
    "autoregressive",
)
"""MaxText's mesh axes, outermost first, unless `mesh_axes` says otherwise."""

MAXTEXT_KEYS: Mapping[str, str] = {**{name: name for name in MAXTEXT_AXES}, "stage": "pipeline"}
"""What an axis is called in ici_*_parallelism and dcn_*_parallelism."""

MAXTEXT_BATCH = ("data", "stage", "fsdp", "fsdp_transpose", "expert")
"""Axes over which MaxText lays the batch (`activation_embed_and_logits_batch`): stages too, outside the pipeline."""

MAXTEXT_LENGTH = ("sequence", "context", "context_usp_ulysses", "tensor_sequence")
"""Axes over which MaxText lays the length of a sequence (`activation_norm_length`)."""

MAXTEXT: Mapping[str, Any] = {
    **{f"{kind}_{key}_parallelism": 1 for kind in ("ici", "dcn") for key in MAXTEXT_KEYS.values()},
    "ici_fsdp_parallelism": -1,
    "dcn_data_parallelism": -1,
    "mesh_axes": MAXTEXT_AXES,
    **dict.fromkeys(("allow_split_physical_axes", "hardware", "num_slices")),
}

DEEPSPEED_SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "zero_optimization": {
        "stage": 0,
        "mics_shard_size": -1,
        "zero_hpz_partition_size": 1,
        **dict.fromkeys(
            (
                "mics_hierarchical_params_gather",
                "allgather_partitions",
                "allgather_bucket_size",
                "overlap_comm",
                "reduce_scatter",
                "reduce_bucket_size",
                "contiguous_gradients",
                "load_from_fp32_weights",
                "elastic_checkpoint",
                "offload_param",
                "offload_optimizer",
                "cpu_offload",
                "cpu_offload_params",
                "cpu_offload_use_pin_memory",
                "sub_group_size",
                "stage3_max_live_parameters",
                "stage3_max_reuse_distance",
                "stage3_prefetch_bucket_size",
                "stage3_param_persistence_threshold",
                "stage3_model_persistence_threshold",
                "stage3_gather_16bit_weights_on_model_save",
                "stage3_module_granularity_threshold",
                "stage3_use_all_reduce_for_fetch_params",
                "use_all_reduce_for_fetch_params",
                "ignore_unused_parameters",
                "legacy_stage1",
                "round_robin_gradients",
                "zero_quantized_weights",
                "zero_quantized_nontrainable_weights",
                "zero_quantized_gradients",
                "zeropp_loco_param",
                "memory_efficient_linear",
                "pipeline_loading_checkpoint",
                "override_module_apply",
                "log_trace_cache_warnings",
            )
        ),
    },
    "tensor_parallel": {
        "autotp_size": 1,
        **dict.fromkeys(("tp_grain_size", "tp", "preset_model", "partition_config", "enabled", "dtype")),
    },
    "expert_parallel": {"enabled": False, "autoep_size": 1, "preset_model": None},
    "pipeline": {
        "stages": None,
        **dict.fromkeys(
            (
                "partition",
                "seed_layers",
                "activation_checkpoint_interval",
                "pipe_partitioned",
                "grad_partitioned",
            )
        ),
    },
}

DEEPSPEED: Mapping[str, Any] = {
    "data_parallel_size": -1,
    "sequence_parallel_size": 1,
    "use_data_before_expert_parallelism": False,
    **{name: {} for name in DEEPSPEED_SECTIONS},
    **dict.fromkeys(
        (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "optimizer",
            "scheduler",
            "communication_data_type",
            "seq_parallel_communication_data_type",
            "prescale_gradients",
            "gradient_predivide_factor",
            "sparse_gradients",
            "fp16",
            "bf16",
            "bfloat16",
            "amp",
            "torch_autocast",
            "data_types",
            "gradient_clipping",
            "zero_allow_untested_optimizer",
            "zero_force_ds_cpu_optimizer",
            "graph_harvesting",
            "compile",
            "aio",
            "steps_per_print",
            "wall_clock_breakdown",
            "dump_state",
            "memory_breakdown",
            "autotuning",
            "flops_profiler",
            "activation_checkpointing",
            "sparse_attention",
            "data_efficiency",
            "curriculum_learning",
            "monitor_config",
            "tensorboard",
            "wandb",
            "comet",
            "csv_monitor",
            "comms_logger",
            "compression_training",
            "checkpoint",
            "elasticity",
            "eigenvalue",
            "progressive_layer_drop",
            "disable_allgather",
            "nebula",
            "hybrid_engine",
        )
    ),
}
