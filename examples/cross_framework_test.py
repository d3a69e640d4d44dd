"""One GPT written twice, in torch.nn and in flax NNX, proved equal over five topologies; and the proof seen to fail.

python -m pytest examples/cross_framework_test.py

Needs dualmesh-topology[torch,jax,testing], flax and optax. Workers start once; pytest's own process imports neither
framework.
"""

import re
import sys
from pathlib import Path

import pytest

import dualmesh as dm
from dualmesh import testing
from dualmesh.errors import WorkerError

sys.path.insert(0, str(Path(__file__).parent))  # workers get it too

import gpt

TOPOLOGIES = {
    name: spec
    for name, spec in testing.splits(4, ("dp_shard", "ulysses", "tp")).items()
    if name in ("dp_shard4", "ulysses4", "tp4", "dp_shard2_ulysses2", "ulysses2_tp2")
}
BROKEN = TOPOLOGIES["ulysses2_tp2"]
FAULTS = [  # what is broken, after which tap, and the first difference
    ("swap_ranks", "layers.0.attn.in", "layers.0.attn, element"),
    ("mean_for_sum", "layers.0.attn", "layers.0.mlp.in, element"),
    ("drop_last_shard", "layers.1.mlp", "layers.1, element"),
    ("grad_times_sp", "layers.1.attn.in", "layers.1.attn.in, gradient, element"),
    ("grad_not_summed", "layers.0.mlp.in", "layers.0.mlp.in, gradient, element"),
]


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
def recording(tmp_path_factory):
    """What passed the taps of the flax program, recorded once."""
    path = tmp_path_factory.mktemp("flax") / "recording"

    def run():
        dm.init_parallel_state(spec=BROKEN)
        with testing.record(path):
            flax_port(gpt.PARAM_MAP.to_jax(gpt.first_parameters()), gpt.batches()[:1])

    testing.run_on("jax_x64", run, world_size=4, timeout_s=300)
    return path


@pytest.mark.parametrize(("fault", "after", "first"), FAULTS, ids=[fault for fault, *_ in FAULTS])
def test_a_fault_is_found_where_it_is(recording, fault, after, first):
    """The message begins with the layer in which something was broken on purpose."""

    def run():
        dm.init_parallel_state(spec=BROKEN)
        with testing.replay(recording), testing.inject(fault, after=after):
            torch_port(gpt.first_parameters(), gpt.batches()[:1])

    with pytest.raises(WorkerError, match=f"DifferenceError: .*first difference: {re.escape(first)}") as caught:
        testing.run_on("torch", run, world_size=4, timeout_s=300)
    print(str(caught.value.errors[0]).splitlines()[0])
