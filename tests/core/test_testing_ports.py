"""Two programs of one model: whose parameter is whose, and that each fault on purpose is seen."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import ArgumentError, DifferenceError
from dualmesh.testing import FAULTS, ParamMap, Trained, compare_ports, inject, run_on, transforms

draw = np.random.default_rng(2)


X = draw.normal(size=(8, 4))


def port(step, transposed, wrong=0.0):
    """Return a program that takes two steps of gradient descent on sum((x w)^2)."""

    def run(params, x):
        from dualmesh.testing.instruments import instruments_of

        state = dm.get_parallel_state()
        (name,) = params
        w = dm.distribute(params[name], dm.P())
        x = dm.distribute(x, dm.P("dp_shard"))

        def objective(w, x):
            y = x @ (w.T if transposed else w)
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
    assert whats[:2] == ["loss of step 1", "linear.weight (jax: kernel) after the last step"]
    with pytest.raises(ArgumentError, match="no rule takes bias"):
        ports(params={"linear.weight": np.ones((3, 4)), "bias": np.ones(3)})


OPS = {
    "all_gather": lambda x: dm.ops.all_gather(x, "sp"),
    "all_reduce": lambda x: dm.ops.all_reduce(x, "sp"),
    "permute": lambda x: dm.ops.permute(x, "sp", [(0, 1), (1, 2), (2, 3), (3, 0)]),
    "enter": lambda x: dm.ops.enter(x, "sp") * (1.0 + dm.ops.axis_index("sp")),
}


def broken(fault, verb):
    """Return (value, gradient) of an op without and with a fault, in a program compiled before."""
    from dualmesh.testing.instruments import instruments_of

    state = dm.init_parallel_state(ulysses_size=4)
    x = dm.distribute(X, dm.P("sp"))

    def objective(x):
        y = OPS[verb](x)
        weights = (y * 0 + 1.0).cumsum(0) * (2.0 + dm.ops.axis_index("sp"))
        return dm.ops.all_reduce((y * y * weights).sum(), "world")

    run = instruments_of(state.backend).compiled(dm.value_and_grad(dm.shard_map(objective, dm.P("sp"), dm.P())))

    def measured():
        return tuple(dm.to_numpy(part) for part in run(x))

    right = measured()
    with inject(fault, verb=verb):
        wrong = measured()
    return right, wrong, measured()


CASES = [
    ("grad_times_size", "all_gather", False),
    ("grad_times_sp", "all_gather", False),
    ("grad_wrong_factor", "all_gather", False),
    ("grad_wrong_way", "permute", False),
    ("grad_not_summed", "enter", False),
    ("swap_ranks", "all_gather", True),
    ("drop_last_shard", "all_gather", True),
    ("mean_for_sum", "all_reduce", True),
]


@pytest.mark.parametrize(("fault", "verb", "changes_value"), CASES, ids=[case[0] for case in CASES])
def test_a_fault_breaks_what_it_says_and_nothing_stays_broken(fault, verb, changes_value):
    for place in ("torch", "jax_x64"):
        for right, wrong, after in run_on(place, broken, fault, verb, world_size=4):
            assert (abs(wrong[0] - right[0]) > 1e-6 * abs(right[0])) == changes_value, place
            assert np.abs(wrong[1] - right[1]).max() > 1e-6, place
            np.testing.assert_array_equal(after[1], right[1], err_msg=place)
            if fault in ("grad_times_size", "grad_times_sp"):
                np.testing.assert_allclose(wrong[1], 4 * right[1], rtol=1e-12)


def test_a_fault_that_breaks_nothing_is_an_error():
    def untouched():
        dm.init_parallel_state(ulysses_size=2)
        with inject("swap_ranks"):
            dm.shard_map(lambda x: dm.ops.all_reduce(x, "sp"), dm.P("sp"), dm.P())(X)

    with pytest.raises(ArgumentError, match="'swap_ranks' broke nothing"):
        run_on("sim", untouched, world_size=2)
    with pytest.raises(ArgumentError, match=r"no fault 'swap_rank'.*Did you mean 'swap_ranks'"):
        inject("swap_rank")
    with pytest.raises(ArgumentError, match="no state is registered"), inject("swap_ranks"):
        pass
    assert {case[0] for case in CASES} | {
        *("own_total", "wrappers_average", "gradients_averaged", "stale_maximum")
    } == set(FAULTS)
