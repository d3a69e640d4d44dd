"""One GPT written twice, in torch.nn and in flax NNX, proved equal over five topologies; and the proof seen to fail.

python -m pytest examples/cross_framework_test.py

Needs dualmesh-topology[torch,jax,testing], flax and optax. Workers start once; pytest's own process imports neither
framework.
"""

import sys
from pathlib import Path

import pytest

import dualmesh as dm
from dualmesh import testing

sys.path.insert(0, str(Path(__file__).parent))  # workers get it too

import gpt

TOPOLOGIES = {
    name: spec
    for name, spec in testing.splits(4, ("dp_shard", "ulysses", "cp", "tp")).items()
    if name in ("dp_shard4", "cp4", "tp4", "dp_shard2_ulysses2", "ulysses2_tp2")
}
# What is broken, where (over which topology, after which tap), and the first difference. One fault of
# `testing.FAULTS` cannot happen to these programs: wrappers_average, because no wrapper (FSDP, DDP) reduces their
# gradients.
FAULTS = {
    "swap_ranks": ("ulysses2_tp2", {"after": "layers.0.attn.in", "verb": "all_to_all"}, "layers.0.attn, element"),
    "mean_for_sum": ("ulysses2_tp2", {"after": "layers.0.attn"}, "layers.0.mlp.in, element"),
    "drop_last_shard": ("ulysses2_tp2", {"after": "layers.1.mlp"}, "layers.1, element"),
    "grad_times_sp": ("ulysses2_tp2", {"after": "layers.1.attn.in"}, "layers.1.attn.in, gradient, element"),
    "grad_times_size": ("ulysses2_tp2", {"after": "layers.0.attn", "axis": "tp"}, "layers.0.attn, gradient, element"),
    "grad_wrong_factor": ("ulysses2_tp2", {"after": "layers.1.mlp"}, "layers.1.mlp, gradient, element"),
    "grad_not_summed": ("ulysses2_tp2", {"after": "layers.0.mlp.in"}, "layers.0.mlp.in, gradient, element"),
    "own_total": ("ulysses2_tp2", {}, "loss, rank 0"),
    "gradients_averaged": ("ulysses2_tp2", {}, "norm.bias, summed, element"),
    "grad_wrong_way": ("cp4", {"after": "layers.0.attn.in"}, "layers.0.attn.in, gradient, element"),
    "stale_maximum": ("cp4", {"after": "layers.1.attn.in"}, "layers.1.attn, element"),
}


def torch_port(params, batches):
    """The program in torch, in a process per rank."""
    import gpt_torch

    return gpt_torch.port(params, batches)


def flax_port(params, batches):
    """The program in flax, in a process with a device per rank."""
    import gpt_flax

    return gpt_flax.port(params, batches)


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_both_programs_train_alike(topology):
    """Every tap, loss, gradient and parameter is the same."""
    testing.compare_ports(
        torch=torch_port,
        jax=flax_port,
        params=gpt.first_parameters(),
        param_map=gpt.PARAM_MAP,
        inputs=gpt.batches(),
        topology=topology,
        timeout_s=300,
    )


@pytest.fixture(scope="module")
def differences(tmp_path_factory):
    """What is said of every fault: the flax program is recorded once, and the torch program held to it."""
    path = tmp_path_factory.mktemp("flax") / "recording"

    def recorded():
        dm.init_parallel_state()
        with testing.record(path):
            flax_port(gpt.PARAM_MAP.to_jax(gpt.first_parameters()), gpt.batches()[:1])

    def broken(topology):
        dm.init_parallel_state(spec=TOPOLOGIES[topology])
        said = {}
        for fault, (place, settings, _) in FAULTS.items():
            if place == topology:
                with testing.replay(path, check=False) as replay, testing.inject(fault, **settings):
                    torch_port(gpt.first_parameters(), gpt.batches()[:1])
                said[fault] = list(map(str, replay.differences))
        return said

    testing.run_on("jax_x64", recorded, world_size=1, timeout_s=300)
    ran = [testing.run_on("torch", broken, name, world_size=4, timeout_s=300) for name in ("ulysses2_tp2", "cp4")]
    return {fault: said for ranks in ran for fault, said in ranks[0].items()}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_where_it_is(differences, fault):
    """The first difference is in the layer in which something was broken on purpose."""
    first = differences[fault][0]
    print(first)
    if not first.startswith(FAULTS[fault][-1]):
        pytest.fail(f"expected {FAULTS[fault][-1]}, found {first}")
