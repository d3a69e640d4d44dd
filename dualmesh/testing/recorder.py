"""`record` and `replay`: keep what passes the taps of a run, and hold another run to it.

Taps are in `taps`; what a recording is, and how two are compared, in `recordings`.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dualmesh.backend.state import ParallelState
from dualmesh.errors import RecordingError
from dualmesh.ops import host
from dualmesh.runtime.scope import get_parallel_state
from dualmesh.testing.differences import Difference, refuse_differences
from dualmesh.testing.instruments import instruments_of
from dualmesh.testing.recordings import Entry, Recording, compare_recordings, load, refuse_taken, save
from dualmesh.testing.taps import watch


class Recorder:
    """Keeps what this process' ranks pass; callbacks may come from any thread."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._passed: Counter[tuple[str, str, int]] = Counter()
        self._lock = threading.Lock()

    def note(self, make: Callable[[int], Entry], name: str, kind: str, rank: int) -> None:
        """Keep a block."""
        with self._lock:
            self.entries.append(make(self._passed[name, kind, rank]))
            self._passed[name, kind, rank] += 1


class Replay:
    """What a replay found; empty until the block has ended."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.differences: list[Difference] = []


@contextmanager
def record(path: str | Path, *, state: ParallelState | None = None) -> Iterator[None]:
    """Keep what passes the taps while the block runs, in a folder at `path`. *Local*: one file per process.

    Also when the block raises. Compiled programs are traced anew inside, so that their taps are in them.

    Raises:
        RecordingError: The folder holds a recording already, or nothing passed a tap.
    """
    owner = get_parallel_state() if state is None else state
    folder, ranks = Path(path), owner.held_ranks
    refuse_taken(folder, ranks)
    with recorded(owner) as recorder:
        try:
            yield
        finally:
            instruments_of(owner.backend).finished()
            save(folder, owner.backend, owner.world.size, ranks, recorder.entries)
        _refuse_empty("record", recorder.entries)


@contextmanager
def replay(
    path: str | Path, *, rtol: float | None = None, check: bool = True, state: ParallelState | None = None
) -> Iterator[Replay]:
    """Run the block, and hold what passes its taps to a recording. *Collective over the state at the end.*

    The recording may be of another framework, topology, world size, process tree and machine.

    Args:
        path: The folder of the recording.
        rtol: See `difference`.
        check: Raise where something differs; otherwise it is only in the `differences` of what is yielded.
        state: A state over all ranks of the world; None: the ambient one.

    Raises:
        DifferenceError: It begins with the first difference: tap, element, rank, both values, ulps.
        RecordingError: There is no complete recording at `path`, or nothing passed a tap.
    """
    owner = get_parallel_state() if state is None else state
    report = Replay(load(path))
    with recorded(owner) as recorder:
        yield report
        instruments_of(owner.backend).finished()
    found = recorder.entries
    if owner.world.process_count > 1:
        found = [entry for entries in host.all_gather(recorder.entries, state=owner) for entry in entries]
    _refuse_empty("replay", found)  # of all processes: one that refused alone would leave the others waiting
    run = Recording(owner.backend, owner.world.size, found)
    report.differences = compare_recordings(report.recording, run, rtol=rtol)
    if check:
        refuse_differences(f"replay of {path}", report.differences)


@contextmanager
def recorded(owner: ParallelState) -> Iterator[Recorder]:
    """Keep what passes the taps while the block runs. *Local.*"""
    if watch.sink is not None:
        raise RecordingError("record: another recording or replay runs in this process. End it first.")
    recorder = Recorder()
    with instruments_of(owner.backend).retraced(("recorded",)):
        watch.sink = recorder
        try:
            yield recorder
        finally:
            watch.sink = None


def _refuse_empty(where: str, entries: Sequence[Entry]) -> None:
    if not entries:
        raise RecordingError(
            f"{where}: nothing passed a tap. Call dualmesh.testing.tap in the program; programs that were compiled "
            f"ahead of time are not traced anew."
        )
