"""What `async_=True` returns: a collective under way, whose result `wait` gives.

What is under way, and for how long, is in the backends.
"""

from abc import ABC, abstractmethod
from typing import Any


class Pending(ABC):
    """A collective that was started; its result exists after `wait`."""

    @abstractmethod
    def wait(self) -> Any:
        """Return the result, once it is there; again the same. *Local*: the collective was joined when it started."""


class Finished(Pending):
    """A result that is there already: where nothing moves, or where the framework schedules by itself."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def wait(self) -> Any:
        return self._result
