"""What groups are told: options and timeouts, warming up; who uses them; and that ended ones leave nothing behind."""

import pytest

import dualmesh as dm
from dualmesh.backend.group_options import check_options
from tests.worlds import torch_world

GRID = dm.TopologySpec(
    {"a": 2, "b": 2},
    combined={"ab": ("a", "b")},
    views={"other": dm.View(over=("a", "b"), axes={"c": 4})},
    roles={"data": "a", "params": "ab", "loss": "ab"},
)


def timeouts(state):
    import torch

    groups = {name: state.group(name) for name in (*state.axis_names, ("b", "a"))}
    groups["data lane of a"] = state.member("a").group
    return {key: g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for key, g in groups.items()}


def options_everywhere():
    state = dm.init_parallel_state(spec=GRID, group_options={"timeout_s": 17, "is_high_priority": True})
    plain = dm.init_parallel_state(spec=GRID, name="plain")
    first = timeouts(state), timeouts(plain)
    plain.set_timeout(23.5)
    return first, timeouts(plain), timeouts(state)


def test_options_and_timeouts_reach_base_combined_and_view_axes_and_groups_made_later():
    for (own, default), changed, others in torch_world(options_everywhere, world_size=4):
        assert set(own.values()) == {17.0}
        assert set(default.values()) == {1800.0}
        assert changed == dict.fromkeys(own, 23.5)
        assert others == own


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"timeout": 3}, r"'timeout' is unknown. Options: timeout_s, is_high_priority. Did you mean 'timeout_s'"),
        ({3: 3}, r"3 is unknown"),
        ({"timeout_s": "3"}, r"timeout_s='3'. Give seconds above 0"),
        ({"timeout_s": True}, r"timeout_s=True. Give seconds above 0"),
        ({"timeout_s": float("nan")}, r"timeout_s=nan. Give seconds above 0"),
        ({"timeout_s": [3]}, r"timeout_s=\[3\]. Give seconds above 0"),
        ({"is_high_priority": 1}, r"is_high_priority=1. Give True or False"),
        ([("timeout_s", 3)], r"found \[\('timeout_s', 3\)\]. Give a mapping"),
    ],
)
def test_options_are_checked_by_name_and_kind(world, options, words):
    with pytest.raises(dm.DualmeshError, match=words):
        dm.init_parallel_state(dp_size=8, group_options=options)


def test_equal_options_are_equal_however_they_are_written():
    assert check_options({"timeout_s": 3, "is_high_priority": False}) == check_options(
        {"is_high_priority": False, "timeout_s": 3.0}
    )


def warmed():
    import torch

    state = dm.init_parallel_state(spec=GRID)
    torch._dynamo.reset()
    logged = torch.compile(lambda x: dm.ops.all_reduce(x, "a"), fullgraph=True, backend="aot_eager")
    try:
        logged(torch.ones(1))
    except Exception as error:
        refused = str(error)
    before = {group[:2] for group in dm.groups_in_use()}
    state.warm_up()
    same = before == {group[:2] for group in dm.groups_in_use()}
    state.warm_up("a", ("b", "a"))
    more = {group[:2] for group in dm.groups_in_use()} - before
    tuples = torch.compile(lambda x: dm.ops.all_reduce(x, ("b", "a")), fullgraph=True, backend="aot_eager")
    x = torch.tensor([float(state.own_rank())])
    try:
        state.warm_up("d")
    except dm.DualmeshError as error:
        unknown = str(error)
    return refused, same, more, logged(x).item(), tuples(x).item(), unknown


def test_warming_up_makes_the_groups_that_compiled_collectives_need_as_the_error_says():
    found = torch_world(warmed, world_size=4, timeout_s=60)
    for rank, (refused, same, more, logged, tuples, unknown) in enumerate(found):
        assert "state.warm_up('a') on every rank" in refused
        assert "dm.ops.all_reduce(x, 'a')" in refused
        assert same
        assert more == {((rank % 2, rank % 2 + 2), "data"), ((0, 2, 1, 3), "data")}
        assert (logged, tuples) == (2.0 * (rank % 2) + 2, 6.0)
        assert "no axis 'd'" in unknown


def in_use():
    dm.init_parallel_state(spec=dm.TopologySpec({"a": 2, "b": 2}), name="one")
    dm.init_parallel_state(spec=dm.TopologySpec({"x": 2, "y": 2}), name="two", dp_mode="ddp")
    dm.init_parallel_state(spec=dm.TopologySpec({"z": 4}), name="three", group_options={"timeout_s": 9})
    found = [(*group[:5], group.states) for group in dm.groups_in_use()]
    names = [group.name for group in dm.groups_in_use()]
    dm.clear_parallel_state()
    return found, len(set(names)) == len(names), dm.groups_in_use()


def test_groups_in_use_names_ranks_lane_options_and_users():
    both, own = ("one", "two"), (("timeout_s", 9.0),)
    for rank, (found, distinct, after) in enumerate(torch_world(in_use, world_size=4)):
        row, column = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
        assert found == sorted(
            [
                (row, "data", "gloo", "cpu", (), both),
                (column, "data", "gloo", "cpu", (), both),
                ((0, 1, 2, 3), "data", "gloo", "cpu", (), both),
                ((0, 1, 2, 3), "data", "gloo", "cpu", own, ("three",)),
            ]
        )
        assert distinct
        assert after == ()


def cycles(own_groups, count):
    """Init, one DTensor step, clear; return (threads, files, groups, meshes, resident MB) after each cycle."""
    import gc
    import os
    from pathlib import Path

    import numpy as np
    import torch
    from torch.distributed import distributed_c10d
    from torch.distributed.device_mesh import DeviceMesh

    def meshes():
        return [one for one in gc.get_objects() if type(one).__name__ == "DeviceMesh" and isinstance(one, DeviceMesh)]

    others = {id(one): one for one in meshes()}  # of tests before this one: held, so that no id names another
    found = []
    for cycle in range(count):
        dm.init_parallel_state(spec=dm.TopologySpec({"a": 2}), own_groups=own_groups)
        x = np.arange(16.0).reshape(4, 4) + cycle
        sharded = dm.distribute(x, dm.P("a"))
        assert (dm.to_numpy(sharded @ sharded + sharded) == x @ x + x).all()
        dm.ops.all_reduce(torch.ones(3), "a")
        del sharded
        dm.clear_parallel_state()
        gc.collect()
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        found.append(
            (
                int(status["Threads"]),
                len(os.listdir("/proc/self/fd")),
                len(distributed_c10d._world.pg_map),
                sum(id(one) not in others for one in meshes()),
                int(status["VmRSS"].split()[0]) / 1024,
            )
        )
    return found


@pytest.mark.parametrize("own_groups", [False, True])
def test_twenty_lives_of_a_state_leave_no_group_thread_socket_mesh_or_memory_behind(own_groups):
    for found in torch_world(cycles, own_groups, 20, world_size=2):
        assert len({cycle[:4] for cycle in found[1:]}) == 1, found
        assert found[-1][2:4] == (1, 0)
        assert found[-1][4] - found[2][4] < 2.0, found


def clearing_early():
    """Clear while rank 1 still makes the group; return whether it was kept, until when, and a sum over new groups."""
    import time

    import torch
    import torch.distributed as dist

    from dualmesh.backend import discovery
    from dualmesh_torch import private

    rank, pool = dist.get_rank(), discovery.load("torch").pool
    member_group, before = private.member_group, private.group_names()

    def slow(*arguments):
        group = member_group(*arguments)
        time.sleep(1.0)
        return group

    if rank == 1:
        private.member_group = slow
    try:
        dm.init_parallel_state(spec=dm.TopologySpec({"a": 2}), name="early", own_groups=True)
    finally:
        private.member_group = member_group
    dm.clear_parallel_state()
    kept = len(private.group_names()) > len(before)
    pool.finish(30.0)
    ended = private.group_names() == before
    dm.init_parallel_state(spec=dm.TopologySpec({"a": 2}), name="again", own_groups=True)
    return kept, ended, dm.ops.all_reduce(torch.ones(1), "a").item()


def test_a_group_that_a_slow_member_still_makes_is_kept_until_it_is_made_and_ended_then():
    """The fast rank is through a second before the slow one, which, being last, has nothing to wait for."""
    assert torch_world(clearing_early, world_size=2) == [(True, True, 2.0), (False, True, 2.0)]
