"""What a test must leave as it found it: registry, scope, the frameworks' ambient states, worlds, threads.

As pytest fixtures these are in `fixtures`.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from dualmesh import discovery, scope
from dualmesh.registry import registry
from dualmesh.testing.differences import Difference, refuse_differences
from dualmesh.testing.instruments import instruments_of
from dualmesh.testing.taps import watch

# How long threads may take to end after what started them has returned.
THREADS_END_IN_S = 2.0


@contextmanager
def left_as_found() -> Iterator[None]:
    """Check that a block, or a decorated function, leaves nothing behind, and tidy what dualmesh can. *Local.*

    Checked are: registered names; the scope and the default state; worlds that run; recordings and faults; what each
    backend in use shows (JAX's mesh and contexts, torch's process groups); threads.

    Raises:
        DifferenceError: Something is not as it was; each thing is named with what it was and what it is.

    >>> import dualmesh as dm
    >>> with left_as_found(), dm.session(backend="sim", world_size=2):
    ...     state = dm.init_parallel_state(dp_size=2)
    """
    before, threads = standing(), set(threading.enumerate())
    yield
    after = standing()
    running = _still_running(threads)
    if after["names"] != before["names"]:
        scope.close_all()
        registry.drop([state for state in registry.states() if not set(state.names) & set(_names(before))])
    wrong = [
        Difference(name, ("before", "after"), said=f"was {before.get(name)!r}, is {value!r}")
        for name, value in after.items()
        if name in before and value != before[name]
    ]
    wrong += [Difference("threads", ("before", "after"), said=f"{running} still run")] if running else []
    refuse_differences("left_as_found", wrong)


def _names(before: dict[str, object]) -> list[str]:
    names = before["names"]
    return names if isinstance(names, list) else []


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
    }
    for name in discovery.loaded():
        found |= {f"{name}: {what}": value for what, value in instruments_of(name).leftovers().items()}
    return found


def _still_running(before: set[threading.Thread]) -> list[str]:
    """Return the threads of dualmesh and the user that run beyond those of before, once they had time to end."""
    deadline = time.monotonic() + THREADS_END_IN_S
    while True:
        new = [thread for thread in set(threading.enumerate()) - before if _counts(thread)]
        if not new or time.monotonic() > deadline:
            return sorted(thread.name for thread in new)
        time.sleep(0.01)


def _counts(thread: threading.Thread) -> bool:
    return not thread.daemon or thread.name.startswith("rank ")
