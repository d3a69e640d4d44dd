"""Uses of a store within a deadline: its own requests wait for ever where the process that holds it is frozen.

A socket's timeout would do, but torch gives none to a store's client; so a thread asks, and is left behind in the one
case in which it never returns. Asked in one thread, several requests cost one.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
PATIENCE_S = 1.0
"""How long the process that holds a store may take for a request, beside what the request itself waits for."""


class SilentStoreError(RuntimeError):
    """The store did not answer in time."""


def within(seconds: float, ask: Callable[[], T]) -> T:
    """Return what a function of the store returns, or refuse to wait longer. *Local*, with a timeout.

    Raises:
        SilentStoreError: It did not return in time.
    """
    found: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            found.append((True, ask()))
        except BaseException as error:  # raised where it is waited for
            found.append((False, error))

    asking = threading.Thread(target=run, name="dualmesh asks the store", daemon=True)
    asking.start()
    asking.join(seconds)
    if not found:
        raise SilentStoreError(f"it did not answer within {seconds:g} s")
    is_answer, value = found[0]
    if not is_answer:
        raise value
    answer: T = value
    return answer
