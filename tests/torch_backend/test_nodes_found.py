"""`dm.nodes()` in running worlds: launchers are believed, else hosts tell; nodes may be unequal and interleaved."""

import pytest

import dualmesh as dm
from tests.worlds import torch_world


def found(variables):
    import os

    rank = dm.init_distributed().local_ranks[0]
    saved = dict(os.environ)
    os.environ.update(variables[rank])
    try:
        nodes = dm.nodes()
        state = dm.init_parallel_state(spec=nodes.group_spec(), name="nodes")
        return nodes.groups.groups, state.ranks("intra_node"), dm.host.all_gather(rank, "intra_node")
    except dm.DualmeshError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.environ.clear()
        os.environ.update(saved)


def torchrun(local_rank, local_size, node=None, count=None):
    said = {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
    said |= {} if node is None else {"GROUP_RANK": node, "GROUP_WORLD_SIZE": count}
    return {name: str(value) for name, value in said.items()}


def on(host):
    return {"NCCL_HOSTID": host}


CASES = {
    "this machine": ([{}] * 4, [[0, 1, 2, 3]]),
    "hosts, interleaved and unequal": ([on("a"), on("b"), on("a"), on("a")], [[0, 2, 3], [1]]),
    "torchrun, unequal": (
        [torchrun(0, 3, 1, 2), torchrun(1, 3, 1, 2), torchrun(0, 1, 0, 2), torchrun(2, 3, 1, 2)],
        [[2], [0, 1, 3]],
    ),
    "torchrun without node ranks": ([torchrun(i // 2, 2) | on("ab"[i % 2]) for i in range(4)], [[0, 2], [1, 3]]),
    "some launchers silent": ([torchrun(0, 1, 0, 4), on("b"), on("b"), on("c")], [[0], [1, 2], [3]]),
}


@pytest.mark.parametrize("case", CASES)
def test_every_rank_finds_the_same_nodes(case):
    variables, groups = CASES[case]
    for rank, answer in enumerate(torch_world(found, variables, world_size=4)):
        mine = next(group for group in groups if rank in group)
        assert answer == (tuple(map(tuple, groups)), tuple(mine), mine)


def test_a_launcher_that_contradicts_itself_is_named_on_every_rank():
    variables = [{}, {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, {}]
    for answer in torch_world(found, variables, world_size=3):
        assert answer.startswith("LaunchError: dm.nodes, ranks 1")
        assert "LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2" in answer
