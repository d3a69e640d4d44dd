"""Two programs of one model: taps, losses, gradients and parameters are compared."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import ArgumentError, DifferenceError
from dualmesh.testing import ParamMap, Trained, compare_ports, tap, transforms

draw = np.random.default_rng(2)


X = draw.normal(size=(8, 4))


def port(step, transposed, wrong=0.0, silent=()):
    """Return a program that takes two steps of gradient descent on sum((x w)^2); some ranks pass no tap."""

    def run(params, x):
        from dualmesh.testing.instruments import instruments_of

        state = dm.get_parallel_state()
        (name,) = params
        w = dm.distribute(params[name], dm.P())
        x = dm.distribute(x, dm.P("dp_shard"))

        def objective(w, x):
            y = x @ (w.T if transposed else w)
            index = dm.ops.axis_index("world")
            y = y if isinstance(index, int) and index in silent else tap("product", y, dm.P("dp_shard"))
            return dm.ops.all_reduce((y * y).sum(), "dp_shard")

        lifted = dm.shard_map(objective, (dm.P(), dm.P("dp_shard")), dm.P())
        losses, first = [], None
        for _ in range(2):
            loss, gradient = instruments_of(state.backend).compiled(dm.value_and_grad(lifted))(w, x)
            losses.append(loss)
            first = gradient if first is None else first
            w = w - (step + wrong) * gradient
        return Trained(losses, {name: first}, {name: w})

    return run


def ports(**changed):
    settings = {
        "torch": port(0.01, True),
        "jax": port(0.01, False),
        "params": {"linear.weight": draw.normal(size=(3, 4))},
        "param_map": ParamMap([("linear.weight", "kernel", transforms.transpose())]),
        "inputs": X,
        "topology": dm.parallel_spec(dp_shard_size=2),
    }
    return compare_ports(**{**settings, **changed})


def test_two_programs_of_one_model_are_equal_and_a_wrong_step_is_named():
    trained = ports()
    assert trained["torch"].losses[1] < trained["torch"].losses[0]
    assert trained["jax"].parameters["kernel"].shape == (4, 3)
    with pytest.raises(DifferenceError) as caught:
        ports(jax=port(0.01, False, wrong=1e-4))
    whats = [one.what for one in caught.value.differences]
    assert whats[0] == "product, time 2"
    assert whats[-2:] == ["loss of step 1", "linear.weight (jax: kernel) after the last step"]
    with pytest.raises(ArgumentError, match="no rule takes bias"):
        ports(params={"linear.weight": np.ones((3, 4)), "bias": np.ones(3)})


@pytest.mark.parametrize("silent", [(1,), (0, 1)])
def test_a_rank_of_a_port_that_passes_no_tap_is_named(silent):
    with pytest.raises(DifferenceError) as caught:
        ports(torch=port(0.01, True, silent=silent))
    said = "rank 1 did not pass it on torch" if silent == (1,) else "passed 2 times on jax, 0 times on torch"
    assert f"first difference: product: {said}" in str(caught.value)


def nothing(params, x):
    return Trained([])


def test_ports_that_return_nothing_are_refused():
    with pytest.raises(ArgumentError, match="both ports returned no loss, gradient or parameter"):
        ports(torch=nothing, jax=nothing)
