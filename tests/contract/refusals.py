"""What must be refused, each by a function that a worker runs; the wanted errors are in `test_refusals`."""

import numpy as np

import dualmesh as dm
from tests.contract.runs import opened

X = np.arange(24.0).reshape(4, 6)
A = dm.P("a")


def inside(fn, x=X):
    """Run a per-rank function of one block where ranks are defined."""
    return dm.to_numpy(dm.shard_map(fn, A, A)(dm.distribute(x, A)))


def unknown_axis():
    inside(lambda x: dm.ops.all_reduce(x, "bb"))


def axis_of_an_outer_scope():
    inner = dm.init_parallel_state(spec=dm.TopologySpec({"dp": 4}), name="inner")
    dm.init_parallel_state(spec=dm.TopologySpec({"tp": 2, "rest": 2}), name="outer")
    with dm.use_parallel_state("outer"), dm.use_parallel_state(inner):
        dm.ops.axis_size("tp")


def dim_out_of_range():
    inside(lambda x: dm.ops.all_gather(x, "a", dim=2))


def size_does_not_divide():
    inside(lambda x: dm.ops.reduce_scatter(x[:, :5], "b", dim=1))


def sum_of_bool():
    inside(lambda x: dm.ops.all_reduce(x > 3, "a"))


def mean_of_integers():
    inside(lambda x: dm.ops.all_reduce(x, "a", "mean"), np.arange(4))


def max_of_complex():
    inside(lambda x: dm.ops.all_reduce(x, "a", "max"), np.arange(4) + 1j)


def bad_op():
    inside(lambda x: dm.ops.all_reduce(x, "a", "avg"))


def scatter_of_max():
    inside(lambda x: dm.ops.reduce_scatter(x, "a", 0, "max"))


def src_out_of_range():
    inside(lambda x: dm.ops.broadcast(x, "a", src=2))


def src_no_integer():
    inside(lambda x: dm.ops.broadcast(x, "a", src=True))


def repeated_destination():
    inside(lambda x: dm.ops.permute(x, "a", [(0, 1), (1, 1)]))


def repeated_source():
    inside(lambda x: dm.ops.permute(x, "a", [(0, 1), (0, 0)]))


def no_array():
    inside(lambda x: dm.ops.all_reduce([1.0, 2.0], "a"))


def distribute_does_not_divide():
    dm.distribute(np.arange(5.0), A)


def distribute_unknown_axis():
    dm.distribute(X, dm.P("aa"))


def too_many_entries():
    dm.distribute(np.arange(4.0), dm.P("a", "b"))


def axis_used_twice():
    dm.distribute(X, dm.P("a", "world"))


def specs_do_not_fit():
    dm.shard_map(lambda x, y: x, (A,), A)(dm.distribute(X, A), dm.distribute(X, A))


def result_specs_do_not_fit():
    dm.shard_map(lambda x: (x, x), A, (A, A, A))(dm.distribute(X, A))


def replicated_result_differs():
    dm.shard_map(lambda x: x, A, dm.P(), check_replicated=True)(dm.distribute(X, A))


def stale_op():
    old = dm.get_parallel_state()
    dm.clear_parallel_state()
    opened(4)
    inside(lambda x: dm.ops.all_reduce(x, "a", state=old))


def stale_distribute():
    old = dm.get_parallel_state()
    dm.clear_parallel_state()
    dm.distribute(X, A, state=old)


def stale_shard_map():
    old = dm.get_parallel_state()
    dm.clear_parallel_state()
    dm.shard_map(lambda x: x, A, A, state=old)(X)


def stale_group():
    old = dm.get_parallel_state()
    dm.clear_parallel_state()
    old.group("a")


def gradient_of_max():
    lifted = dm.shard_map(lambda x: dm.ops.all_reduce(x[0, 0], "world", "max"), A, dm.P())
    dm.value_and_grad(lifted)(dm.distribute(X, A))


def exchanged(send, receive, **settings):
    """Exchange rows of a block of 2 rows over an axis of 2."""
    inside(lambda x: dm.ops.ragged_all_to_all(x, "a", send, receive, **settings))


def too_few_counts():
    exchanged([1], [1, 1])


def more_rows_than_there_are():
    exchanged([2, 2], [1, 1])


def no_room_for_the_rows():
    exchanged([1, 1], [1, 1], rows=1)


def negative_count():
    exchanged([-1, 1], [1, 1])


def counts_that_are_none():
    exchanged(["a", 1], [1, 1])


def ragged_over_an_unknown_axis():
    inside(lambda x: dm.ops.ragged_all_to_all(x, "aa", [1, 1], [1, 1]))


def enter_an_unknown_axis():
    inside(lambda x: dm.ops.enter(x, "aa"))


def enter_no_array():
    inside(lambda x: dm.ops.enter([1.0, 2.0], "a"))


def leave_with_bools():
    inside(lambda x: dm.ops.leave(x > 3, "a"))


def leave_a_state_that_ended():
    old = dm.get_parallel_state()
    dm.clear_parallel_state()
    opened(4)
    inside(lambda x: dm.ops.leave(x, "a", state=old))


def rank_of_no_state():
    dm.get_parallel_state().index("a", rank=4)


EVERYWHERE = (
    *(unknown_axis, axis_of_an_outer_scope, dim_out_of_range, size_does_not_divide, sum_of_bool, mean_of_integers),
    *(max_of_complex, bad_op, scatter_of_max, src_out_of_range, src_no_integer, repeated_destination),
    *(repeated_source, no_array, distribute_does_not_divide, distribute_unknown_axis, too_many_entries),
    *(axis_used_twice, specs_do_not_fit, result_specs_do_not_fit, replicated_result_differs, stale_op),
    *(stale_distribute, stale_shard_map, stale_group, gradient_of_max, rank_of_no_state, too_few_counts),
    *(more_rows_than_there_are, no_room_for_the_rows, negative_count, counts_that_are_none),
    *(ragged_over_an_unknown_axis, enter_an_unknown_axis, enter_no_array, leave_with_bools, leave_a_state_that_ended),
)


def outcomes():
    """Return {name: (class names of the error, text), or None where nothing was refused}."""
    found = {}
    for fn in EVERYWHERE:
        dm.clear_parallel_state()
        opened(4)
        found[fn.__name__] = outcome(fn)
    return found


def outcome(fn):
    """Return (class names of the error, text) of what a function raises, or None."""
    try:
        fn()
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__], str(error)
    return None


def outside_shard_map():
    """Call collectives where JAX and sim have no rank; torch has one."""
    opened(4)
    calls = {
        "all_reduce": lambda: dm.ops.all_reduce(X, "a"),
        "ragged_all_to_all": lambda: dm.ops.ragged_all_to_all(X, "a", [1, 1], [1, 1]),
        "enter": lambda: dm.ops.enter(X, "a"),
        "leave": lambda: dm.ops.leave(X, "a"),
    }
    return {name: outcome(call) for name, call in calls.items()}


def without_state():
    """Call a collective before any init."""
    dm.clear_parallel_state()
    return outcome(lambda: dm.ops.all_reduce(X, "tp"))


def not_a_member():
    """Return (is_member, outcome) of using a state over ranks 0 and 2."""
    opened(4)
    state = dm.init_parallel_state(spec=dm.TopologySpec({"a": 2}), ranks=(0, 2), name="some")
    return state.is_member, outcome(lambda: dm.distribute(np.arange(4.0), A, state=state))
