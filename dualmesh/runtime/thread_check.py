"""Reading the ambient state in a thread that entered no scope, where several topologies are registered.

Which state is ambient is in `scope`.
"""

import threading

from dualmesh._support.warn import caution
from dualmesh.errors import ScopeError
from dualmesh.runtime.registry import registry

UNSCOPED = (
    "get_parallel_state: the thread {thread!r} entered no scope, and {count} topologies are registered. It gets the "
    "default, {name!r}, whatever is ambient in the thread that started it. Carry the scope there with dm.bind(fn), or "
    "enter one."
)


class WarningGiven:
    """Whether the one warning was given."""

    once = False


class _Thread(threading.local):
    """Whether this is a thread that somebody started, and may have forgotten to carry the scope to.

    Not so in threads of the frameworks' own, which Python knows as dummies, and in simulated ranks.
    """

    def __init__(self) -> None:
        thread = threading.current_thread()
        self.is_started = thread is not threading.main_thread() and not thread.name.startswith("Dummy-")


this_thread = _Thread()


def check_thread(name: str) -> None:
    """Warn, once, a started thread that it gets the default among several topologies; strict: refuse. *Local.*

    Raises:
        ScopeError: Strict mode.
    """
    if not this_thread.is_started or (WarningGiven.once and not registry.strict):
        return
    count = len({state.topology for state in registry.states()})
    message = UNSCOPED.format(thread=threading.current_thread().name, count=count, name=name)
    if registry.strict:
        raise ScopeError(message, count=count)
    WarningGiven.once = True
    caution(message)
