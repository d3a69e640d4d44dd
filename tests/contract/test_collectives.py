"""Every collective on every backend against numpy on the blocks of all ranks: the checks of `dualmesh.testing`."""

import warnings

import numpy as np
import pytest

from dualmesh.errors import DifferenceError
from dualmesh.testing import contract, inject
from dualmesh.testing.contract import cases
from dualmesh.testing.contract.checks import expected, transposed
from tests.contract.backends import BACKENDS, DIFFERENTIABLE, place, run


@pytest.mark.parametrize("world", contract.WORLDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_collective_gives_what_its_definition_gives(backend, world):
    contract.check_collectives(place(backend), world)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_dtype_travels_and_stays(backend):
    contract.check_dtypes(place(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_moving_collectives_keep_every_bit(backend):
    contract.check_bits(place(backend))


@pytest.mark.parametrize("world", [2, 6, 8])
@pytest.mark.parametrize("backend", DIFFERENTIABLE)
def test_every_gradient_is_the_exact_transpose(backend, world):
    contract.check_gradients(place(backend), world)


def test_a_backend_that_swaps_ranks_is_seen():
    def swapped(fn, *args, **settings):
        def broken(*args):
            from dualmesh.testing.contract.runs import opened

            opened(4)
            with inject("swap_ranks", verb="all_gather"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the suite opens the same state again
                return fn(*args)

        return run("sim", broken, *args, **settings)

    with pytest.raises(DifferenceError, match=r"(?s)contract: \d+ of \d+ cases:.*all_gather\('a', dim=0\)"):
        contract.check_collectives(swapped, 4)


def test_the_oracles_transposes_are_transposes():
    for case in cases.grid(6):
        if case.has_gradient and case.verb not in ("enter", "leave"):  # what these say of gradients is no transpose
            x, y = case.blocks(6), expected(6, case)
            d = cases.cotangent(case, y.shape)
            there, back = np.sum(d * y), np.sum(transposed(6, case, y.shape) * x)
            assert there == pytest.approx(back, rel=1e-12, abs=1e-9), str(case)
