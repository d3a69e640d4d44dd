"""What a test must leave as it found it: registry, scope, the frameworks' ambient states, worlds, threads.

As pytest fixtures these are in `fixtures`.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dualmesh.backend import discovery
from dualmesh.runtime import scope
from dualmesh.runtime.debug import switch
from dualmesh.runtime.registry import registry
from dualmesh.testing.differences import Difference, refuse_differences
from dualmesh.testing.instruments import instruments_of
from dualmesh.testing.taps import watch

# How long threads may take to end after what started them has returned.
THREADS_END_IN_S = 2.0
# Threads that serve until the process ends, whoever is first to need them: of debuggers and progress bars, and those
# that other languages bring (Python calls them Dummy).
LIFELONG = ("Dummy-", "pydevd", "tqdm")


@contextmanager
def left_as_found() -> Iterator[None]:
    """Check that a block, or a decorated function, leaves nothing behind, and tidy what dualmesh can. *Local.*

    Checked are: registered names; the scope and the default state; worlds that run; recordings and faults; what each
    backend in use shows (JAX's mesh and contexts, torch's process groups), also one that is first used inside; threads.

    Raises:
        DifferenceError: Something is not as it was; each thing is named with what it was and what it is.

    >>> import dualmesh as dm
    >>> with left_as_found(), dm.session(backend="sim", world_size=2):
    ...     state = dm.init_parallel_state(dp_size=2)
    """
    before: dict[str, Any] = standing()
    threads = set(threading.enumerate())
    yield
    after = standing()
    for name in discovery.loaded():
        if name not in before["backends"]:
            before |= _of_backend(name, instruments_of(name).untouched())
    running = _still_running(threads)
    if after["names"] != before["names"]:
        scope.close_all()
        registry.drop([state for state in registry.states() if not set(state.names) & set(before["names"])])
    wrong = [
        Difference(name, ("before", "after"), said=f"was {before.get(name)!r}, is {value!r}")
        for name, value in after.items()
        if name != "backends" and name in before and value != before[name]
    ]
    wrong += [Difference("threads", ("before", "after"), said=f"{running} still run")] if running else []
    refuse_differences("left_as_found", wrong)


def standing() -> dict[str, object]:
    """Return what there is now, by what it is. *Local.*"""
    default, here = scope.default_state(), scope.current_scope()
    found: dict[str, object] = {
        "names": registry.names(),
        "scope": None if here is None else here.name,
        "default state": None if default is None else default.label,
        "worlds": sorted(name for name, backend in discovery.loaded().items() if backend.world() is not None),
        "recording": watch.sink is not None,
        "faults": watch.faults,
        "debug mode": switch.on,
        "backends": list(discovery.loaded()),
    }
    for name in discovery.loaded():
        found |= _of_backend(name, instruments_of(name).leftovers())
    return found


def _of_backend(name: str, found: dict[str, object]) -> dict[str, object]:
    return {f"{name}: {what}": value for what, value in found.items()}


def _still_running(before: set[threading.Thread]) -> list[str]:
    """Return the threads that run beyond those of before, once they had time to end."""
    deadline = time.monotonic() + THREADS_END_IN_S
    while True:
        new = [one for one in set(threading.enumerate()) - before if not one.name.startswith(LIFELONG)]
        if not new or time.monotonic() > deadline:
            return sorted(thread.name for thread in new)
        time.sleep(0.01)
