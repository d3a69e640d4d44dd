"""What was built is told through `logging`: once, on one rank, and only to those who ask."""

import logging
import subprocess
import sys

import dualmesh as dm
from tests.worlds import torch_world

SPEC = dm.parallel_spec(dp_shard_size=4, tp_size=2)


def test_each_new_name_is_told_once_and_a_shared_state_by_whose_it_is(world, caplog):
    with caplog.at_level(logging.INFO, "dualmesh"):
        dm.init_parallel_states({"thinker": SPEC, "again": SPEC})
        dm.get_parallel_state_by_name("thinker")
    assert [record.getMessage() for record in caplog.records] == [
        "State 'thinker': 8 ranks (dp_shard=4, tp=2), sim on cpu.",
        "State 'again' is state 'thinker'.",
    ]


def test_axes_of_one_position_are_told_at_debug_level(world, caplog):
    with caplog.at_level(logging.DEBUG, "dualmesh"):
        dm.init_parallel_state(spec=dm.GroupSpec({"node": [[0, 1, 2], [4]]}), name="nodes")
        dm.init_parallel_state(spec=SPEC)
    assert [record.getMessage() for record in caplog.records] == [
        "State 'nodes': 4 ranks (node=1/3), sim on cpu.",
        "State 'base': 8 ranks (pp=1, dp_replicate=1, dp_shard=4, ulysses=1, cp=1, tp=2), sim on cpu.",
    ]


def test_nothing_is_told_unless_asked_for():
    code = "import dualmesh as dm\nwith dm.session('sim', world_size=2): dm.init_parallel_state(dp_size=2)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout + ended.stderr == ""


def told_everywhere():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("dualmesh")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        dm.init_parallel_state(dp_size=4)
        dm.init_parallel_state(spec=dm.parallel_spec(dp_size=2), ranks=(3, 1), name="two")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return lines


def test_of_several_processes_the_one_with_the_first_rank_tells():
    found = torch_world(told_everywhere, world_size=4)
    assert found[0] == ["State 'base': 4 ranks (dp_shard=4), torch on cpu."]
    assert found[3] == ["State 'two': 2 ranks (dp_shard=2), torch on cpu."]
    assert found[1] == found[2] == []
