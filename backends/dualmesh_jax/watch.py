"""Programs that several processes run together: compared beforehand in debug mode, and never waited for without end.

JAX runs such a program until all processes are in it, however long that takes. The watch asks, after a while, who is
in it too; where somebody is not, nothing can bring the program to an end but the end of the process, which it says why.
Python objects between processes are in `host`, with a timeout of their own.
"""

# mypy: allow-untyped-calls
# jax leaves some of its public functions unannotated.
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from dualmesh._support import waits
from dualmesh.errors import DualmeshError, GroupTimeoutError, LostPeerError, listed
from dualmesh.runtime.agreement import Matter, agree, roll_call
from dualmesh.runtime.debug import call_site, switch
from dualmesh_jax import private
from dualmesh_jax.agreement import NOUNS
from dualmesh_jax.private import is_ready, primal_of
from dualmesh_jax.store import JaxStore

if TYPE_CHECKING:
    from dualmesh_jax.state import JaxState

EXIT_CODE = 70
"""What a process ends with that waits for processes which do not come."""
ROLL_CALL_S = 1.0
CHECK_S = 0.3
"""How often a process that waits looks whether another has failed: the roll call then finds both."""
_LEAST_PAUSE_S, _MOST_PAUSE_S = 20e-6, 2e-3
"""How long `wait_for` sleeps between two looks: a short program is not made long, a long one is not disturbed."""
_CURE = "Call the same programs in every process, in the same order, on arrays of equal shapes and dtypes."
ENDED = (
    "dualmesh: {where} has waited for {limit:g} s, and {missing} not in it:{words}\nJAX cannot give up such a wait, so "
    "this process ends (exit code {code}). {cure} DUALMESH_DEBUG=1 makes this an error before anything is sent; "
    "timeout_s of dm.init_distributed, or DUALMESH_TIMEOUT_S, say how long to wait.\n"
)


def run_together(state: "JaxState", what: str, program: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Return `program(*args)`, which all processes of a state run. *Collective over them.*

    Raises:
        AgreementError: Debug mode, and another process runs something else.
        GroupTimeoutError: Debug mode, and a process does not come; or JAX gave up waiting.
        LostPeerError: A process died.
    """
    store, processes = state.store, state.processes
    if store is None or len(processes) == 1:
        return program(*args)
    said = f"{state.common_label}: {what} of {_describe_arguments(args)}"
    if switch.on:
        _compare(store, state, what, said, processes)
    with _Waiting(store, processes, said) as number:
        return run_named(state, what, program, args, number)


def run_named(
    state: "JaxState", what: str, program: Callable[..., Any], args: Sequence[Any], number: int | None = None
) -> Any:
    """Return `program(*args)`; where processes of a state fail in it together, say so in dualmesh's words.

    *Collective over the state where the program is.* Nothing is compared, and nobody is waited for.

    Args:
        number: Which of the programs of these processes it is, where they count it.

    Raises:
        GroupTimeoutError: JAX gave up waiting.
        LostPeerError: A process died.
    """
    store = state.store
    if store is None or len(state.processes) == 1:
        return program(*args)
    failures = None if number is None else f"failed in/{'-'.join(map(str, state.processes))}/{number}"
    try:
        result = program(*args)
        if switch.on or state.device_type == "cpu":
            wait_for(result, lambda: _raise_if_refused(store, failures))
        return result
    except (jax.errors.JaxRuntimeError, ValueError, _FailedElsewhereError) as error:
        _refuse_failure(store, state, what, error, failures)
        raise


class _FailedElsewhereError(RuntimeError):
    """Another process could not run a program to its end, so this one waits in vain."""


def _raise_if_refused(store: JaxStore, failures: str | None) -> None:
    told = None if failures is None else store.find(failures)
    if told is not None:
        raise _FailedElsewhereError(told)


def wait_for(result: Any, check: Callable[[], None]) -> None:
    """Return once the arrays of a result are there; raise as soon as one of this process' devices failed. *Local.*

    Gloo's failures would show where the result is read, which the user's code does. Where a peer died, the device that
    exchanges with it fails at once, and the other devices of this process wait for that one without end: so they are
    not waited for in their order, but in that in which they get ready. A process may have no device that exchanges
    with the dead one: from time to time it checks what the others say.
    """
    values = map(primal_of, jax.tree.leaves(result))
    arrays = [x for x in values if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)]
    waiting = [shard.data for x in arrays for shard in x.addressable_shards]
    pause_s, checked = _LEAST_PAUSE_S, time.monotonic()
    while waiting:
        still = []
        for x in waiting:
            if is_ready(x):
                x.block_until_ready()
            else:
                still.append(x)
        if len(still) == len(waiting):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)
            if time.monotonic() - checked > CHECK_S:
                check()
                checked = time.monotonic()
        waiting = still


def _compare(store: JaxStore, state: "JaxState", what: str, said: str, processes: tuple[int, ...]) -> None:
    matter = Matter(
        f"debug mode, {what} in processes {listed(processes)}",
        *(processes, store.process, said),
        beside=f", at {call_site('jax')}",
        topic="/programs",
        is_traced=True,
        nouns=NOUNS,
        undone="Nothing was sent.",
        cure=_CURE,
    )
    agree(store, matter, waits.timeout_s())


def _refuse_failure(
    store: JaxStore, state: "JaxState", what: str, error: Exception, failures: str | None = None
) -> None:
    """Say in dualmesh's words that processes could not exchange something; return where that was not the reason."""
    processes, is_told = state.processes, isinstance(error, _FailedElsewhereError)
    if isinstance(error, DualmeshError) or not (is_told or private.is_lost_exchange(error)):
        return
    words: dict[int, str] = {}
    try:
        if failures is not None and not is_told:
            store.set(failures, f"process {store.process} failed: {str(error).splitlines()[0]}")
        words = roll_call(store, f"failed/{listed(processes)}", processes, store.process, what, ROLL_CALL_S)
    except jax.errors.JaxRuntimeError:  # the store's process has died
        words = {}
    silent = [process for process in processes if process not in words]
    told = f" No word from {NOUNS[len(silent) != 1]} {listed(silent)}." if words and silent else ""
    kind = GroupTimeoutError if private.is_timeout(error) else LostPeerError
    raise kind(
        f"{what}: {state.common_label}: processes {listed(processes)} (ranks {listed(state.members)}) could not run it "
        f"together; in process {store.process}: {str(error).splitlines()[0]}.{told} A process died, left, or did not "
        f"call it. JAX ends the others by itself in about two minutes: end them, and start the world anew.",
        state=state,
        ranks=state.members,
        processes=processes,
        silent=tuple(silent),
    ) from error


def _describe_arguments(args: Sequence[Any]) -> str:
    """Say what must be equal of arguments in all processes."""
    leaves = [x for x in jax.tree.leaves(args) if isinstance(x, jax.Array | np.ndarray | np.generic)]
    return listed((f"{x.dtype}{list(np.shape(x))}" for x in leaves), limit=50)


@dataclass
class _Entry:
    """A program that this process is in."""

    number: int
    processes: tuple[int, ...]
    said: str
    site: str
    since: float = field(default_factory=time.monotonic)
    is_told: bool = False


class Watch:
    """Looks after the programs that this process is in, from a thread of its own. One per store."""

    def __init__(self, store: JaxStore, end: Callable[[str], None] | None = None) -> None:
        self._store = store
        self._end = end or _end_process
        self._entries: dict[int, _Entry] = {}
        self._numbers: dict[tuple[int, ...], int] = {}
        self._serial = itertools.count()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def enter(self, processes: tuple[int, ...], said: str) -> tuple[int, int]:
        """Note that this process enters a program; return what `leave` takes, and its number in common. *Local.*"""
        with self._lock:
            number = self._numbers[processes] = self._numbers.get(processes, 0) + 1
            serial = next(self._serial)
            self._entries[serial] = _Entry(number, processes, said, call_site("jax"))
            if self._thread is None:
                self._thread = threading.Thread(target=self._look_after, name="dualmesh watch", daemon=True)
                self._thread.start()
        return serial, number

    def leave(self, serial: int) -> None:
        """Note that it has left it. *Local.*"""
        with self._lock:
            del self._entries[serial]

    @property
    def _pause_s(self) -> float:
        return min(1.0, self._store.wait_s / 4)

    def _look_after(self) -> None:
        """Look at what this process is in, until it is in nothing."""
        while True:
            time.sleep(self._pause_s)
            with self._lock:
                entries = list(self._entries.values())
                if not entries:
                    self._thread = None
                    return
            for entry in entries:
                self._look_at(entry)

    def _look_at(self, entry: _Entry) -> None:
        """Tell the others of a program that takes its time; ask who is in it when the time is over."""
        age = time.monotonic() - entry.since
        place = f"dualmesh/in/{'-'.join(map(str, entry.processes))}"
        try:
            if not entry.is_told and age > self._pause_s:
                entry.is_told = True
                self._store.set(f"{place}/{self._store.process}", f"{entry.number}: {entry.said}, at {entry.site}")
            if age > self._store.wait_s + 2 * self._pause_s:
                self._ask(entry, place)
        except jax.errors.JaxRuntimeError as error:
            if age > self._store.wait_s:
                self._end(_ended(entry, self._store.wait_s, (), f"\n  the store does not answer: {error}"))

    def _ask(self, entry: _Entry, place: str) -> None:
        found = {process: self._store.find(f"{place}/{process}") for process in entry.processes}
        mine = f"{entry.number}: {entry.said},"
        away = [process for process, said in found.items() if said is None or not said.startswith(mine)]
        if not away:
            entry.since, entry.is_told = time.monotonic(), False
        elif entry in self._entries.values():
            words = "".join(
                f"\n  process {process}: {'nothing, or in its own code' if said is None else said.partition(': ')[2]}"
                for process, said in found.items()
            )
            self._end(_ended(entry, self._store.wait_s, away, words))


def _ended(entry: _Entry, limit: float, away: Sequence[int], words: str) -> str:
    missing = f"{NOUNS[len(away) != 1]} {listed(away)} {'is' if len(away) == 1 else 'are'}"
    where = f"{entry.said}, at {entry.site},"
    return ENDED.format(where=where, limit=limit, missing=missing, words=words, code=EXIT_CODE, cure=_CURE)


def _end_process(message: str) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.write(2, message.encode())
    os._exit(EXIT_CODE)


class _Waiting:
    """A block in which this process is in a program with others."""

    def __init__(self, store: JaxStore, processes: tuple[int, ...], said: str) -> None:
        if store.watch is None:
            store.watch = Watch(store)
        self._watch: Watch = store.watch
        self._processes = processes
        self._said = said

    def __enter__(self) -> int:
        self._serial, number = self._watch.enter(self._processes, self._said)
        return number

    def __exit__(self, *_: object) -> None:
        self._watch.leave(self._serial)
