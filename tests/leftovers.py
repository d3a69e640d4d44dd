"""A fixture for tests that run sim worlds in pytest's own process: they leave it as they found it."""

import sys
import threading
import time

import pytest

from dualmesh import discovery


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    """No world and no rank's thread outlives a test, and no framework was imported."""
    yield
    assert [name for name, backend in discovery.loaded().items() if backend.world() is not None] == []
    assert [name for name in ("torch", "jax") if name in sys.modules] == []
    assert _threads_after(2.0) == []


def _threads_after(limit_s):
    """Return the rank threads that still run once they had time to end."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        running = [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")]
        if not running:
            break
        time.sleep(0.01)
    return running
