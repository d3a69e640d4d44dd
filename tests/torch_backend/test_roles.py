"""A layer trained by the roles of each preset, importer and usual spec has the gradient of one process."""

import numpy as np

import dualmesh as dm
from tests.worlds import torch_world

ZERO_3 = {"zero_optimization": {"stage": 3}}
SPECS = {
    "usual shard2 ulysses2": dm.parallel_spec(dp_shard_size=2, ulysses_size=2),
    "usual replicate2 cp2": dm.parallel_spec(dp_replicate_size=2, cp_size=2),
    "usual replicate2 shard2": dm.parallel_spec(dp_replicate_size=2, dp_shard_size=2),
    "usual ulysses2 cp2": dm.parallel_spec(ulysses_size=2, cp_size=2),
    "usual shard2 tp2": dm.parallel_spec(dp_shard_size=2, tp_size=2),
    "usual shard4 ep2": dm.parallel_spec(dp_shard_size=4, ep_size=2),
    "torchtitan shard2 cp2": dm.presets.torchtitan(dp_shard=2, cp=2, ep=2),
    "torchtitan replicate2 cp2": dm.presets.torchtitan(dp_replicate=2, dp_shard=1, cp=2),
    "accelerate shard2 sp2": dm.presets.accelerate(dp_shard=2, sp=2),
    "accelerate sp4": dm.presets.accelerate(sp=4),
    "accelerate replicate2 sp2": dm.presets.accelerate(dp_replicate=2, sp=2),
    "accelerate cp2 sp2": dm.importers.accelerate({"cp_size": 2, "sp_size": 2}),
    "nemo_rl dp2 cp2": dm.presets.nemo_rl(dp=2, cp=2),
    "megatron dp2 cp2": dm.presets.megatron(dp=2, cp=2),
    "megatron dp2 ep2": dm.presets.megatron(dp=2, ep=2),
    "megatron cp2 ep2 etp1": dm.presets.megatron(cp=2, ep=2, etp=1),
    "deepspeed zero 0 sp2": dm.importers.deepspeed({"sequence_parallel_size": 2}),
    "deepspeed zero 3 sp2": dm.importers.deepspeed({**ZERO_3, "sequence_parallel_size": 2}, ep=2),
    "deepspeed mics2": dm.importers.deepspeed({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}),
    **{
        f"maxtext fsdp2 {axis}2": dm.importers.maxtext({"ici_fsdp_parallelism": 2, f"ici_{axis}_parallelism": 2})
        for axis in ("data", "pipeline", "context", "context_usp_ulysses", "tensor_sequence", "expert", "tensor")
    },
    "maxtext sequence2 context2": dm.importers.maxtext(
        {"ici_fsdp_parallelism": 1, "ici_sequence_parallelism": 2, "ici_context_parallelism": 2}
    ),
    "maxtext slices": dm.importers.maxtext({"ici_fsdp_parallelism": 2, "dcn_data_parallelism": 2}, num_slices=2),
}


def tokens():
    return np.random.default_rng(5).normal(size=(4, 4, 3))


def weight():
    return np.random.default_rng(6).normal(size=(2, 3))


def gradients(specs):
    """Return {(spec, wrapping): (value, gradient of the weight)} on this rank."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    found = {}
    for name, spec in specs.items():
        state = dm.init_parallel_state(spec=spec, name=name)
        roles = state.topology.spec.roles
        with dm.use_parallel_state(name):
            rows = 4 // state.size(roles["data"])
            x = torch.from_numpy(tokens())[state.index(roles["data"]) * rows :][:rows]
            if state.size(roles["sequence"]) > 1:
                x = dm.sequence.slice_sequence(x, 1, roles["sequence"])
            for wrapping in ("fsdp2", "ddp", "plain"):
                if wrapping == "fsdp2" and "params" not in roles:
                    continue
                net = torch.nn.Linear(3, 2, bias=False, dtype=torch.float64)
                with torch.no_grad():
                    net.weight.copy_(torch.from_numpy(weight()))
                whole = net
                if wrapping == "fsdp2":
                    fully_shard(net, mesh=state.fsdp_mesh)
                if wrapping == "ddp":
                    whole = DistributedDataParallel(net, process_group=state.group(roles["loss"]))
                if wrapping != "plain":
                    dm.sum_gradients(whole)
                objective, value = dm.token_mean((whole(x) ** 3).sum(), x.shape[0] * x.shape[1])
                objective.backward()
                if wrapping == "plain":
                    dm.sync_gradients(net)
                found[name, wrapping] = float(value), np.array(dm.to_numpy(net.weight.grad))
    return found


def test_a_layer_trained_by_the_roles_of_any_spec_has_the_gradient_of_one_process():
    """FSDP2, DDP and plain parameters: closed form in numpy on all tokens, which differ in every element."""
    x, w = tokens().reshape(16, 3), weight()
    y = x @ w.T
    value, gradient = (y**3).sum() / 16, 3 * (y**2).T @ x / 16
    for found in torch_world(gradients, SPECS, world_size=4):
        assert len(found) == 3 * len(SPECS) - 1  # ZeRO 0 shards no parameters
        for case, (mean, own) in found.items():
            np.testing.assert_allclose(mean, value, rtol=1e-12, err_msg=str(case))
            np.testing.assert_allclose(own, gradient, rtol=1e-12, err_msg=str(case))
