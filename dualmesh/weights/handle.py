"""`TransferHandle`: a send or a receive that other work overlaps with.

What is sent and received is in `link`.
"""

import threading
from collections.abc import Callable
from typing import Any


class TransferHandle:
    """One send or receive, to be started and waited for; other work may run in between."""

    def __init__(self, begin: Callable[[], Callable[[], Any]], end: Callable[[Any], Any]) -> None:
        self._begin, self._end = begin, end
        self._thread: threading.Thread | None = None
        self._found: Any = None
        self._error: BaseException | None = None

    def start(self) -> "TransferHandle":
        """Copy what is to be sent, and begin. *Local.*"""
        work = self._begin()

        def run() -> None:
            try:
                self._found = work()
            except BaseException as error:  # raised where it is waited for
                self._error = error

        self._thread = threading.Thread(target=run, name="dualmesh transfer", daemon=True)
        self._thread.start()
        return self

    def wait(self) -> Any:
        """Return once it is done: the version. *Collective with the other side*, with a timeout."""
        if self._thread is None:
            self.start()
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self._end(self._found)
