"""What every test must leave as it found it."""

import threading

import pytest
from hypothesis import settings

from dualmesh import scope
from dualmesh.registry import registry

# Machines that run other work too are slow now and then; that is no fault of the code.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.fixture(autouse=True)
def _left_as_found():
    """Check registry, scope and threads after every test."""
    before = set(threading.enumerate())
    yield
    left = {"names": registry.names(), "scope": scope.current_scope(), "default": scope.default_state()}
    threads = [thread.name for thread in set(threading.enumerate()) - before if not thread.daemon]
    scope.close_all()
    registry.drop(registry.states())
    assert left == {"names": [], "scope": None, "default": None}
    assert threads == []


@pytest.fixture
def world():
    """Return a simulated world of 8 ranks, open during the test."""
    import dualmesh as dm

    with dm.session(backend="sim", world_size=8) as session:
        yield session
