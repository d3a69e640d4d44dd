"""pytest fixtures: import them in a conftest.py, or name this module in `pytest_plugins`.

What they check is in `leftovers`, what they run on in `places`. The only module of dualmesh that imports pytest.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dualmesh.runtime.launch import session
from dualmesh.runtime.session import Session
from dualmesh.testing.leftovers import left_as_found
from dualmesh.testing.places import run_on


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fail where the test leaves registry, scope, contexts, groups, worlds or threads other than it found them.

    For every test of a folder: `pytestmark = pytest.mark.usefixtures("nothing_left")`, or an autouse fixture that
    takes it. A fixture of yours that opens a world or registers states takes it too: pytest then begins it before, and
    ends it after.
    """
    with left_as_found():
        yield


@pytest.fixture
def sim_session(nothing_left: None) -> Iterator[Session]:
    """A world of 8 simulated ranks, open during the test, which must leave nothing beside it."""
    with session(backend="sim", world_size=8) as opened:
        yield opened


@pytest.fixture(params=["sim", "torch", "jax_x64"])
def everywhere(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """`everywhere(fn, *args, world_size=4)`: the test runs once per place; see `dualmesh.testing.run_on`."""

    def run(fn: Callable[..., Any], *args: Any, **settings: Any) -> list[Any]:
        return run_on(request.param, fn, *args, **settings)

    return run
