"""What every test must leave as it found it."""

import pytest
from hypothesis import settings

from dualmesh.testing.leftovers import left_as_found

# Machines that run other work too are slow now and then; that is no fault of the code.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.fixture(autouse=True)
def _left_as_found():
    """Check registry, scope, worlds and threads after every test."""
    with left_as_found():
        yield


@pytest.fixture
def world():
    """Return a simulated world of 8 ranks, open during the test."""
    import dualmesh as dm

    with dm.session(backend="sim", world_size=8) as session:
        yield session


@pytest.fixture
def no_framework(monkeypatch):
    """Scopes as in a process that loaded no framework, also where an earlier test did: JAX refuses some of them."""
    monkeypatch.setattr("dualmesh.runtime.scope._mirrors", ())
