"""Other projects' rank order, names and roles, from their layouts worked out by hand (see also test_cases)."""

import pytest

import dualmesh as dm
from dualmesh import presets
from dualmesh.errors import SpecError


def groups(spec, world, axis, first=None):
    return spec.resolve(world).partition(axis).tolist()[:first]


def test_torchtitan_dense_and_sparse():
    spec = presets.torchtitan(dp_shard=2, cp=2, tp=2, pp=2)
    assert groups(spec, 16, "dp_shard", 5) == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12]]
    assert groups(spec, 16, "loss") == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    sparse = presets.torchtitan(dp_replicate=2, dp_shard=2, tp=2, ep=2)
    assert groups(sparse, 8, "efsdp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups(presets.torchtitan(dp_replicate=2, tp=2, ep=4), 8, "ep") == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_megatron_grids():
    spec = presets.megatron(tp=2, cp=2, dp=2, pp=2)
    assert groups(spec, 16, ("pp", "tp"), 2) == [[0, 1, 8, 9], [2, 3, 10, 11]]
    moved = presets.megatron(tp=2, dp=2, pp=2, order="tp-pp-dp", rank_offset=8)
    assert groups(moved, 8, "dp") == [[8, 12], [9, 13], [10, 14], [11, 15]]
    assert groups(moved, 8, "pp") == [[8, 10], [9, 11], [12, 14], [13, 15]]


def test_megatron_experts_keep_the_pipelines():
    spec = presets.megatron(pp=2, ep=2, etp=1)
    topology = spec.resolve(16)
    assert topology.partition("expert_dp").tolist()[:3] == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14]]
    assert topology.size("dp") == 8
    wide = presets.megatron(tp=4, pp=2, ep=2, etp=2, order="tp-ep-pp-dp").resolve(16)
    assert wide.partition("ep").tolist()[:2] == [[0, 2], [1, 3]]
    with pytest.raises(SpecError, match="view 'expert'"):
        presets.megatron(tp=2, pp=2, ep=2, etp=2, order="tp-ep-pp-dp").resolve(16)
    one_stage = presets.megatron(tp=2, ep=2, etp=2, order="tp-ep-pp-dp").resolve(8)
    assert one_stage.partition("ep").tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_megatron_optimizer_instances_are_axes():
    topology = presets.megatron(tp=2, pp=2, etp=2, optimizer_instances=2).resolve(16)
    assert topology.partition("intra_partial_dp_cp").tolist()[:2] == [[0, 2], [1, 3]]
    assert topology.partition("inter_partial_dp_cp").tolist()[:2] == [[0, 4], [1, 5]]
    assert topology.partition("intra_dist_opt").tolist() == [
        [0, 1, 8, 9, 2, 3, 10, 11],
        [4, 5, 12, 13, 6, 7, 14, 15],
    ]


def test_accelerate_and_nemo_rl():
    spec = presets.accelerate(dp_replicate=2, dp_shard=2, tp=2)
    assert groups(spec, 8, "dp_shard") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups(spec, 8, "dp_cp") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert groups(presets.nemo_rl(tp=2, pp=2), 8, "dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]


@pytest.mark.parametrize(
    "spec",
    [
        presets.torchtitan(),
        presets.accelerate(dp_shard=8),
        presets.nemo_rl(),
        presets.megatron(),
        presets.megatron(etp=1),
    ],
)
def test_every_preset_has_the_roles_that_states_use(spec):
    topology = spec.resolve(8)
    assert topology.size(topology.role("data")) == 8
    assert topology.size(topology.role("loss")) == 8
    assert topology.size(topology.role("params")) == 8
    assert topology.size(topology.role("sequence")) == 1
    assert dm.TopologySpec.from_text(spec.to_text()) == spec


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: presets.torchtitan(dp_replicate=-1, tp=0), r"2 problems.*dp_replicate=-1.*tp=0 is no size"),
        (lambda: presets.megatron(tp=2, order="cp-dp-pp"), "leaves out 'tp', whose size is 2"),
        (lambda: presets.megatron(tp=2, order="gtp_remat-dp"), "leaves out 'tp'"),
        (lambda: presets.megatron(order="tp-tp-dp"), "names 'tp' twice"),
        (lambda: presets.megatron(order="tp-ddp"), "names 'ddp'.*Did you mean 'dp'"),
        (lambda: presets.megatron(order=""), "order is ''"),
        (lambda: presets.megatron(ep=2, cp=2), "ep=2 and cp=2 are no axes of one grid.*Give etp"),
        (lambda: presets.megatron(optimizer_instances=2), "needs etp"),
        (lambda: presets.megatron(etp=1, gtp_remat=2, order="tp-gtp_remat-dp"), "gtp_remat=2 beside etp"),
    ],
)
def test_settings_that_cannot_be_are_refused(call, message):
    with pytest.raises(SpecError, match=f"(?s){message}"):
        call()


def test_accelerate_shards_over_both_ways_to_split_a_sequence():
    """As in Accelerate, dp_shard_cp and dp_cp span sp too, so that gradients are summed over it."""
    topology = presets.accelerate(dp_shard=2, sp=2).resolve(4)
    assert topology.role("params") == ("dp_shard", "cp", "sp")
    assert topology.partition("dp_shard_cp").tolist() == [[0, 1, 2, 3]]
    assert topology.partition("dp_cp").tolist() == [[0, 1, 2, 3]]
