"""Every collective on every backend against numpy on the blocks of all ranks."""

import numpy as np
import pytest

from tests.contract import cases, oracle, runs
from tests.contract.backends import BACKENDS, DIFFERENTIABLE, agreed, run

WORLDS = (1, 2, 3, 4, 6, 8)


def expected(world, case):
    return oracle.everywhere(oracle.forward, world, case.verb, case.axis, case.blocks(world), dict(case.settings))


def check(wanted, found, *, rtol):
    """Fail with every case whose result is not the oracle's, in value, shape or dtype."""
    wrong = []
    for case, value in wanted.items():
        got = found[case]
        if isinstance(got, str):
            wrong.append(f"{case}: {got}")
        elif got.dtype != value.dtype or got.shape != value.shape:
            wrong.append(f"{case}: {got.dtype}{got.shape}, expected {value.dtype}{value.shape}")
        elif not np.allclose(value, got, rtol=rtol, atol=rtol):
            wrong.append(f"{case}: {np.sum(~np.isclose(value, got, rtol=rtol, atol=rtol))} of {got.size} differ")
    if wrong:
        pytest.fail(f"{len(wrong)} of {len(wanted)} cases:\n" + "\n".join(wrong), pytrace=False)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_collective_gives_what_its_definition_gives(backend, world):
    some = cases.grid(world)
    found = agreed(run(backend, runs.collectives, world, some, world_size=world))
    check({case: expected(world, case) for case in some}, found, rtol=1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_dtype_travels_and_stays(backend):
    some = cases.dtypes()
    found = agreed(run(backend, runs.collectives, 4, some, world_size=4))
    check({case: expected(4, case) for case in some}, found, rtol=2e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_moving_collectives_keep_every_bit(backend):
    found = agreed(run(backend, runs.special_values, world_size=4))
    for verb, (sent, got) in found.items():
        assert sent.tobytes() == got.tobytes(), verb


@pytest.mark.parametrize("world", [2, 4, 6, 8])
@pytest.mark.parametrize("backend", DIFFERENTIABLE)
def test_every_gradient_is_the_exact_transpose(backend, world):
    some = [case for case in cases.grid(world) if case.has_gradient]
    shapes = {case: expected(world, case).shape for case in some}
    found = agreed(run(backend, runs.gradients, world, some, shapes, world_size=world))
    wanted = {case: transposed(world, case, shapes[case]) for case in some}
    check(wanted, found, rtol=1e-12)


def transposed(world, case, shape):
    weight = cases.cotangent(case, shape)
    return case.gradient(oracle.everywhere(oracle.backward, world, case.verb, case.axis, weight, dict(case.settings)))


def test_the_oracles_transposes_are_transposes():
    for case in cases.grid(6):
        if case.has_gradient:
            x, y = case.blocks(6), expected(6, case)
            d = cases.cotangent(case, y.shape)
            there, back = np.sum(d * y), np.sum(transposed(6, case, y.shape) * x)
            assert there == pytest.approx(back, rel=1e-12, abs=1e-9), str(case)
