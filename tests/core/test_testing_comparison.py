"""One function in many places: values, gradients and shardings are compared, and what differs is said."""

import os
import re

import numpy as np
import pytest
from absl.testing import parameterized

import dualmesh as dm
from dualmesh.errors import ArgumentError, DifferenceError, DualmeshError, WorkerError
from dualmesh.testing import (
    PLACES,
    absl_cases,
    compare_places,
    place_of,
    run_on,
    splits,
)
from dualmesh.testing.fixtures import everywhere as everywhere
from dualmesh.testing.fixtures import nothing_left as nothing_left
from dualmesh.testing.fixtures import sim_session as sim_session
from dualmesh.testing.leftovers import left_as_found

X = np.random.default_rng(5).normal(size=(8, 4))
W = np.random.default_rng(6).normal(size=(4, 8))
IN, OUT = (dm.P("dp_shard"), dm.P(None, "tp")), (dm.P("dp_shard", "tp"), dm.P())


def layer(x, w):
    """Return the product and the sum of its squares over all ranks."""
    from array_api_compat import array_namespace

    y = x @ w
    return y, dm.ops.all_reduce(array_namespace(y).sum(y * y), ("dp_shard", "tp"))


def apart(x, w):
    """As `layer`, but in torch the element that is largest there is off by a quarter on rank 2."""
    y, total = layer(x, w)
    state = dm.get_parallel_state()
    if state.backend == "torch" and state.index("world") == 2:
        y = y + (y == y.max()) * 0.25
    return y, total


@pytest.mark.parametrize("topology", splits(4, ("dp_shard", "tp")).values(), ids=splits(4, ("dp_shard", "tp")))
def test_one_function_is_the_same_everywhere_and_as_numpy_has_it(topology):
    y = X @ W
    found = compare_places(layer, [X, W], IN, OUT, topology, wrt=(0, 1), expected=(y, np.sum(y * y)))
    np.testing.assert_array_equal(found["values"]["0"], y)
    assert {path: array.shape for path, array in found["gradients"].items()} == {"input 0": (8, 4), "input 1": (4, 8)}


def test_a_difference_names_place_element_rank_values_and_ulps():
    topology = dm.parallel_spec(dp_shard_size=2, tp_size=2)
    y = X @ W
    row, column = np.unravel_index(np.argmax(y[4:, :4]), (4, 4))
    row += 4
    value = y[row, column]
    with pytest.raises(DifferenceError) as caught:
        compare_places(apart, [X, W], IN, OUT, topology, places=["sim", "torch"], expected=(y, np.sum(y * y)))
    said = str(caught.value)
    assert f"compare_places: first difference: 0, element ({row}, {column}), rank 2, {value} (expected)" in said
    assert f"and {value + 0.25} (torch)" in said
    assert re.search(r"ulps; 1 of 64 elements differ", said)


def test_a_wrong_gradient_behind_right_values_is_found():
    def wrong(x, w):
        from dualmesh.testing import inject

        if dm.get_parallel_state().backend != "torch":
            return layer(x, w)
        with inject("grad_times_size", axis="tp"):
            return layer(x, dm.ops.enter(w, "tp"))

    topology = dm.parallel_spec(dp_shard_size=2, tp_size=2)
    with pytest.raises((DifferenceError, WorkerError)) as caught:
        compare_places(wrong, [X, W], IN, OUT, topology, places=["jax_x64", "torch"], wrt=(0, 1))
    assert "gradient of input 1" in str(caught.value)


def replica_of(x):
    """Return the input, off by a quarter in one element on rank 3, whose copy rank 1 holds."""
    from array_api_compat import array_namespace

    xp = array_namespace(x)
    is_wrong = (xp.arange(x.shape[0]) == 2)[:, None] & (xp.arange(x.shape[1]) == 1)
    return x + is_wrong * (dm.ops.axis_index("world") == 3) * 0.25


@pytest.mark.parametrize("place", ["sim", "jax_x64"])
def test_a_copy_that_went_its_own_way_is_found_also_where_one_process_holds_all(place):
    topology = dm.parallel_spec(dp_shard_size=2, tp_size=2)
    spec = dm.P("tp")
    with pytest.raises(DifferenceError, match=r"element \(6, 1\)") as caught:
        compare_places(replica_of, [X], spec, spec, topology, places=[place], expected=X)
    (one,) = caught.value.differences
    assert (one.what, one.places, one.values) == ("the result", ("rank 1", "rank 3"), (X[6, 1], X[6, 1] + 0.25))
    assert "both ranks hold this element" in str(one)


def test_a_copy_that_went_its_own_way_is_found_among_processes():
    topology = dm.parallel_spec(dp_shard_size=2, tp_size=2)
    with pytest.raises(DifferenceError, match=r"element \(6, 1\), ranks 1, 3"):
        compare_places(replica_of, [X], dm.P("tp"), dm.P("tp"), topology, places=["torch"], expected=X)


def summed_twice(x):
    return dm.ops.all_reduce(x, "tp")


def test_gradients_are_held_to_numpys_too():
    def pullback(weight):
        return [np.tile(weight, (2, 1))]

    topology, settings = dm.parallel_spec(tp_size=2), {"wrt": [0], "expected": X[:4] + X[4:]}
    for place in ("jax_x64", "torch"):
        found = compare_places(
            summed_twice, [X], dm.P("tp"), dm.P(), topology, places=[place], pullback=pullback, **settings
        )
        assert found["gradients"]["input 0"].shape == (8, 4)
    with pytest.raises(DifferenceError, match=r"first difference: gradient of input 0, element \(0, 0\), rank 0"):
        compare_places(
            summed_twice,
            *([X], dm.P("tp"), dm.P(), topology),
            places=["jax_x64"],
            pullback=lambda weight: [2 * np.tile(weight, (2, 1))],
            **settings,
        )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"places": []}, "no place to compare values with"),
        ({"places": ["sim"]}, "one place and nothing to compare values with"),
        ({"places": ["sim"], "expected": X[:4] + X[4:], "wrt": [0]}, r"wrt=\(0,\).*only no place computes any"),
        ({"places": ["sim", "jax_x64"], "wrt": [0]}, r"only jax computes any.*pullback="),
        ({"wrt": [1]}, r"wrt=\[1\]. Give different positions of inputs, 0..0"),
        ({"wrt": [0, 0]}, r"wrt=\[0, 0\]. Give different positions"),
        ({"wrt": [0], "inputs": [np.arange(8)]}, r"input 0 holds int64, which has no gradient"),
        ({"wrt": [0], "pullback": lambda weight: [weight]}, r"pullback= needs expected= and wrt="),
        ({"wrt": [0], "expected": X, "pullback": lambda w: []}, r"returned 0 gradients for wrt=\(0,\)"),
        ({"topology": dm.RankGroups([[0, 1]])}, r"leaves the number of ranks open. Give world_size="),
        ({"inputs": 3}, r"inputs is 3"),
        ({"in_specs": [dm.P("tp")] * 2, "places": ["sim", "torch"]}, r"in_specs: the specs"),
        ({"fn": lambda x: None, "places": ["sim", "torch"]}, r"fn returned None, no array"),
    ],
)
def test_where_nothing_would_be_compared_or_asked_wrongly_it_is_refused(settings, said):
    asked = {"inputs": [X], "in_specs": dm.P("tp"), "out_specs": dm.P(), "topology": dm.parallel_spec(tp_size=2)}
    with pytest.raises(DualmeshError, match=said):
        compare_places(**{"fn": summed_twice, **asked, **settings})


def members_only(x):
    return dm.ops.shift(x, "group") * 2


def test_a_function_runs_over_rank_groups_and_some_ranks_of_the_world():
    x = np.arange(8.0)
    compare_places(
        members_only,
        *([x], dm.P("world"), dm.P("world"), dm.RankGroups([[1, 0], [2, 3]])),
        ranks=(4, 1, 3, 0),
        world_size=5,
        expected=2 * x[[2, 3, 0, 1, 6, 7, 4, 5]],
    )


def test_a_place_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(ArgumentError, match=r"no place 'jx'. Places: sim, torch, jax, jax_x64.*Did you mean 'jax'"):
        run_on("jx", int, world_size=1)
    assert place_of("jax", env=dict(PLACES["jax"].env)).pool() is PLACES["jax"].pool()


def test_a_worker_that_raises_brings_its_error_and_closures_travel():
    base = 10

    def fails():
        dm.init_parallel_state(dp_size=2)
        raise KeyError(base + dm.get_parallel_state().size("dp"))

    with pytest.raises(WorkerError, match="KeyError: 12") as caught:
        run_on("jax_x64", fails, world_size=2)
    assert caught.value.errors[0].args == (12,)


def test_workers_start_once_and_serve_all_tests():
    first = run_on("jax_x64", os.getpid, world_size=2)
    assert run_on("jax_x64", os.getpid, world_size=4) == first
    assert first != [os.getpid()]


def test_what_a_test_leaves_behind_is_named_and_tidied():
    opened = []

    @left_as_found()
    def leave():
        opened.append(dm.init_distributed("sim", world_size=2))
        dm.init_parallel_state(dp_size=2)

    with pytest.raises(DifferenceError, match=r"(?s)names: was \[\], is \['base'\].*worlds: was \[\], is \['sim'\]"):
        leave()
    opened[0].close()
    with left_as_found():
        pass


def left_in_a_worker():
    """Leave a scope open, as a test would by mistake; return what is said."""
    state = dm.init_parallel_state(dp_size=2)
    scope = dm.use_parallel_state(dm.init_parallel_state(tp_size=2, name="other"))
    try:
        with left_as_found():
            scope.__enter__()
    except DifferenceError as error:
        return str(error), state.label
    finally:
        scope.__exit__(None, None, None)
    return None


def test_contexts_of_a_framework_count_as_left_behind():
    for place in ("torch", "jax_x64"):
        for said, _ in run_on(place, left_in_a_worker, world_size=2):
            assert "first difference: scope: was None, is 'other'" in said
            assert ("jax: JAX ambient state: was" in said) == (place == "jax_x64")


def mesh_left():
    """Leave a mesh set, in a block during which the backend is first used; return what is said."""
    import jax

    from dualmesh.backend import discovery

    known, block = discovery.loaded, left_as_found()
    discovery.loaded = dict
    try:
        block.__enter__()
    finally:
        discovery.loaded = known
    try:
        with jax.set_mesh(jax.make_mesh((2,), ("rows",))):
            block.__exit__(None, None, None)
    except DifferenceError as error:
        return str(error)
    return None


def group_left():
    """Leave a process group of one's own in the world; return what is said."""
    import torch.distributed as dist

    made = []
    try:
        with left_as_found():
            made.append(dist.new_group([0, 1]))
    except DifferenceError as error:
        return str(error)
    finally:
        dist.destroy_process_group(made[0])
    return None


def test_a_mesh_or_a_group_that_is_left_is_named():
    (said,) = run_on("jax_x64", mesh_left, world_size=2)
    assert "jax: JAX mesh: was (), is (('rows', 2),)" in said
    for said in run_on("torch", group_left, world_size=2):
        assert "first difference: torch: torch process groups: was ('" in said


def test_fixtures_run_a_test_once_per_place_and_watch_what_it_leaves(everywhere, nothing_left):
    found = everywhere(lambda: dm.init_parallel_state(tp_size=2).size("tp"), world_size=2)
    assert set(found) == {2}


def test_a_fixture_opens_a_simulated_world(sim_session):
    assert sim_session.world_size == 8
    assert dm.init_parallel_state(dp_size=8).backend == "sim"


class AbslCases(parameterized.TestCase):
    """The same through absl.testing, as JAX's own tests are written."""

    @parameterized.named_parameters(*absl_cases(splits(4, ("dp_shard", "tp"))))
    def test_topologies(self, topology):
        y = X @ W
        compare_places(layer, [X, W], IN, OUT, topology, places=["sim"], expected=(y, np.sum(y * y)))


def test_splits_are_all_of_a_world():
    assert list(splits(4, ("dp_shard", "tp"))) == ["tp4", "dp_shard2_tp2", "dp_shard4"]
    assert len(splits(8)) == 35
    with pytest.raises(ArgumentError, match="axis 'ep'"):
        splits(4, ("ep",))
