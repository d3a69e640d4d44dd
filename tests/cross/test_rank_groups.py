"""States over rank groups: disjoint, unequal, not covering, in an order of their own, on every backend."""

from itertools import chain

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.testing import assert_same
from tests.cross import grouped
from tests.worlds import wide_worlds

BACKENDS = ("sim", "torch", "jax")


def run(backend, fn, *args, world_size):
    return wide_worlds()[backend](fn, *args, world_size=world_size)


@pytest.mark.parametrize(
    ("world_size", "groups"),
    [
        (6, [[5, 0, 1], [2, 3]]),
        (4, [[3, 1], [0, 2]]),
        (8, [[7, 2, 4, 0], [1, 6]]),
    ],
)
def test_groups_of_any_size_and_order_reduce_like_numpy(world_size, groups):
    order = sorted(chain(*groups))
    grouped.check(dm.RankGroups(groups), {"group": groups}, order, 3, grouped.ANYWHERE, world_size=world_size)


def test_groups_of_one_size_do_everything():
    axes = {"pair": [[3, 1], [0, 2]], "all": [[2, 0, 3, 1]]}
    grouped.check(dm.GroupSpec(axes), axes, range(4), 4, grouped.SHAPED + grouped.ANYWHERE, world_size=4)


def test_groups_with_an_offset_leave_the_first_ranks_alone():
    spec = dm.RankGroups([[1, 0], [3, 2]], rank_offset=4)
    grouped.check(spec, {"group": [[5, 4], [7, 6]]}, range(4, 8), 4, grouped.SHAPED, world_size=8)


def test_groups_over_listed_ranks_count_in_the_order_of_the_list():
    ranks = (6, 1, 5, 2)
    spec = dm.RankGroups([[1, 0], [2, 3]])
    grouped.check(spec, {"group": [[1, 6], [5, 2]]}, ranks, 4, grouped.SHAPED, world_size=8, ranks=ranks)


def answers_about_ranks():
    state = dm.init_parallel_state(spec=dm.GroupSpec({"node": [[5, 0, 1], [2, 3]], "heads": [[5, 2]]}), name="nodes")
    about = {rank: (state.size("node", rank), state.index("node", rank), state.ranks("node", rank)) for rank in (3, 5)}
    return about, state.size("heads"), state.is_member, state.has_rank(4), state.world_size, state.ranks("world", 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_process_knows_about_every_rank(backend):
    for rank, (about, heads, is_member, *world) in enumerate(run(backend, answers_about_ranks, world_size=6)):
        assert about == {3: (2, 1, (2, 3)), 5: (3, 0, (5, 0, 1))}
        assert heads == 2
        assert is_member == (backend != "torch" or rank != 4)
        assert world == [False, 5, (0, 1, 2, 3, 5)]


def on_one_torch_rank():
    import torch
    import torch.distributed as dist

    state = dm.init_parallel_state(spec=dm.GroupSpec({"node": [[5, 0, 1], [2, 3]], "heads": [[5, 2]]}), name="nodes")
    x = torch.arange(12.0)
    said = {}
    for axis in ("node", "heads", "world"):
        ops = {
            "all_reduce": lambda axis: dm.ops.all_reduce(x, axis),
            "axis_index": lambda axis: dm.ops.axis_index(axis),
            "host": lambda axis: dm.host.all_gather(1, axis),
            "group": state.group,
            "submesh": state.submesh,
        }
        for name, op in ops.items():
            try:
                op(axis)
            except dm.DualmeshError as error:
                said[axis, name] = f"{type(error).__name__}: {error}"
    if not state.is_member:
        return said, None
    group = state.group("node")
    native = dist.get_process_group_ranks(group), dist.get_group_rank(group, dist.get_rank())
    mesh = state.submesh("node")
    return said, (native, state.index("node"), mesh.mesh.tolist(), mesh.get_local_rank(), state.size("node"))


def test_torch_ranks_outside_a_group_are_refused_by_name_and_never_ignored():
    found = run("torch", on_one_torch_rank, world_size=6)
    for rank, (said, native) in enumerate(found):
        axes = {"node", "heads", "world"} if rank == 4 else {"heads"} if rank not in (5, 2) else set()
        assert {axis for axis, _ in said} == axes
        assert len(said) == 5 * len(axes)
        for text in said.values():
            assert text.startswith("MembershipError")
            assert f"rank {rank}" in text
            assert "nodes" in text or "heads" in text
        if rank != 4:
            group = [5, 0, 1] if rank in (5, 0, 1) else [2, 3]
            index = group.index(rank)
            assert native == ((group, index), index, group, index, len(group))


def refused_in_jax():
    import jax
    import jax.numpy as jnp

    state = dm.init_parallel_state(spec=dm.GroupSpec({"node": [[5, 0, 1], [2, 3]], "heads": [[5, 2]]}), name="nodes")
    x = jnp.arange(60.0).reshape(5, 12)
    ops = {
        "all_gather": lambda x: dm.ops.all_gather(x, "node"),
        "reduce_scatter": lambda x: dm.ops.reduce_scatter(x, "node", 1),
        "all_to_all": lambda x: dm.ops.all_to_all(x, "node", 1, 0),
        "shift": lambda x: dm.ops.shift(x, "node"),
        "heads": lambda x: dm.ops.all_reduce(x, "heads"),
        "heads index": lambda x: x + state.index("heads"),
        "combined": lambda x: dm.ops.all_reduce(x, ("node", "heads")),
        "src": lambda x: dm.ops.broadcast(x, "node", 2),
    }
    said = {}
    for name, op in ops.items():
        try:
            jax.jit(dm.shard_map(op, dm.P("world"), dm.P("world")))(x)
        except dm.DualmeshError as error:
            said[name] = f"{type(error).__name__}: {error}"
    for name, ask in {"group": lambda: state.group("node"), "spec": lambda: state.pspec("node")}.items():
        try:
            ask()
        except dm.DualmeshError as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def test_what_jax_cannot_do_with_unequal_or_missing_groups_is_refused_by_name():
    (said,) = run("jax", refused_in_jax, world_size=8)
    for name in ("all_gather", "reduce_scatter", "all_to_all", "shift"):
        assert f"ShapeError: ops.{name}: axis 'node' of State 'nodes' has groups of the sizes 2, 3" in said[name]
    assert said["heads"].startswith("MembershipError: ops.all_reduce")
    for name in ("heads", "heads index"):
        assert "axis 'heads' of State 'nodes' leaves out rank 0" in said[name]
        assert "each as a group of one" in said[name]
    for name in ("combined", "group", "spec"):
        assert said[name].startswith("SpecError")
        assert "rank groups" in said[name]
    assert "src=2 is no index of axis 'node'. Indices are 0..1" in said["src"]


def federated(x):
    """Average over the ranks that speak for their federation (LAYOUTS X5), then hand the mean to its replicas."""
    singles = [[rank] for rank in (1, 2, 4, 5, 6, 7)]
    state = dm.init_parallel_state(
        spec=dm.GroupSpec({"speakers": [[0, 3], *singles], "federation": [[0, 1, 2, 4, 6], [3, 5, 7]]})
    )
    step = dm.shard_map(
        lambda x: dm.ops.broadcast(dm.ops.all_reduce(x, "speakers", op="mean"), "federation", 0),
        dm.P("world"),
        dm.P("world"),
    )
    return state.size("federation", 7), dm.to_numpy(step(dm.distribute(x, dm.P("world"))))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_federated_mean_over_groups_of_several_sizes(backend):
    x = np.arange(8.0) ** 2 + 1
    for size, mean in run(backend, federated, x, world_size=8):
        assert size == 3
        assert_same("mean", np.full(8, (x[0] + x[3]) / 2), mean, rtol=0)


def meeting_a_grid(x):
    """Use a grid and rank groups over the same ranks in one function."""
    dm.init_parallel_states({"grid": dm.TopologySpec({"dp": 2, "tp": 2}), "ring": dm.RankGroups([[2, 0, 3, 1]])})
    with dm.use_parallel_state("grid"):
        step = dm.shard_map(
            lambda x: dm.ops.shift(dm.ops.all_reduce(x, "tp"), "group", state=dm.get_parallel_state_by_name("ring")),
            dm.P("world"),
            dm.P("world"),
        )
        return dm.to_numpy(step(dm.distribute(x, dm.P("world"))))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_grid_and_rank_groups_over_the_same_ranks_meet_in_one_function(backend):
    x = np.array([1.0, 10.0, 100.0, 1000.0])
    reduced = np.array([11.0, 11.0, 1100.0, 1100.0])
    ring = [2, 0, 3, 1]
    wanted = np.empty(4)
    wanted[ring] = reduced[np.roll(ring, 1)]
    for answer in run(backend, meeting_a_grid, x, world_size=4):
        assert_same("shifted", wanted, answer, rtol=0)
