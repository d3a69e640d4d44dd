"""Lifted functions: value and gradient are those of the dense function, in numpy float64."""

import numpy as np
import pytest

from dualmesh import P
from tests.contract import lifted
from tests.contract.backends import BACKENDS, DIFFERENTIABLE, agreed, run

random = np.random.default_rng(7)
X, W, B = (random.standard_normal(shape) for shape in ((8, 3), (3, 4), (4,)))
PARAMS = {"up": random.standard_normal((3, 6)), "down": (random.standard_normal((6, 5)), random.standard_normal(5))}
TARGET = random.standard_normal((8, 5))


def dense_mixed(x, w, b):
    hidden = np.tanh(x @ w)
    total = hidden.sum(0)
    z = total * b
    d_hidden = np.broadcast_to(2 * z * b, hidden.shape) * (1 - hidden**2)
    return np.sum(z * z), (d_hidden @ w.T, x.T @ d_hidden, 2 * z * total)


def dense_perceptron(params, x, target):
    down, bias = params["down"]
    hidden = np.tanh(x @ params["up"])
    y = hidden @ down + bias
    d_y = 2 * (y - target)
    d_hidden = d_y @ down.T * (1 - hidden**2)
    grads = {"up": x.T @ d_hidden, "down": (hidden.T @ d_y, d_y.sum(0))}
    return y, np.sum((y - target) ** 2), (grads, d_hidden @ params["up"].T)


def assert_close(wanted, found):
    if isinstance(wanted, dict):
        assert wanted.keys() == found.keys()
        wanted, found = list(wanted.values()), [found[key] for key in wanted]
    if isinstance(wanted, list | tuple):
        assert len(wanted) == len(found)
        for one, other in zip(wanted, found, strict=True):
            assert_close(one, other)
    else:
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fn", ["mixed", "reduced_twice"])
@pytest.mark.parametrize("backend", DIFFERENTIABLE)
def test_gradients_of_replicated_and_split_inputs_are_the_dense_ones(backend, fn):
    found = agreed(run(backend, lifted.run_scalar, fn, (X, W, B), world_size=4))
    assert_close(dense_mixed(X, W, B), found)


@pytest.mark.parametrize("fn", ["mixed", "reduced_twice"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_values_of_replicated_and_split_inputs_are_the_dense_ones(backend, fn):
    assert_close(dense_mixed(X, W, B)[0], agreed(run(backend, lifted.run_scalar_value, fn, (X, W, B), world_size=4)))


@pytest.mark.parametrize("backend", DIFFERENTIABLE)
def test_gradients_flow_through_two_lifted_functions_and_nested_parameters(backend):
    found = agreed(run(backend, lifted.run_perceptron, PARAMS, X, TARGET, world_size=4))
    assert_close(dense_perceptron(PARAMS, X, TARGET), found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_flow_through_two_lifted_functions_and_nested_parameters(backend):
    found = agreed(run(backend, lifted.run_perceptron_value, PARAMS, X, TARGET, world_size=4))
    assert_close(dense_perceptron(PARAMS, X, TARGET)[:2], found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nested_specs_follow_nested_arguments_and_partial_results_are_summed(backend):
    found = agreed(run(backend, lifted.run_nested, X, world_size=4))
    assert_close({"out": (X * 2, (X + 1,)), "sum": X[:4] + X[4:]}, found)


@pytest.mark.parametrize("backend", DIFFERENTIABLE)
def test_gradients_of_a_partial_result_are_the_dense_ones(backend):
    w = X[0] + 2
    found = agreed(run(backend, lifted.run_partial, X, w, world_size=4))
    assert_close((np.sum(X * X * w), (2 * X * w, np.sum(X * X, axis=0))), found)


@pytest.mark.parametrize("backend", DIFFERENTIABLE)
def test_gradients_arrive_through_every_kind_of_spec(backend):
    whole, weight = (random.standard_normal((8, 16)) for _ in range(2))
    specs = [P("a", "b"), P(("c", "a"), "b"), P(("c", "b", "a")), P("ca", "b"), P(None, "world"), P("narrow", "wide")]
    found = agreed(run(backend, lifted.run_through_specs, 8, whole, weight, specs, world_size=8))
    assert_close([weight] * len(specs), found)


@pytest.mark.parametrize("backend", DIFFERENTIABLE)
def test_recomputed_activations_give_the_dense_gradients(backend):
    assert_close(dense_mixed(X, W, B), agreed(run(backend, lifted.run_remat, (X, W, B), world_size=4)))


@pytest.mark.parametrize("backend", DIFFERENTIABLE)
def test_token_mean_is_the_mean_over_all_ranks_and_so_is_its_gradient(backend):
    mask = (np.arange(8) % 3 != 0).astype(float)
    mean = np.sum(X[:, 0] * mask) / mask.sum()
    found = agreed(run(backend, lifted.run_token_mean, X[:, 0], mask, np.array([2.5]), world_size=4))
    assert_close((2.5 * mean, 2.5 * mean, np.array([mean])), found)


@pytest.mark.parametrize("kept", [range(8), range(4), ()], ids=["all", "one rank's", "none"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_token_mean_counts_ranks_without_tokens_as_nothing(backend, kept):
    mask = np.isin(np.arange(8), list(kept)).astype(float)
    wanted = np.sum(X[:, 0] * mask) / max(mask.sum(), 1)
    assert_close(wanted, agreed(run(backend, lifted.run_token_mean_value, X[:, 0], mask, world_size=4)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_states_over_the_same_ranks_meet_in_one_lifted_function(backend):
    x = np.arange(4.0)
    found = agreed(run(backend, lifted.run_two_states, x, world_size=4))
    assert_close((np.array([0, 1, 0, 1, 2, 3, 2, 3.0]), np.roll(x, 1), np.full(4, 2.0), np.full(4, 9.0)), found)


@pytest.mark.parametrize("backend", DIFFERENTIABLE)
def test_a_spec_that_leaves_out_an_axis_of_its_argument_is_warned_of_where_it_is_called(backend):
    for spec, messages, files, value in agreed(run(backend, lifted.run_forgotten, world_size=4)):
        np.testing.assert_array_equal(value, np.arange(16.0).reshape(4, 4))
        gone = {repr(P(None, "b")): "a", repr(P()): "a, b"}.get(spec)
        assert len(messages) == (gone is not None)
        if gone is not None:
            assert f"an argument of shape (4, 4) is split over {gone}, which {spec} leaves out" in messages[0]
            assert files == {True}


@pytest.mark.parametrize("backend", ["sim", "torch", "jax"])
def test_a_function_runs_in_the_state_that_is_given(backend):
    value = np.arange(8.0)
    for found, seen, scope in run(backend, lifted.in_a_given_state, value, world_size=4):
        wanted = [140.0] if backend == "sim" else [140.0, 140.0, 2 * value, 140.0, 2 * value]
        assert_close(wanted, found)
        assert seen == {4}
        assert scope == "thinker"
