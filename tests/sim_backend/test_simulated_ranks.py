"""Inside `shard_map` every answer is that of one rank; outside, this process speaks for all of them."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import (
    AgreementError,
    ArrayTypeError,
    BackendError,
    LaunchError,
    NotDifferentiableError,
    RankError,
    SessionError,
    ShapeError,
    ShardingError,
)

X = np.arange(8.0)


@pytest.fixture
def state():
    with dm.session(backend="sim", world_size=4):
        yield dm.init_parallel_state(spec=dm.TopologySpec({"dp": 2, "tp": 2}, roles={"params": ("dp",)}))


def each_rank(fn):
    """Call `fn` on every rank and return what each gives, in rank order."""
    found = {}

    def each():
        found[dm.get_parallel_state().own_rank()] = fn()
        return ()

    dm.shard_map(each, (), ())()
    return [found[rank] for rank in sorted(found)]


def test_index_own_rank_ranks_and_group_are_those_of_the_asking_rank(state):
    assert each_rank(lambda: (state.index("dp"), state.index("tp"))) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert each_rank(lambda: state.local_ranks) == [(0,), (1,), (2,), (3,)]
    assert each_rank(lambda: state.ranks("dp")) == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert each_rank(lambda: state.group("tp")) == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert each_rank(lambda: state.is_writer("tp")) == [True, False, True, False]
    assert each_rank(lambda: state.submesh("tp").ranks.tolist()) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert each_rank(lambda: state.fsdp_mesh.ranks.tolist()) == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_outside_a_rank_must_be_named(state):
    with pytest.raises(RankError, match="holds the ranks 0, 1, 2, 3"):
        state.index("dp")
    assert state.index("dp", rank=3) == 1
    assert state.mesh.ranks.tolist() == [[0, 1], [2, 3]]


def test_the_scope_inside_is_the_callers(state):
    dm.init_parallel_state(tp_size=4, name="other")
    lifted = dm.shard_map(lambda x: x * dm.ops.axis_size("tp"), dm.P(), dm.P())
    assert dm.to_numpy(lifted(X))[1] == 2
    with dm.use_parallel_state("other"):
        assert dm.to_numpy(lifted(X))[1] == 4
        assert each_rank(dm.scope_name) == ["other"] * 4


def test_blocks_and_results_share_no_memory_with_anything(state):
    kept = {}

    def each(x):
        rank = dm.ops.axis_index("world")
        results = [dm.ops.all_gather(x, "dp"), dm.ops.broadcast(x, "dp", 1), dm.ops.all_reduce(x, "dp")]
        results += [dm.ops.shift(x, "dp"), dm.ops.take_block(x, "tp", 0), dm.ops.reduce_scatter(x, "tp")]
        results += [dm.ops.all_to_all(x, "tp", 0, 0)]
        before = [result.copy() for result in results]
        x += 100
        for result, was in zip(results, before, strict=True):
            np.testing.assert_array_equal(was, result)
            result += 1000 * (rank + 1)
        kept[rank] = (x, *results)
        return x

    given = X.copy()
    array = dm.distribute(given, dm.P())
    lifted = dm.shard_map(each, dm.P(), dm.P("world"))
    out = dm.to_numpy(lifted(array))
    assert out[0] == 100
    given += 5
    assert dm.to_numpy(array).tolist() == X.tolist()
    arrays = [array for arrays in kept.values() for array in arrays]
    for place, one in enumerate(arrays):
        assert not any(np.shares_memory(one, other) for other in arrays[:place])


def test_what_is_sent_is_a_copy_that_the_sender_cannot_change_any_more(state):
    def each(x):
        swapped = state.collectives._swap("any", x, "world")
        assert not any(np.shares_memory(x, block) for block in swapped)
        return x

    dm.shard_map(each, dm.P("world"), dm.P("world"))(X)


def test_reductions_run_in_index_order_every_time(state):
    parts = np.array([1e16, 1.0, -1e16, 1.0])
    lifted = dm.shard_map(lambda x: dm.ops.all_reduce(x, "world"), dm.P("world"), dm.P("world"))
    expected = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    for _ in range(20):
        assert dm.to_numpy(lifted(parts)).tolist() == [expected] * 4


def test_host_objects_travel_between_ranks_and_are_copies(state):
    def each():
        rank = state.own_rank()
        mine = {"rank": rank}
        dm.host.barrier()
        gathered = dm.host.all_gather(mine, "tp")
        gathered[0]["rank"] += 10
        return mine["rank"], [one["rank"] for one in gathered], dm.host.broadcast(mine, "dp", 1)["rank"]

    assert each_rank(each) == [(0, [10, 1], 2), (1, [10, 1], 3), (2, [12, 3], 2), (3, [12, 3], 3)]


def test_outside_the_process_speaks_for_every_index(state):
    assert dm.host.all_gather("x", "tp") == ["x", "x"]
    assert dm.host.broadcast("x", "tp") == "x"
    dm.host.barrier()


def test_token_mean_is_the_mean_over_all_ranks(state):
    def each(sums, counts):
        objective, value = dm.token_mean(sums[0], counts[0], "world")
        return objective[None], value[None]

    world = dm.P("world")
    objectives, values = dm.shard_map(each, world, world)(np.array([1.0, 2, 3, 4]), np.array([0, 1, 2, 2]))
    assert dm.to_numpy(objectives).tolist() == [0.0, 0.4, 0.6, 0.8]  # without tokens: nothing
    np.testing.assert_allclose(dm.to_numpy(values), 1.8, rtol=1e-15)


def test_gradients_of_trees_are_summed_over_the_axis(state):
    def each(x):
        return dm.sync_gradients({"w": x, "b": [x * 2]}, "tp")

    found = dm.shard_map(each, dm.P("world"), {"w": dm.P("world"), "b": [dm.P("world")]})(np.arange(4.0))
    assert dm.to_numpy(found["w"]).tolist() == [1, 1, 5, 5]
    assert dm.to_numpy(found["b"][0]).tolist() == [2, 2, 10, 10]


def test_there_is_no_autodiff(state):
    with pytest.raises(NotDifferentiableError, match=r"numpy has no autodiff\. Differentiate on 'torch' or 'jax'"):
        dm.value_and_grad(lambda x: x)(X)
    assert dm.remat(lambda x: x + 1)(1) == 2


@pytest.mark.parametrize(
    ("each", "specs", "error", "text"),
    [
        (lambda x: "word", dm.P(), ArrayTypeError, "no number"),
        (lambda x: x > 1, dm.P(partial="dp"), ArrayTypeError, "sums a bool"),
        (lambda x: x.sum(), dm.P("dp"), ShardingError, "0 dims"),
        (
            lambda x: x[: dm.ops.axis_index("world") + 1],
            dm.P("world"),
            ShapeError,
            r"float64\[1\], rank 1 float64\[2\]",
        ),
        (lambda x: (x,) * (1 + dm.ops.axis_index("dp")), dm.P(), ShapeError, "Every rank must return the same"),
    ],
)
def test_results_that_are_no_global_array_are_refused(state, each, specs, error, text):
    with pytest.raises(error, match=text):
        dm.shard_map(each, dm.P(), specs)(X)


def test_inputs_cannot_be_partial(state):
    with pytest.raises(ShardingError, match="is partial over dp"):
        dm.distribute(X, dm.P(partial="dp"))


def test_axes_names_the_axes_that_specs_may_split_over(state):
    lifted = dm.shard_map(lambda x: dm.ops.all_reduce(x, "dp"), dm.P("dp"), dm.P(), axes=("dp",))
    assert dm.to_numpy(lifted(X)).tolist() == [4, 6, 8, 10]
    with pytest.raises(ShardingError, match=r"splits over tp.*axes=\('dp',\)"):
        dm.shard_map(lambda x: x, dm.P("tp"), dm.P(), axes=("dp",))(X)


def test_arrays_of_other_ranks_are_refused(state):
    some = dm.init_parallel_state(tp_size=2, ranks=(0, 1), name="some")
    array = dm.distribute(X, dm.P(), state=some)
    with pytest.raises(ShardingError, match="lies on the ranks 0, 1"):
        dm.constrain(array, dm.P("dp"))


@pytest.mark.parametrize(
    ("asked", "error", "text"),
    [
        ({"world_size": 0}, SessionError, "world_size=0"),
        ({"world_size": 2, "local_devices": 3}, SessionError, "local_devices=3"),
        ({"rank": 0, "world_size": 2, "init_method": "tcp://127.0.0.1:1"}, SessionError, "launched in 2 processes"),
        ({"world_size": 2, "timeout_s": -1}, LaunchError, "timeout_s=-1"),
    ],
)
def test_worlds_that_cannot_be_simulated_are_refused_and_leave_none(asked, error, text):
    with pytest.raises(error, match=text), dm.session(backend="sim", **asked):
        pass
    with dm.session(backend="sim", world_size=3) as session:
        assert session.world_size == 3


def test_simulated_ranks_are_on_the_cpu(state):
    with pytest.raises(BackendError, match="device_type='cuda'"):
        dm.init_parallel_state(dp_size=4, name="there", device_type="cuda")


def test_agreement_errors_leave_the_state_usable(state):
    with pytest.raises(AgreementError):
        dm.shard_map(lambda x: x if state.own_rank() else dm.ops.all_reduce(x, "dp"), dm.P(), dm.P())(X)
    lifted = dm.shard_map(lambda x: dm.ops.all_reduce(x, "dp"), dm.P(), dm.P())
    assert dm.to_numpy(lifted(X)).tolist() == (2 * X).tolist()
