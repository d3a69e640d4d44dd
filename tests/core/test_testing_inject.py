"""Faults on purpose: each breaks what it says where it is asked to, and nothing stays broken."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import ArgumentError
from dualmesh.testing import FAULTS, inject, run_on, tap

X = np.random.default_rng(2).normal(size=(8, 4))


OPS = {
    "all_gather": lambda x: dm.ops.all_gather(x, "sp"),
    "all_reduce": lambda x: dm.ops.all_reduce(x, "sp"),
    "permute": lambda x: dm.ops.permute(x, "sp", [(0, 1), (1, 2), (2, 3), (3, 0)]),
    "shift": lambda x: dm.ops.shift(x, "sp"),
    "enter": lambda x: dm.ops.enter(x, "sp") * (1.0 + dm.ops.axis_index("sp")),
}


def all_broken():
    """Return, by fault and op, (value, gradient) without it, with it, and after it, in a program compiled before."""
    state = dm.init_parallel_state(ulysses_size=4)
    return {(fault, verb): broken(state, fault, verb) for fault, verb, _ in CASES}


def broken(state, fault, verb):
    from dualmesh.testing.instruments import instruments_of

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
    ("grad_wrong_way", "shift", False),
    ("grad_not_summed", "enter", False),
    ("swap_ranks", "all_gather", True),
    ("drop_last_shard", "all_gather", True),
    ("mean_for_sum", "all_reduce", True),
]


@pytest.fixture(scope="module")
def measured():
    """What all faults did, by place."""
    return {place: run_on(place, all_broken, world_size=4, timeout_s=240) for place in ("torch", "jax_x64")}


@pytest.mark.parametrize(("fault", "verb", "changes_value"), CASES)
def test_a_fault_breaks_what_it_says_and_nothing_stays_broken(measured, fault, verb, changes_value):
    for place, ranks in measured.items():
        for right, wrong, after in (found[fault, verb] for found in ranks):
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


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("own_total", {"verb": "all_reduce"}, r"'own_total' breaks no collective, not 'all_reduce'"),
        ("swap_ranks", {"verb": "all_reduce"}, r"breaks the collectives all_gather, .*, not 'all_reduce'"),
        ("stale_maximum", {"axis": "cp"}, r"breaks what names no axis. Leave axis='cp' out"),
        ("wrappers_average", {"axis": "dp"}, r"breaks what names no axis"),
    ],
)
def test_a_setting_that_a_fault_has_not_is_refused(name, settings, said):
    with pytest.raises(ArgumentError, match=said):
        inject(name, **settings)


def means(**settings):
    """Return two means over tokens, one behind each of two taps, under a fault."""
    dm.init_parallel_state(dp_size=2, tp_size=2)

    def each(x):
        tap("first", x)
        one = dm.token_mean(x.sum(), x.shape[0] + dm.ops.axis_index("dp"), "dp")[1]
        tap("second", x)
        return one, dm.token_mean(x.sum(), x.shape[0] + dm.ops.axis_index("dp"))[1]

    lifted = dm.shard_map(each, dm.P("dp"), dm.P())
    with inject("own_total", **settings):
        return tuple(float(dm.to_numpy(one)) for one in lifted(np.arange(8.0)))


def test_a_wrong_function_is_wrong_only_where_it_is_asked_for():
    right, wrong = 28 / 9, 6 / 4 + 22 / 5
    for settings, wanted in (
        ({}, (wrong, wrong)),
        ({"after": "first"}, (wrong, right)),
        ({"after": "second"}, (right, wrong)),
        ({"axis": "dp", "after": "first"}, (wrong, right)),
    ):
        (found,) = run_on("sim", lambda settings=settings: means(**settings), world_size=4)
        np.testing.assert_allclose(found, wanted, rtol=1e-12, err_msg=str(settings))
    for settings in ({"axis": "tp"}, {"after": "third"}):
        with pytest.raises(ArgumentError, match=r"'own_total' broke nothing.*(over 'tp'|the tap 'third')"):
            run_on("sim", lambda settings=settings: means(**settings), world_size=4)


def test_every_fault_is_seen_by_a_test():
    """The other four, which break functions and no collective, are in the example and in tests/invariance."""
    others = {"own_total", "wrappers_average", "gradients_averaged", "stale_maximum"}
    assert {case[0] for case in CASES} | others == set(FAULTS)
