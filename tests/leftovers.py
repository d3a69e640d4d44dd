"""A fixture for tests that run sim worlds in pytest's own process: they leave it as they found it."""

import sys

import pytest

from dualmesh.testing.leftovers import left_as_found


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    """Nothing outlives a test, and no framework was imported."""
    with left_as_found():
        yield
    assert [name for name in ("torch", "jax") if name in sys.modules] == []
