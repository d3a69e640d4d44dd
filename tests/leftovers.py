"""A fixture for tests that run sim worlds in pytest's own process: they leave it as they found it."""

import sys

import pytest

from dualmesh.testing.leftovers import left_as_found


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    """Nothing outlives a test, and no framework was imported."""
    before = set(sys.modules)
    with left_as_found():
        yield
    assert {"torch", "jax"} & (set(sys.modules) - before) == set()
