"""Ranks that do not mean the same states get an error in time, nothing is built, and a corrected call works."""

import pytest

import dualmesh as dm
from tests.workers import free_port
from tests.worlds import torch_pool, torch_world

TIMEOUT_S = 3.0
SILENT = {
    "never_comes": {3},
    "comes_twice": {1, 2, 3},
    "clears_alone": {0, 2, 3},
    "collects_alone": {0, 1, 2},
}


def attempted(wrong):
    """Make a wrong attempt, then a right one; return what the first said and what the second built."""
    import os
    import time

    import torch
    import torch.distributed as dist

    from dualmesh import discovery

    os.environ["DUALMESH_TIMEOUT_S"] = str(TIMEOUT_S)
    start, said = time.monotonic(), None
    try:
        globals()[wrong](dist.get_rank())
    except dm.DualmeshError as error:
        said = (type(error).__name__, str(error))
    seconds = time.monotonic() - start
    held = len(discovery.load("torch").pool)
    dist.barrier()
    dm.clear_parallel_state()
    state = dm.init_parallel_state(dp_size=2, tp_size=2, name="again")
    total = dm.ops.all_reduce(torch.tensor([float(dist.get_rank())]), "world", state=state)
    return said, seconds, held, total.item()


def other_sizes(rank):
    dm.init_parallel_state(dp_size=4 if rank != 2 else 2, tp_size=1 if rank != 2 else 2)


def other_order(rank):
    specs = {"a": dm.parallel_spec(dp_size=4), "b": dm.parallel_spec(tp_size=4)}
    for name in sorted(specs, reverse=rank == 1):
        dm.init_parallel_state(spec=specs[name], name=name)


def never_comes(rank):
    if rank != 3:
        dm.init_parallel_state(dp_size=4)


def comes_twice(rank):
    dm.init_parallel_state(dp_size=4)
    if rank == 0:
        dm.init_parallel_state(tp_size=4, name="second")


def other_settings(rank):
    dm.init_parallel_state(dp_size=4, dp_mode="ddp" if rank == 0 else "fsdp2")


def clears_alone(rank):
    import warnings

    dm.init_parallel_state(dp_size=4)
    if rank == 1:
        dm.clear_parallel_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dm.init_parallel_state(dp_size=4)


def collects_alone(rank):
    import torch

    dm.init_parallel_state(dp_size=2, tp_size=2)
    if rank == 3:
        dm.ops.all_reduce(torch.ones(1), ("tp", "dp"))


@pytest.mark.parametrize(
    ("wrong", "kind", "parts"),
    [
        ("other_sizes", "AgreementError", ["ranks 0, 1, 3: 1 to build", "rank 2: 1 to build", "'tp': 2"]),
        ("other_order", "AgreementError", ["ranks 0, 2, 3: ", "rank 1: ", "'tp': 4", "'dp_shard': 4"]),
        ("never_comes", "GroupTimeoutError", ["rank 3 did not come within 3 s, of 4 ranks"]),
        ("comes_twice", "GroupTimeoutError", ["ranks 1, 2, 3 did not come within 3 s"]),
        ("other_settings", "AgreementError", ["rank 0: ", "dp_mode='ddp'"]),
        ("clears_alone", "GroupTimeoutError", ["ranks 0, 2, 3 did not come within 3 s"]),
        (
            "collects_alone",
            "GroupTimeoutError",
            ["first collective over the ranks 0, 2, 1, 3", "ranks 0, 2, 1 did"],
        ),
    ],
)
def test_disagreement_is_named_on_every_rank_and_can_be_corrected(wrong, kind, parts):
    silent = SILENT.get(wrong, set())
    for rank, (said, seconds, held, total) in enumerate(torch_world(attempted, wrong, world_size=4)):
        assert seconds < TIMEOUT_S + 5
        assert total == 6
        if rank in silent:
            assert said is None
            continue
        assert said[0] == kind
        assert all(part in said[1] for part in [*parts, "Nothing was built"])
        assert held == 0 or wrong in ("comes_twice", "collects_alone")


def dying(rank, world_size, port, dead, moment):
    """Init while one rank dies; return what the others are told, after how long, and what the rest builds then."""
    import datetime
    import os
    import time

    import torch
    import torch.distributed as dist

    from dualmesh_torch.groups import GroupPool

    os.environ["DUALMESH_TIMEOUT_S"] = str(TIMEOUT_S)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size, timeout=timeout
    )
    dist.barrier()
    if rank == dead and moment == "before":
        os._exit(7)
    if rank == dead:
        GroupPool.acquire = lambda *_: os._exit(7)
    start, said = time.monotonic(), None
    try:
        dm.init_parallel_state(spec=dm.TopologySpec({"a": world_size}, roles={"sequence": "a"}))
    except dm.DualmeshError as error:
        said = type(error).__name__, str(error)
    seconds = time.monotonic() - start
    if dead == 0:
        return said, seconds, None
    rest = tuple(one for one in range(world_size) if one != dead)
    state = dm.init_parallel_state(spec=dm.TopologySpec({"a": len(rest)}), ranks=rest, name="rest")
    total = dm.ops.all_reduce(torch.tensor(float(rank)), "a", state=state).item()
    dm.clear_parallel_state()
    return said, seconds, total


@pytest.mark.parametrize(
    ("dead", "moment", "words"),
    [
        (2, "before", "rank 2 did not come within 3 s"),
        (2, "after agreeing", "could not be made on rank"),
        (0, "before", "usually that of rank 0, has probably died"),
    ],
)
def test_survivors_of_a_dead_rank_are_told_in_time_and_go_on(dead, moment, words):
    calls = [(rank, 3, port, dead, moment) for port in [free_port()] for rank in range(3)]
    outcomes = torch_pool.outcomes(dying, calls, timeout_s=60)
    assert outcomes.pop(dead)[0] == "missing"
    for kind, answer, text in outcomes.values():
        assert kind == "ok", text
        said, seconds, total = answer
        assert words in said[1]
        assert seconds < TIMEOUT_S + 5
        assert total == (None if dead == 0 else 1.0)
