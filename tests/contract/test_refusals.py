"""Mistakes end in the same named error on every backend, with the values and the cure."""

import re

import pytest

from tests.contract import refusals
from tests.contract.backends import BACKENDS, agreed, run

WANTED = {
    "unknown_axis": ("UnknownAxisError", "KeyError", r"has no axis 'bb'\. Axes: .*Did you mean 'b'\?"),
    "axis_of_an_outer_scope": ("UnknownAxisError", "KeyError", r"has no axis 'tp'.*Outer scope 'outer' has it"),
    "dim_out_of_range": ("ShapeError", "ValueError", r"ops.all_gather: dim 2 .*shape \(2, 6\).*Dims are -2\.\.1"),
    "size_does_not_divide": ("ShapeError", "ValueError", r"reduce_scatter: dim 1 .*size 5.*axis 'b'.*Pad dim 1 to 6"),
    "sum_of_bool": ("ArrayTypeError", "TypeError", r"sum of bool values is not defined"),
    "mean_of_integers": ("ArrayTypeError", "TypeError", r"mean of integer values is not defined"),
    "max_of_complex": ("ArrayTypeError", "TypeError", r"max of complex values is not defined"),
    "bad_op": ("ArgumentError", "ValueError", r"op='avg'\. Allowed: sum, mean, max, min"),
    "scatter_of_max": ("ArgumentError", "ValueError", r"op='max'\. Allowed: sum, mean"),
    "src_out_of_range": ("ArgumentError", "ValueError", r"src=2 is no index of axis 'a'\. Indices are 0\.\.1"),
    "src_no_integer": ("ArgumentError", "ValueError", r"src=True is no index"),
    "repeated_destination": ("ArgumentError", "ValueError", r"dst 1 is named twice in \[\(0, 1\), \(1, 1\)\]"),
    "repeated_source": ("ArgumentError", "ValueError", r"src 0 is named twice"),
    "no_array": ("ArrayTypeError", "TypeError", r"ops\.all_reduce: .*list"),
    "distribute_does_not_divide": (
        "ShapeError",
        "ValueError",
        r"dim 0 has size 5, which 'a' of size 2 does not divide",
    ),
    "distribute_unknown_axis": ("UnknownAxisError", "KeyError", r"no axis 'aa'.*Did you mean 'a'"),
    "too_many_entries": ("ShardingError", "ValueError", r"\(4,\) has 1 dim.*2 entries"),
    "axis_used_twice": ("SpecError", "ValueError", r"'a' and 'world' .*share ranks"),
    "specs_do_not_fit": ("ShardingError", "ValueError", r"specs"),
    "result_specs_do_not_fit": ("ShardingError", "ValueError", r"specs"),
    "replicated_result_differs": ("ShardingError", "ValueError", r"rank"),
    "stale_op": ("StaleStateError", "RuntimeError", r"was cleared.*Initialize"),
    "stale_distribute": ("StaleStateError", "RuntimeError", r"distribute: .*was cleared"),
    "stale_shard_map": ("StaleStateError", "RuntimeError", r"shard_map: .*was cleared"),
    "stale_group": ("StaleStateError", "RuntimeError", r"was cleared.*Initialize"),
    "gradient_of_max": ("NotDifferentiableError", "RuntimeError", r"max|autodiff"),
    "rank_of_no_state": ("RankError", "ValueError", r"has no rank 4\. Its ranks: 0\.\.3"),
    "too_few_counts": ("ShapeError", "ValueError", r"send_counts has shape \(1,\)\. Give one count per index: \(2,\)"),
    "more_rows_than_there_are": ("ShapeError", "ValueError", r"send_counts=\(2, 2\) add up to 4, more than the 2 rows"),
    "no_room_for_the_rows": ("ShapeError", "ValueError", r"recv_counts=\(1, 1\) add up to 2, more than the 1 rows"),
    "negative_count": ("ArgumentError", "ValueError", r"send_counts=\(-1, 1\) has a negative count"),
    "counts_that_are_none": ("ArgumentError", "ValueError", r"\['a', 1\] are no counts"),
    "ragged_over_an_unknown_axis": ("UnknownAxisError", "KeyError", r"has no axis 'aa'.*Did you mean 'a'"),
    "enter_an_unknown_axis": ("UnknownAxisError", "KeyError", r"has no axis 'aa'.*Did you mean 'a'"),
    "enter_no_array": ("ArrayTypeError", "TypeError", r"ops\.enter: .*list"),
    "leave_with_bools": ("ArrayTypeError", "TypeError", r"ops\.leave: the sum of bool values is not defined"),
    "leave_a_state_that_ended": ("StaleStateError", "RuntimeError", r"was cleared.*Initialize"),
}


@pytest.fixture(scope="module")
def outcomes():
    """What every backend refused, found once."""
    return {}


@pytest.mark.parametrize("name", WANTED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mistake_is_refused_by_name(backend, name, outcomes):
    if backend not in outcomes:
        outcomes[backend] = run(backend, refusals.outcomes, world_size=4)
    for found in outcomes[backend]:
        kind, builtin, text = WANTED[name]
        assert found[name] is not None, "nothing was refused"
        kinds, said = found[name]
        assert {kind, builtin, "DualmeshError"} <= set(kinds), f"{kinds[0]}: {said}"
        assert re.search(text, said, re.DOTALL), said


def test_every_refusal_is_wanted():
    assert [fn.__name__ for fn in refusals.EVERYWHERE] == list(WANTED)


@pytest.mark.parametrize("backend", ["sim", "jax", "toy"])
def test_a_collective_outside_shard_map_is_refused_where_no_rank_is_defined(backend):
    for name, (kinds, said) in agreed(run(backend, refusals.outside_shard_map, world_size=4)).items():
        assert kinds[0] == "OutsideShardMapError", name
        assert "shard_map" in said


def test_a_collective_before_init_is_refused_in_a_world_of_several_processes():
    for kinds, said in run("torch", refusals.without_state, world_size=2):
        assert kinds[0] == "NoStateError"
        assert "torch runs 2 processes" in said
        assert "init_parallel_state" in said


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_process_without_a_rank_of_the_state_is_refused(backend):
    found = run(backend, refusals.not_a_member, world_size=4)
    assert [is_member for is_member, _ in found] == ([True, False, True, False] if backend == "torch" else [True])
    for is_member, outcome in found:
        if is_member:
            assert outcome is None
        else:
            assert outcome[0][0] == "MembershipError"
            assert "Its ranks: 0, 2" in outcome[1]
