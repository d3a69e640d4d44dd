"""Every PyTorch wrapper on a state's meshes trains, clips and saves as one process does, eager and compiled."""

import pytest

from tests.worlds import torch_world

LIMIT = 1e-11
SHARD, HSDP = {"dp_shard_size": 4}, {"dp_replicate_size": 2, "dp_shard_size": 2}
WAYS = {
    "fsdp2": ("fsdp2", 4, SHARD),
    "hsdp": ("fsdp2", 4, HSDP),
    "fsdp2 x ulysses": ("fsdp2", 4, {"dp_shard_size": 2, "ulysses_size": 2}),
    "fsdp2 x tp": ("fsdp2", 4, {"dp_shard_size": 2, "tp_size": 2}),
    "ddp": ("ddp", 4, {"dp_replicate_size": 4}),
    "plain, experts": ("plain", 4, {"dp_shard_size": 4, "ep_size": 2}),
    "fsdp2, experts": ("fsdp2", 4, {"dp_shard_size": 4, "ep_size": 2}),
    "fsdp2, experts by a plan, replicas": ("plan", 4, {**HSDP, "ep_size": 2}),
    "pipeline": ("plain", 2, {"pp_size": 2}),
    "pipeline x fsdp2": ("fsdp2", 4, {"pp_size": 2, "dp_shard_size": 2}),
    "fsdp2 of 8": ("fsdp2", 8, {"dp_shard_size": 8}),
    "fsdp2 x tp of 8": ("fsdp2", 8, {"dp_shard_size": 4, "tp_size": 2}),
    "ddp of 8": ("ddp", 8, {"dp_replicate_size": 8}),
    "plain, experts of 8": ("plain", 8, {"dp_shard_size": 8, "ep_size": 4}),
    "hsdp x tp": ("fsdp2", 8, {**HSDP, "tp_size": 2}),
    "hsdp, experts": ("fsdp2", 8, {"dp_replicate_size": 2, "dp_shard_size": 4, "ep_size": 2}),
    "pipeline x fsdp2 x tp, experts": ("fsdp2", 8, {"pp_size": 2, "dp_shard_size": 2, "tp_size": 2, "ep_size": 2}),
}


def _call(name, *args):
    from tests.torch_backend import trainers

    return getattr(trainers, name)(*args)


@pytest.fixture(scope="module")
def expected():
    """Return what one process does."""
    return torch_world(_call, "in_one_process", world_size=1)[0]


EAGER = ("fsdp2 x tp of 8", "ddp of 8", "plain, experts of 8")
"""What is compiled on 4 ranks already, and by nothing else on 8."""


CASES = [
    pytest.param(way, is_compiled, id=f"{way}-{'compiled' if is_compiled else 'eager'}")
    for way in WAYS
    for is_compiled in (False, True)
    if not (is_compiled and way in EAGER)
]


@pytest.mark.parametrize(("way", "compiled"), CASES)
def test_a_trained_model_equals_the_one_process_run(way, compiled, expected):
    wrapping, world, settings = WAYS[way]
    seen = set()
    for found in torch_world(_call, "run", wrapping, settings, compiled, expected, world_size=world):
        assert {name: value for name, value in found.items() if not value <= LIMIT} == {}
        seen |= set(found)
    assert seen == {*expected[2], "loss", "norm"}


EP2, EP4 = {"dp_shard_size": 4, "ep_size": 2}, {"dp_shard_size": 4, "ep_size": 4}


@pytest.mark.parametrize(
    ("world", "topologies"),
    [
        (4, [SHARD, {"dp_shard_size": 2, "tp_size": 2}, HSDP]),
        (8, [{**HSDP, "tp_size": 2}, {"dp_shard_size": 8}]),
        (4, [EP2, EP4, SHARD]),
        (8, [{"dp_shard_size": 8}, {"dp_replicate_size": 2, **EP4}, {"dp_shard_size": 4, "tp_size": 2, "ep_size": 2}]),
    ],
    ids=["fsdp2 to tp to hsdp", "hsdp x tp to fsdp2", "ep 2 to ep 4 to none", "none to hsdp x ep 4 to tp x ep 2"],
)
def test_a_checkpoint_goes_on_in_another_topology(world, topologies, tmp_path, expected):
    """Losses, norms and every element are compared, those of each expert too."""
    for found in torch_world(_call, "handed_on", topologies, str(tmp_path), expected, world_size=world):
        assert {name: value for name, value in found.items() if not value <= LIMIT} == {}
        assert {*expected[2], "loss", "norm"} == set(found)
