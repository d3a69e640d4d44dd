"""Debug mode: whether collectives are checked before they run, and where in the user's code they were called.

How ranks compare is in `agreement`; what of a collective is compared, the backends say.
"""

import inspect
from types import TracebackType

from dualmesh._support.checks import check_flag, is_switched_on

DEBUG_VARIABLE = "DUALMESH_DEBUG"


class Switch:
    """Whether debug mode is on, for every thread of this process."""

    __slots__ = ("on",)

    def __init__(self) -> None:
        self.on = is_switched_on(DEBUG_VARIABLE)


switch = Switch()


class debug:
    """Check every collective before it runs, from here on or while a block runs. *Local*; do it on every rank.

    The ranks of a group compare state, axis, operation, shape and dtype through the store in which they met, so each
    collective waits for all of its ranks. Different ones, another order, or a rank that does not come within
    DUALMESH_TIMEOUT_S (60 s) are an error on every rank, which names the lines of code on both sides. DUALMESH_DEBUG=1
    turns it on from the start. Not seen are collectives in compiled code and those of other libraries.

    Args:
        on: True, or False to turn it off.

    Raises:
        ArgumentError: `on` is no bool.

    >>> with debug():
    ...     switch.on
    True
    >>> switch.on
    False
    """

    def __init__(self, on: bool = True) -> None:
        self._before = switch.on
        switch.on = check_flag("debug", "on", on)

    def __enter__(self) -> None:
        """Leave it as it was set."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        switch.on = self._before


def call_site(*skipped: str) -> str:
    """Return the innermost line of code that is not dualmesh's, "file:line in function". *Local.*

    Args:
        skipped: Further packages whose lines are passed over.
    """
    frame = inspect.currentframe()
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if not package.startswith("dualmesh") and package not in skipped:
            code = frame.f_code
            return f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}"
        frame = frame.f_back
    return "a thread without code of the user's"
