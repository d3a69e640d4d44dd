"""Other projects' settings as they write them become specs, or errors that say what cannot be expressed."""

import pytest

from dualmesh import importers, presets
from dualmesh.errors import SpecError
from dualmesh.topology.roles import token_axes


def test_torchtitan_section_or_config():
    section = {
        "data_parallel_replicate_degree": 2,
        "data_parallel_shard_degree": -1,
        "tensor_parallel_degree": 2,
        "expert_parallel_degree": 4,
        "enable_async_tensor_parallel": True,
        "pipeline_parallel_schedule": "1F1B",
    }
    expected = presets.torchtitan(dp_replicate=2, tp=2, ep=4)
    assert importers.torchtitan(section) == expected
    assert importers.torchtitan({"parallelism": section, "model": {}}) == expected
    assert importers.torchtitan({}) == presets.torchtitan()


def test_torchtitan_experts_may_keep_tensor_parallel():
    section = {"tensor_parallel_degree": 2, "expert_parallel_degree": 2, "expert_tensor_parallel_degree": 2}
    assert importers.torchtitan(section).resolve(8).partition("ep").tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    with pytest.raises(SpecError, match=r"expert_tensor_parallel_degree=4 must be 1 or tensor_parallel_degree=2"):
        importers.torchtitan({**section, "expert_tensor_parallel_degree": 4})


def test_megatron_options_and_arguments():
    expected = presets.megatron(tp=2, cp=2, ep=4, pp=2, etp=1, order="tp-cp-ep-pp-dp")
    options = {
        "--tensor-model-parallel-size": "2",
        "--context-parallel-size": 2,
        "--expert-model-parallel-size": 4,
        "--expert-tensor-parallel-size": 1,
        "--pipeline-model-parallel-size": 2,
        "--use-tp-pp-dp-mapping": True,
        "--sequence-parallel": True,
    }
    assert importers.megatron(options) == expected
    assert importers.megatron({key.strip("-").replace("-", "_"): value for key, value in options.items()}) == expected
    assert importers.megatron({"tensor_model_parallel_size": 2}) == presets.megatron(tp=2, etp=2)


def test_megatron_levels_of_context_parallelism():
    spec = importers.megatron({"context_parallel_size": 4, "hierarchical_context_parallel_sizes": [2, 2]})
    topology = spec.resolve(8)
    assert topology.partition("cp_level_0").tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.partition("cp_level_1").tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_accelerate_names_with_and_without_prefix():
    expected = presets.accelerate(dp_replicate=2, dp_shard=4, tp=2)
    assert importers.accelerate({"dp_replicate_size": 2, "dp_shard_size": 4, "tp_size": 2, "cp_size": None}) == expected
    prefixed = {
        f"parallelism_config_{name}": size
        for name, size in {
            "dp_replicate_size": 2,
            "dp_shard_size": 4,
            "tp_size": 2,
            "cp_comm_strategy": "allgather",
        }.items()
    }
    assert importers.accelerate(prefixed) == expected
    assert importers.accelerate({"parallelism_config": prefixed, "mixed_precision": "bf16"}) == expected
    assert importers.accelerate({"PARALLELISM_CONFIG_TP_SIZE": "2"}) == presets.accelerate(tp=2)


def test_maxtext_axes_are_slices_outside_chips_inside():
    topology = importers.maxtext({"ici_tensor_parallelism": 2, "dcn_fsdp_parallelism": 2}, num_slices=4).resolve(32)
    assert topology.size("fsdp") == 8
    assert topology.size("data") == 2
    assert topology.ranks("tensor", 0) == (0, 1)
    assert topology.ranks("data", 0) == (0, 16)
    assert topology.ranks("fsdp", 0) == (0, 2, 4, 6, 8, 10, 12, 14)
    assert importers.maxtext({}).resolve(8).size("fsdp") == 8


def test_maxtext_order_is_that_of_mesh_axes():
    settings = {"mesh_axes": ["tensor", "fsdp", "data"], "ici_tensor_parallelism": 2}
    topology = importers.maxtext(settings).resolve(8)
    assert topology.base_axes == ("tensor", "fsdp", "data")
    assert topology.ranks("tensor", 0) == (0, 4)


def test_deepspeed_sizes():
    config = {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2, "overlap_comm": True},
        "tensor_parallel": {"autotp_size": 2},
        "sequence_parallel_size": 2,
        "bf16": {"enabled": True},
    }
    topology = importers.deepspeed(config, ep=2).resolve(16)
    assert topology.base_axes == ("pp", "dp", "sp", "tp")
    assert topology.partition("ep").tolist()[:2] == [[0, 4], [1, 5]]
    assert topology.partition("hpz").tolist()[:2] == [[0, 4], [1, 5]]
    assert topology.role("params") == ("dp", "sp")


def test_deepspeed_mics_replicates_outside_its_shards():
    topology = importers.deepspeed({"zero_optimization": {"stage": 3, "mics_shard_size": 4}}).resolve(8)
    assert topology.partition("dp_shard").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert topology.partition("dp").tolist() == [list(range(8))]
    assert topology.role("replicate") == ("dp_replicate",)


def test_deepspeed_experts_and_stages_may_come_from_the_config():
    config = {"expert_parallel": {"enabled": True, "autoep_size": 4}, "pipeline": {"stages": 2}}
    topology = importers.deepspeed(config).resolve(16)
    assert (topology.size("ep"), topology.size("pp")) == (4, 2)
    strided = importers.deepspeed({"use_data_before_expert_parallelism": True}, ep=4).resolve(8)
    assert strided.partition("ep").tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.parametrize(
    ("read", "settings", "message"),
    [
        (importers.torchtitan, {"tensor_paralel_degree": 2}, "'tensor_paralel_degree'.*'tensor_parallel_degree'"),
        (importers.torchtitan, {"tensor_parallel_degree": 0, "context_parallel_degree": "x"}, "2 problems"),
        (importers.torchtitan, {"tensor_parallel_degree": True}, "tensor_parallel_degree=True is no size"),
        (importers.torchtitan, {"data_parallel_replicate_degree": -1}, "must be a positive integer"),
        (importers.torchtitan, 3, "must map names to values"),
        (importers.megatron, {"--tensor-model-paralel-size": 2}, "Did you mean 'tensor_model_parallel_size'"),
        (importers.megatron, {"get_embedding_ranks": len}, "cannot be expressed: it is code"),
        (importers.megatron, {"pipeline_model_parallel_split_rank": 2}, "cannot be expressed"),
        (importers.megatron, {"sharp_enabled_group": "dp"}, "needs use_sharp"),
        (importers.megatron, {"hierarchical_context_parallel_sizes": [2, 2]}, "multiply to context_parallel_size=1"),
        (importers.accelerate, {"tp_sizes": 2}, "Did you mean 'tp_size'"),
        (importers.accelerate, {"tp_size": 2.5}, "tp_size=2.5 is no size"),
        (importers.maxtext, {"ici_tensor_paralelism": 2}, "Did you mean 'ici_tensor_parallelism'"),
        (importers.maxtext, {"dcn_data_parallelism": 2}, "must multiply to num_slices=1"),
        (importers.maxtext, {"mesh_axes": ["data", "dta"]}, "must list different axes"),
        (importers.maxtext, {"mesh_axes": ["data"], "ici_tensor_parallelism": 2}, "not among mesh_axes"),
        (importers.deepspeed, {"zero_optimisation": {}}, "Did you mean 'zero_optimization'"),
        (importers.deepspeed, {"zero_optimization": {"stge": 3}}, "zero_optimization: 'stge'.*'stage'"),
        (importers.deepspeed, {"zero_optimization": 3}, "It must be a mapping"),
        (
            importers.deepspeed,
            {"zero_optimization": {"mics_shard_size": 2, "zero_hpz_partition_size": 2}},
            "exclude each other",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(read, settings, message):
    with pytest.raises(SpecError, match=f"(?s){message}"):
        read(settings)


def test_sizes_in_two_places_must_agree():
    with pytest.raises(SpecError, match=r"autoep_size=4, but ep=2"):
        importers.deepspeed({"expert_parallel": {"enabled": True, "autoep_size": 4}}, ep=2)


def test_maxtext_sums_gradients_over_each_axis_that_splits_tokens():
    """MaxText's default rules lay batches and sequences over these axes; the loss and the gradients span all."""
    names = ("data", "stage", "fsdp", "fsdp_transpose", "sequence", "context", "context_usp_ulysses")
    for name in (*names, "tensor_sequence", "expert"):
        key = "pipeline" if name == "stage" else name
        settings = {"ici_fsdp_parallelism": 1, f"ici_{key}_parallelism": 2, "ici_tensor_parallelism": 2}
        topology = importers.maxtext(settings).resolve(4)
        assert token_axes(topology) == (name,)
        assert name in topology.role("loss")
        assert topology.size((*topology.role("replicate"), *topology.role("params"))) == 2


@pytest.mark.parametrize("key", ["ici_context_usp_ulysses_parallelism", "dcn_expert_parallelism"])
@pytest.mark.parametrize("size", [2, -1])
def test_maxtext_refuses_a_size_of_an_axis_outside_its_mesh(key, size):
    """A size that MaxText would drop is refused, also one to infer."""
    with pytest.raises(SpecError, match=f"{key}={size}, but .* is not among mesh_axes: data, fsdp"):
        importers.maxtext({"mesh_axes": ["data", "fsdp"], key: size})
