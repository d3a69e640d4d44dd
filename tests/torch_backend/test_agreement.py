"""Ranks that do not mean the same states get an error in time, nothing is built, and a corrected call works.

What else can go wrong between them is in `tests.faults`.
"""

import pytest

import dualmesh as dm
from tests.worlds import torch_world

TIMEOUT_S = 3.0
SILENT = {
    "never_comes": {3},
    "collects_alone": {0, 1, 2},
    "other_order_of_a_part": {0},
}


def attempted(wrong):
    """Make a wrong attempt, then a right one; return what the first said and what the second built."""
    import os
    import time

    import torch
    import torch.distributed as dist

    from dualmesh.backend import discovery

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


def other_order_of_ranks(rank):
    dm.init_parallel_state(dp_size=4, ranks=(0, 2, 1, 3) if rank == 1 else (3, 2, 1, 0))


def other_order_of_a_part(rank):
    if rank:
        dm.init_parallel_state(dp_size=3, ranks=(1, 2, 3) if rank == 1 else (3, 2, 1))


def other_order_of_roles(rank):
    roles = {"data": ("a",) if rank == 2 else ("b",)}
    dm.init_parallel_state(spec=dm.TopologySpec({"a": 2, "b": 2}, roles=roles))


def never_comes(rank):
    if rank != 3:
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
        ("other_order_of_ranks", "AgreementError", ["ranks 0, 2, 3: ", "rank 1: ", "ranks=(0, 2, 1, 3)"]),
        ("other_order_of_a_part", "AgreementError", ["ranks 2, 3: ", "rank 1: ", "ranks=(3, 2, 1)"]),
        ("other_order_of_roles", "AgreementError", ["ranks 0, 1, 3: ", "rank 2: ", "'data': ('a',)"]),
        ("never_comes", "GroupTimeoutError", ["rank 3 did not come within 3 s, of 4 ranks"]),
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
        assert kind == "GroupTimeoutError" or seconds < TIMEOUT_S  # a difference is named at once
        assert total == 6
        if rank in silent:
            assert said is None
            continue
        assert said[0] == kind
        assert all(part in said[1] for part in [*parts, "Nothing was built"])
        assert held == 0 or wrong == "collects_alone"
