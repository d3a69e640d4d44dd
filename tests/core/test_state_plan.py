"""What ranks compare before they build: every setting of a plan that can differ makes another text."""

from dataclasses import fields, replace

import pytest

import dualmesh as dm
from dualmesh.backend.state_plan import StatePlan, describe_plans, ranks_of
from dualmesh.runtime.agreement import member_set


def plan_of(spec, world_size=4, **settings):
    usual = {"ranks": None, "backend": "torch", "device_type": "cpu", "name": "base"}
    return StatePlan(spec.resolve(world_size), **(usual | settings))


GRID = dm.TopologySpec({"a": 2, "b": 2})
BASE = plan_of(GRID)
OTHERS = {
    "name": [plan_of(GRID, name="bose")],
    "topology": [
        plan_of(dm.TopologySpec({"a": 4, "b": 1})),
        plan_of(dm.TopologySpec({"b": 2, "a": 2})),
        plan_of(dm.TopologySpec({"a": 2, "b": 2}, roles={"data": ("a",)})),
        plan_of(dm.TopologySpec({"a": 2, "b": 2}, roles={"data": ("b",)})),
        plan_of(dm.TopologySpec({"a": 2, "b": 2}, combined={"c": ("a", "b")})),
        plan_of(dm.TopologySpec({"a": 2, "b": 2}, combined={"c": ("b", "a")})),
        plan_of(dm.TopologySpec({"a": 2, "b": 2}, views={"v": dm.View(over=("a", "b"), axes={"x": 2, "y": 2})})),
    ],
    "ranks": [plan_of(GRID, ranks=(0, 2, 1, 3)), plan_of(GRID, ranks=(3, 2, 1, 0))],
    "backend": [plan_of(GRID, backend="jax")],
    "device_type": [plan_of(GRID, device_type="cuda")],
    "dp_mode": [plan_of(GRID, dp_mode="ddp")],
    "async_enabled": [plan_of(GRID, async_enabled=True)],
    "own_groups": [plan_of(GRID, own_groups=True)],
    "group_options": [
        plan_of(GRID, group_options=(("timeout_s", 7.0),)),
        plan_of(GRID, group_options=(("timeout_s", 9.0),)),
    ],
    "extra_parallel_names": [plan_of(GRID, extra_parallel_names=("ep",))],
}


def test_every_field_of_a_plan_is_in_the_text_that_ranks_compare():
    """A field without an example here is one that nobody compared."""
    assert set(OTHERS) == {each.name for each in fields(StatePlan) if each.init}
    plans = [BASE, *(plan for others in OTHERS.values() for plan in others)]
    assert len({describe_plans([plan]) for plan in plans}) == len(plans)


def test_equal_plans_have_one_text_whatever_order_their_states_were_named_in():
    assert describe_plans([replace(BASE)]) == describe_plans([BASE])


@pytest.mark.parametrize("place", [0, 8, 15])
def test_rank_groups_differ_in_the_text_also_behind_what_messages_show(place):
    """Messages show the first eight groups of a list."""
    pairs = [[2 * number, 2 * number + 1] for number in range(16)]
    swapped = [pair[::-1] if number == place else pair for number, pair in enumerate(pairs)]
    texts = [describe_plans([plan_of(dm.GroupSpec.of(dm.RankGroups(groups)), 32)]) for groups in (pairs, swapped)]
    assert texts[0] != texts[1]


def test_ranks_meet_whatever_order_they_list_their_state_in():
    assert member_set((3, 1, 0, 2)) == member_set(range(4)) == range(4)
    assert member_set(range(3, -1, -1)) == (0, 1, 2, 3)
    assert member_set((5, 2)) == (2, 5)
    offset = plan_of(dm.TopologySpec({"a": 2}, rank_offset=2), 2)
    assert member_set(ranks_of(offset)) == member_set((3, 2)) == range(2, 4)
