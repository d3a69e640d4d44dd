"""What does not fit is refused: all problems in one error, with names, values and what would fit."""

import numpy as np
import pytest
from hypothesis import given

import dualmesh as dm
from dualmesh.errors import ArgumentError, DualmeshError, SpecError
from dualmesh.topology.resolve import positive, whole
from tests.core.any_topology import examples


def problems_of(spec, world_size=8):
    with pytest.raises(SpecError) as caught:
        spec.resolve(world_size)
    assert isinstance(caught.value, ValueError)
    for problem in caught.value.problems:
        assert problem in str(caught.value)
    return caught.value.problems


@given(examples())
def test_resolving_twice_changes_nothing(example):
    once = example.spec.resolve(example.world_size)
    assert once.spec.resolve(example.world_size) == once
    assert -1 not in once.spec.axes.values()


def test_an_axis_of_minus_one_is_inferred_anywhere():
    for place in range(3):
        sizes = [2, 3, 4]
        sizes[place] = -1
        assert list(dm.TopologySpec(dict(zip("abc", sizes, strict=True))).resolve(24).sizes.values()) == [2, 3, 4]


@pytest.mark.parametrize("size", [0, -2, True, False, 2.0, "2", None, (2,), 1j, np.bool_(True), float("nan")])
def test_what_is_no_size_is_refused_with_its_name_and_value(size):
    (problem,) = problems_of(dm.TopologySpec({"dp": -1, "tp": size}))
    assert problem == f"tp={size!r} is no size. Sizes are positive integers, or one -1 to infer."
    (problem,) = problems_of(dm.TopologySpec({"dp": 8}, views={"v": dm.View("dp", {"a": size, "b": -1})}))
    assert problem == f"view 'v': a={size!r} is no size. Sizes are positive integers, or one -1 to infer."


def test_a_wrong_product_says_factors_product_world_and_what_would_fit():
    (problem,) = problems_of(dm.TopologySpec({"dp": 3, "tp": 2}))
    assert problem == (
        "dp=3, tp=2 multiply to 6, but the world has 8 ranks. Sizes must multiply to 8: give one axis -1 to infer it. "
        "What would fit, one changed: dp=4."
    )
    (problem,) = problems_of(dm.TopologySpec({"dp": 3, "tp": 3}))
    assert problem.endswith("No single axis can be changed to fit.")


def test_an_inferred_size_that_does_not_divide_says_what_would():
    (problem,) = problems_of(dm.TopologySpec({"dp": -1, "tp": 3}))
    assert problem == (
        "tp=3 multiplies to 3, which does not divide: the world has 8 ranks. dp=-1 needs the others to multiply to a "
        "divisor of 8: 1, 2, 4, 8."
    )


def test_two_sizes_cannot_be_inferred():
    (problem,) = problems_of(dm.TopologySpec({"dp": -1, "cp": -1, "tp": 2}))
    assert problem == "dp, cp are all -1. Only one axis can be inferred: give the others a size."


@pytest.mark.parametrize("world_size", [0, -1, 2.0, "8", True, None])
def test_a_world_is_a_positive_number_of_ranks(world_size):
    with pytest.raises(ArgumentError, match=r"world_size is .* at least 1"):
        dm.TopologySpec({"dp": -1}).resolve(world_size)


def test_a_view_that_does_not_divide_lists_the_allowed_sizes():
    (problem,) = problems_of(dm.TopologySpec({"dp": 8}, views={"expert": dm.View("dp", {"ep_fsdp": -1, "ep": 3})}))
    assert problem == (
        "ep=3 multiplies to 3, which does not divide: view 'expert' is over dp, which has 8 positions. ep_fsdp=-1 "
        "needs the others to multiply to a divisor of 8: 1, 2, 4, 8."
    )
    (problem,) = problems_of(dm.TopologySpec({"dp": 8}, views={"expert": dm.View("dp", {"ep_fsdp": 3, "ep": 2})}))
    assert "multiply to 6, but view 'expert' is over dp, which has 8 positions" in problem


def test_a_view_that_cuts_where_ranks_cannot_be_cut_lists_the_allowed_sizes():
    views = {"expert": dm.View(("dp", "tp"), {"ep_fsdp": 2, "ep": 6})}
    (problem,) = problems_of(dm.TopologySpec({"dp": 3, "cp": 2, "tp": 4}, views=views), 24)
    assert problem == (
        "view 'expert': ep_fsdp=2, ep=6 multiply to 12 over dp x tp, but ep=6 ends at 6, where the ranks (3 x 4) "
        "cannot be cut. Sizes multiplied from the innermost must each give one of: 1, 2, 4, 12."
    )


@pytest.mark.parametrize(("ep", "first"), [(1, [0]), (2, [0, 2]), (4, [0, 2, 4, 6]), (8, [0, 2, 4, 6, 8, 10, 12, 14])])
def test_views_cut_through_one_axis_or_straddle_two(ep, first):
    views = {"expert": dm.View(("dp", "cp"), {"ep_fsdp": -1, "ep": ep})}
    topology = dm.TopologySpec({"dp": 4, "cp": 2, "tp": 2}, views=views).resolve(16)
    assert topology.partition("ep").tolist()[0] == first
    outer = {"expert": dm.View(("dp", "cp"), {"ep": ep, "ep_fsdp": -1})}
    outermost = dm.TopologySpec({"dp": 4, "cp": 2, "tp": 2}, views=outer).resolve(16)
    assert outermost.ranks("ep", 0) == tuple(range(0, 16, 16 // ep))


def test_views_over_combined_axes_and_combined_axes_of_views():
    spec = dm.TopologySpec(
        {"dp": 2, "cp": 2, "tp": 2},
        {"dp_cp": ("dp", "cp"), "ep_tp": ("ep", "tp"), "all": ("edp", "ep_tp")},
        {"expert": dm.View("dp_cp", {"edp": 2, "ep": 2})},
    )
    topology = spec.resolve(8)
    assert topology.axis_names == ("dp", "cp", "tp", "edp", "ep", "dp_cp", "ep_tp", "all", "world")
    assert topology.layout("all") == topology.layout("world")


def test_names_are_taken_once_over_all_kinds():
    spec = dm.TopologySpec(
        {"dp": 8, "tp": 1},
        {"tp": "dp", "ep": "dp"},
        {"one": dm.View("dp", {"dp": 8}), "two": dm.View("dp", {"ep": 8})},
    )
    assert problems_of(spec) == (
        "the name 'dp' is taken twice (axis and axis of view 'one'). Rename one.",
        "the name 'tp' is taken twice (axis and combined axis). Rename one.",
        "the name 'ep' is taken twice (axis of view 'two' and combined axis). Rename one.",
    )


@pytest.mark.parametrize("name", ["", None, 3, ("dp",)])
def test_names_are_non_empty_strings(name):
    assert f"axis {name!r} is no name. Names are non-empty strings." in problems_of(dm.TopologySpec({name: 8}))


def test_any_text_is_a_name():
    topology = dm.TopologySpec({"größe": 2, "軸 1": 2, "🙂": 2, "|=:()": 1}).resolve(8)
    assert topology.ranks(("軸 1", "🙂"), 0) == (0, 1, 2, 3)


def test_the_name_world_is_kept_for_all_ranks():
    assert problems_of(dm.TopologySpec({"world": 8})) == (
        "axis 'world': the name is kept for all ranks. Rename that axis.",
    )
    (problem,) = problems_of(dm.TopologySpec({"dp": 4, "tp": 2}, {"world": ("tp", "dp")}))
    assert "combined axis 'world' is not all axes in their order" in problem
    assert dm.TopologySpec({"dp": 4, "tp": 2}, {"world": ("dp", "tp")}).resolve(8).size("world") == 8


def test_unknown_members_are_named_with_what_exists():
    spec = dm.TopologySpec({"dp": 4, "tp": 2}, {"c": ("dpp", ["x"])}, {"v": dm.View("tpp", {"a": 2})}, {"loss": "dpq"})
    assert problems_of(spec) == (
        "view 'v' names the axis 'tpp', not declared (before it). Axes: dp, tp. Did you mean 'tp'?",
        "combined axis 'c' names the axes 'dpp', ['x'], not declared (before it). Axes: dp, tp, a. Did you mean 'dp'?",
        "role 'loss' names the axis 'dpq', not declared (before it). Axes: dp, tp, a, c, world. Did you mean 'dp'?",
    )


def test_members_that_share_ranks_are_named():
    views = {"v": dm.View("dp", {"a": 2, "b": 2})}
    spec = dm.TopologySpec({"dp": 4, "tp": 2}, {"c": ("tp", "dp", "a")}, views, {"data": ("b", "dp")})
    assert problems_of(spec) == (
        "combined axis 'c' names 'dp' and 'a', which share ranks. Name axes that cross.",
        "role 'data' names 'b' and 'dp', which share ranks. Name axes that cross.",
    )


def test_unknown_roles_are_named():
    (problem,) = problems_of(dm.TopologySpec({"dp": 8}, roles={"dta": "dp"}))
    assert problem.startswith(
        "role 'dta' is unknown. Roles: data, params, loss, sequence, replicate, stages. Did you mean 'data'"
    )


@pytest.mark.parametrize("offset", [-1, 1.0, "8", True, None])
def test_an_offset_is_a_number_of_ranks(offset):
    (problem,) = problems_of(dm.TopologySpec({"dp": 8}, rank_offset=offset))
    assert problem == f"rank_offset is {offset!r}. It must be an integer of at least 0."


def test_views_need_axes_and_specs_need_axes():
    assert problems_of(dm.TopologySpec({}))[0].startswith("no axes are declared")
    (problem,) = problems_of(dm.TopologySpec({"dp": 8}, views={"v": dm.View("dp", {})}))
    assert problem.startswith("view 'v' has no axes")


def test_all_problems_come_in_one_error():
    spec = dm.TopologySpec(
        {"dp": 3, "tp": 2},
        {"c": "x", "tp": "dp"},
        {"v": dm.View("dp", {"a": 0, "b": -1}), "w": dm.View("z", {"d": -1, "e": -1})},
        {"los": "dp", "data": "y"},
        rank_offset=-3,
    )
    found = problems_of(spec)
    assert len(found) == 9
    for part in ("taken twice", "rank_offset", "multiply to 6", "a=0", "'z'", "d, e are all -1", "'x'", "'los'", "'y'"):
        assert any(part in problem for problem in found), part


def test_plain_values_are_checked_by_name():
    assert [whole(value) for value in (3, np.int8(3), True, 3.0, "3", None)] == [3, 3, None, None, None, None]
    with pytest.raises(DualmeshError, match=r"here: count is 0. It must be an integer of at least 1") as caught:
        positive("here", "count", 0)
    assert caught.value.count == 0
