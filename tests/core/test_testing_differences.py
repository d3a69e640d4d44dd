"""What makes two arrays, or two trees of them, differ, and how that is said."""

import re

import numpy as np
import pytest

from dualmesh.errors import ArgumentError, DifferenceError
from dualmesh.testing import assert_same, difference


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (np.float32([1.25]), np.float32([1.5]), r"element \(0,\), 1.25 \(expected\) and 1.5 \(found\), 2\^21 ulps"),
        (np.float64([[1.0, 2.0]]), np.float64([[1.0, np.nan]]), r"element \(0, 1\), .* no number of ulps"),
        (np.arange(3), np.array([0, 1, 3]), r"element \(2,\), 2 \(expected\) and 3 \(found\), 1 ulp;"),
        (np.zeros(3), np.zeros(4), r"shape \(3,\) \(expected\) and \(4,\) \(found\)"),
        (np.zeros(3), np.zeros(3, np.float32), r"dtype float64 \(expected\) and float32 \(found\)"),
        (np.array([1 + 2j]), np.array([1 + 3j]), r"2\^51 ulps"),
    ],
)
def test_what_differs_is_said(one, other, said):
    found = difference("w", one, other)
    assert found is not None
    assert re.search(said, str(found)), str(found)


def test_what_is_equal_is_not_different():
    same = np.array([np.nan, np.inf, -np.inf, 0.0, 1.0])
    assert difference("w", same, same.copy(), rtol=0) is None
    assert difference("w", np.array([0.0]), np.array([-0.0]), rtol=0) is None
    assert difference("w", np.array([1.0, 1e-13]), np.array([1.0, 0.0])) is None
    assert difference("w", np.array([1.0, 1e-13]), np.array([1.0, 0.0]), rtol=0).element == (1,)
    assert difference("w", np.array([1.0]), np.nextafter(np.array([1.0]), 2), rtol=0).ulps == 1


def test_what_is_no_number_is_refused():
    for one in ("1.0", None, [None, 1.0]):
        with pytest.raises(ArgumentError, match=r"difference: w is .*, no array of numbers"):
            difference("w", one, one)


def test_trees_are_the_same_in_every_array_or_the_first_that_differs_is_named_by_its_path():
    wanted = {"loss": 0.5, "layers": [np.arange(4.0), (np.float32([1, 2]),)], "none": None}
    found = {"loss": np.array(0.5), "layers": (np.arange(4.0), [np.float32([1, 2])])}
    assert_same("the step", wanted, found)
    assert_same("", 1.0, 1.0 + 1e-12)
    said = r"first difference: the step layers.0, element \(3,\), 3.0 \(numpy\) and 3.5 \(jax\), 2\^50 ulps"
    with pytest.raises(DifferenceError, match=said) as caught:
        assert_same(
            *("the step", wanted, {"loss": 0.5, "layers": [np.array([0, 1, 2, 3.5]), [np.ones(2)]]}),
            places=("numpy", "jax"),
        )
    assert [one.what for one in caught.value.differences] == ["the step layers.0", "the step layers.1.0"]
    with pytest.raises(DifferenceError, match=r"w, 1.0 \(expected\) and 1.0\d* \(found\), 1 ulp"):
        assert_same("w", 1.0, np.nextafter(1.0, 2), rtol=0)


def test_trees_with_other_arrays_differ_and_trees_without_any_are_refused():
    with pytest.raises(DifferenceError, match=r"ranks: \['0', '1'\] \(expected\) and \['1'\] \(found\)"):
        assert_same("ranks", {0: 1.0, 1: 2.0}, {1: 2.0})
    for one, other in (({}, {}), (None, []), ([None], {"a": ()})):
        with pytest.raises(ArgumentError, match="assert_same: blocks: neither side holds an array"):
            assert_same("blocks", one, other)
