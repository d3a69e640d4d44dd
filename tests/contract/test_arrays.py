"""Arrays laid over ranks, on every backend, against slices of the global numpy array."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.testing import contract
from dualmesh.testing.contract import laid_out
from tests.contract.backends import BACKENDS, place, run


@pytest.mark.parametrize("world", [1, 2, 4, 6, 8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_arrays_come_back_as_they_went_and_each_rank_holds_its_slice(backend, world):
    contract.check_arrays(place(backend), world)


@pytest.mark.parametrize(
    ("size", "settings", "offset"),
    [(2, {"ranks": (0, 1)}, 0), (2, {"ranks": (3, 1)}, 0), (3, {"ranks": (2, 0, 3)}, 0), (2, {}, 2), (3, {}, 1)],
    ids=str,
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_of_some_ranks_holds_its_blocks_in_the_listed_order(backend, size, settings, offset):
    whole = np.arange(12.0)
    found = run(backend, laid_out.subset, size, settings, offset, whole, world_size=4)
    values = [value for is_member, value in found if is_member]
    assert len(values) == (size if backend == "torch" else 1)
    for value in values:
        assert np.array_equal(np.tile(whole, size), value)


@pytest.mark.parametrize("alignment", [0, 16])
@pytest.mark.parametrize("spec", [dm.P("dp"), dm.P()], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "int8", "complex64", "bool", "float64"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_array_is_a_copy_of_what_it_was_made_of_wherever_that_lies(backend, dtype, spec, alignment):
    """Filling a loader's buffer anew changes no batch that was made of it, nor does writing to what came back."""
    for found in run(backend, laid_out.refilled, 4, dtype, spec, alignment, world_size=4):
        for how, (value, expected) in found.items():
            np.testing.assert_array_equal(value, expected, err_msg=how)
