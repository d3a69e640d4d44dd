"""A recording: what passed the taps of a run, as files that hold numbers and text only, and how two are compared.

What fills a recording is in `taps`; starting and ending one is in `recorder`. A recording is a folder with one .npz
file per process: the blocks, and an index as JSON text. Nothing in it is executed when it is read.
"""

import json
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dualmesh._support.optional_imports import np
from dualmesh.errors import RecordingError, counted, listed
from dualmesh.testing.differences import Difference, difference, largest

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMAT = "dualmesh recording 2"


class Key(NamedTuple):
    """Which passing of which tap."""

    occurrence: int
    kind: str
    """value or gradient."""
    name: str

    def __str__(self) -> str:
        times = f", time {self.occurrence + 1}" if self.occurrence else ""
        return f"{self.name}{', gradient' * (self.kind == 'gradient')}{times}"


@dataclass(frozen=True)
class Entry:
    """One rank's block at one tap."""

    name: str
    kind: str
    occurrence: int
    order: int
    """When the tap was met, among all taps of this process."""
    rank: int
    start: tuple[int, ...]
    """Where the block begins in the global array."""
    shape: tuple[int, ...]
    """The global shape."""
    part: int
    """Blocks of one place and part are the same; the parts of a place are summed."""
    together: tuple[int, ...]
    """The ranks that pass the tap with this one."""
    dtype: str
    block: "NDArray[Any]" = field(repr=False)

    @property
    def key(self) -> Key:
        """Which passing of which tap."""
        return Key(self.occurrence, self.kind, self.name)


class Recording:
    """What passed the taps of one run on all of its ranks."""

    def __init__(self, backend: str, world_size: int, entries: Iterable[Entry]) -> None:
        self.backend = backend
        self.world_size = world_size
        self.entries: dict[Key, list[Entry]] = {}
        for entry in sorted(entries, key=lambda entry: (entry.order, entry.rank)):
            self.entries.setdefault(entry.key, []).append(entry)

    def keys(self) -> list[Key]:
        """Return every passing in the order of the run: step by step, values first, gradients as backward meets them.

        *Pure.*
        """
        first = {key: entries[0].order for key, entries in self.entries.items()}
        return sorted(first, key=lambda key: (key.occurrence, key.kind == "gradient", first[key]))

    def missing(self, key: Key) -> tuple[int, ...]:
        """Return the ranks that should have passed a tap and did not, rising. *Pure.*"""
        entries = self.entries[key]
        wanted = {rank for group in {entry.together for entry in entries} for rank in group}
        return tuple(sorted(wanted - {entry.rank for entry in entries}))

    def blocks(self, key: Key) -> list[Entry]:
        """Return one entry per rank with the parts of each place summed. *Pure.*"""
        entries = self.entries[key]
        if len({entry.part for entry in entries}) == 1:
            return entries
        parts: dict[tuple[int, ...], dict[int, NDArray[Any]]] = {}
        for entry in entries:
            parts.setdefault(entry.start, {}).setdefault(entry.part, entry.block)
        sums = {start: np.sum([found[part] for part in sorted(found)], axis=0) for start, found in parts.items()}
        return [replace(entry, part=0, block=sums[entry.start]) for entry in entries]

    def whole(self, key: Key) -> "NDArray[Any]":
        """Return the global array of a passing; of blocks that should be equal the lowest rank's counts. *Pure.*

        Raises:
            RecordingError: Ranks did not pass the tap, or no rank holds some of the elements.
        """
        blocks, missing = self.blocks(key), self.missing(key)
        whole = np.zeros(blocks[0].shape, blocks[0].block.dtype)
        is_held = np.zeros(whole.shape, bool)
        for entry in sorted(blocks, key=lambda entry: -entry.rank):
            whole[_cut(entry)], is_held[_cut(entry)] = entry.block, True
        if missing or not is_held.all():
            why = (
                _describe_unpassed(missing, self.backend)
                if missing
                else f"{int((~is_held).sum())} elements are on no rank"
            )
            raise RecordingError(f"Recording: {key} is not whole: {why}.", key=key, ranks=missing)
        return whole

    def __repr__(self) -> str:
        names = {key.name for key in self.entries}
        return f"<Recording of {counted(len(names), 'tap')} on {self.backend}, world_size={self.world_size}>"


def _describe(entry: Entry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in Entry.__dataclass_fields__ if name != "block"}


def _cut(entry: Entry) -> tuple[slice, ...]:
    return tuple(slice(i, i + size) for i, size in zip(entry.start, entry.block.shape, strict=True))


def compare_recordings(wanted: Recording, found: Recording, *, rtol: float | None = None) -> list[Difference]:
    """Return what differs between two runs, in the order of the first; they may have other worlds and frameworks.

    *Pure.* Every rank's block in `found` is held to the global array of `wanted`, so a replica that went its own way is
    found too, and ranks that did not pass a tap are named. Gradients are compared where both runs have any.
    """
    gradients = all(any(key.kind == "gradient" for key in one.entries) for one in (wanted, found))
    wrong: list[Difference] = []
    own = [key for key in found.keys() if key not in wanted.entries]
    for key in [*wanted.keys(), *own]:
        if key.kind == "gradient" and not gradients:
            continue
        if key not in found.entries or key not in wanted.entries:
            wrong.append(_unmet(key, wanted, found))
        elif wanted.missing(key) or found.missing(key):
            wrong += [
                _describe_missing(key, one, (wanted.backend, found.backend))
                for one in (wanted, found)
                if one.missing(key)
            ]
        else:
            wrong += _first_of(key, wanted, found, rtol)
    return wrong


def _unmet(key: Key, wanted: Recording, found: Recording) -> Difference:
    times = [sum(other[1:] == key[1:] for other in one.entries) for one in (wanted, found)]
    said = f"passed {counted(times[0], 'time')} on {wanted.backend}, {counted(times[1], 'time')} on {found.backend}"
    return Difference(str(key), (wanted.backend, found.backend), said=said)


def _describe_missing(key: Key, run: Recording, places: tuple[str, str]) -> Difference:
    ranks = run.missing(key)
    return Difference(str(key), places, ranks=ranks, said=_describe_unpassed(ranks, run.backend))


def _describe_unpassed(ranks: Sequence[int], backend: str) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks)} did not pass it on {backend}"


def _first_of(key: Key, wanted: Recording, found: Recording, rtol: float | None) -> list[Difference]:
    """Return the first rank whose block is not what the other run has there, and how many ranks there are."""
    whole, blocks = wanted.whole(key), found.blocks(key)
    places = (wanted.backend, found.backend)
    if whole.shape != blocks[0].shape:
        said = f"shape {whole.shape} ({places[0]}) and {blocks[0].shape} ({places[1]}) differ"
        return [Difference(str(key), places, said=said)]
    scale = largest(whole)
    wrong = []
    for entry in sorted(blocks, key=lambda entry: entry.rank):
        settings: dict[str, Any] = {"rtol": rtol, "ranks": lambda _, rank=entry.rank: (rank,), "scale": scale}
        part = whole[_cut(entry)]
        one = difference(str(key), part, entry.block, places=places, offset=entry.start, **settings)
        wrong += [one] if one is not None else []
    if not wrong:
        return []
    first = wrong[0]
    ranks = f"{len(wrong)} of {len(blocks)} ranks differ" if len(blocks) > 1 else ""
    return [replace(first, said="; ".join(filter(None, (first.said, ranks))))]


# -- files ---------------------------------------------------------------------------------------------------------


def file_of(path: Path, ranks: Sequence[int]) -> Path:
    """Return the file of the process that holds some ranks. *Pure.*"""
    return path / f"rank{min(ranks)}.npz"


def refuse_taken(path: Path, ranks: Sequence[int]) -> None:
    """Refuse a folder that holds a recording of this process already. *Local.*

    Raises:
        RecordingError: It does.
    """
    if file_of(path, ranks).exists():
        raise RecordingError(
            f"record: {path} holds a recording already. Delete it, or choose another path.", path=str(path)
        )


def save(path: Path, backend: str, world_size: int, ranks: Sequence[int], entries: Sequence[Entry]) -> None:
    """Write what one process recorded. *Local.*"""
    path.mkdir(parents=True, exist_ok=True)
    groups = list(dict.fromkeys(entry.together for entry in entries))
    numbers = {group: number for number, group in enumerate(groups)}
    index = {
        "format": FORMAT,
        "backend": backend,
        "world_size": world_size,
        "ranks": list(ranks),
        "groups": groups,
        "entries": [{**_describe(entry), "together": numbers[entry.together]} for entry in entries],
    }
    arrays = {f"block{number}": entry.block for number, entry in enumerate(entries)}
    text = np.frombuffer(json.dumps(index).encode(), dtype=np.uint8)
    with file_of(path, ranks).open("xb") as file:
        np.savez(file, allow_pickle=False, **{"index": text, **arrays})


def load(path: str | Path) -> Recording:
    """Read a recording. *Local.* Nothing in it is executed: arrays of numbers and JSON text are all it may hold.

    Raises:
        RecordingError: There is none, it is of another format, or files of some ranks are missing.
    """
    files = sorted(Path(path).glob("rank*.npz"))
    if not files:
        raise RecordingError(
            f"replay: there is no recording at {path}: no rank*.npz. Record one first.", path=str(path)
        )
    read = [_read_file(file) for file in files]
    first = read[0][0]
    ranks = sorted(rank for index, _ in read for rank in index["ranks"])
    if any(index["world_size"] != first["world_size"] for index, _ in read) or ranks != list(
        range(first["world_size"])
    ):
        raise RecordingError(
            f"replay: {path} has files of the ranks {listed(ranks)}, of worlds of "
            f"{listed(sorted({index['world_size'] for index, _ in read}))} ranks. A recording has one file of every "
            f"process of one run: copy all of them, and nothing else, to one folder.",
            path=str(path),
        )
    return Recording(first["backend"], first["world_size"], [entry for _, entries in read for entry in entries])


def _read_file(file: Path) -> tuple[Mapping[str, Any], list[Entry]]:
    try:
        with np.load(file, allow_pickle=False) as held:
            index = json.loads(held["index"].tobytes().decode())
            if index["format"] != FORMAT:
                raise RecordingError(f"replay: {file} is {index['format']!r}. This version reads {FORMAT!r}.")
            groups = [tuple(group) for group in index["groups"]]
            entries = [_entry(one, groups, held[f"block{number}"]) for number, one in enumerate(index["entries"])]
    except (OSError, ValueError, LookupError, TypeError, zipfile.BadZipFile) as error:
        if isinstance(error, RecordingError):
            raise
        raise RecordingError(f"replay: {file} is no recording: {error}", path=str(file)) from error
    return index, entries


def _entry(index: Mapping[str, Any], groups: Sequence[tuple[int, ...]], block: "NDArray[Any]") -> Entry:
    fields = {"start": tuple(index["start"]), "shape": tuple(index["shape"]), "together": groups[index["together"]]}
    entry = Entry(**{**index, **fields}, block=block)
    sides = list(zip(entry.start, block.shape, entry.shape, strict=True))
    if any(start < 0 or start + size > whole for start, size, whole in sides):
        raise ValueError(f"a block of shape {block.shape} at {entry.start} lies outside {entry.shape}")
    return entry
