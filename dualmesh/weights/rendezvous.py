"""Rooms in which processes wait for each other: who is here, who is missing, when a generation begins.

Who keeps rooms, and how processes reach them, is in `store`.
"""

import itertools
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dualmesh._support.channel import Channel
from dualmesh.errors import listed

Place = tuple[str, int]
"""A side of a group, "" where it has one only, and a process of that side."""

_MOST_NAMED = 256


@dataclass(eq=False)
class Entry:
    """One process that wants a place in the next generation, or has one in the current."""

    side: str
    place: int
    count: int
    sides: tuple[str, ...]
    said: Any
    host: str
    channel: Channel
    answer: dict[str, Any] | None = None
    answered: threading.Event = field(default_factory=threading.Event)

    def tell(self, **answer: Any) -> None:
        """Give it the answer that it waits for."""
        self.answer = answer
        self.answered.set()

    @property
    def key(self) -> Place:
        """Its side and place."""
        return self.side, self.place


@dataclass
class Rendezvous:
    """Who waits for the next generation of a group, and who makes up the current one."""

    generation: int = 0
    waiting: dict[Place, Entry] = field(default_factory=dict)
    members: dict[Place, Entry] = field(default_factory=dict)
    lost: set[Place] = field(default_factory=set)
    gone: set[Place] = field(default_factory=set)
    """Who came since the current generation began, and did not wait for the next."""

    def enter(self, entry: Entry) -> None:
        """Take a place, and begin the next generation where it was the last one free."""
        if entry.key in self.waiting:
            if not self.waiting[entry.key].channel.has_left:
                entry.tell(problem=f"{name_place(entry.key)} is taken by another process, which waits now.")
                return
            self.leave(self.waiting[entry.key])
        peers = [one for one in self.waiting.values() if one.side == entry.side or one.sides != entry.sides]
        counts = {one.count for one in peers} - {entry.count}
        if counts or any(one.sides != entry.sides for one in peers):
            found = f"{name_place(entry.key)} said {entry.count} ranks, those that wait ({name_places(self.waiting)})"
            found += f" said {listed(sorted(counts))}." if counts else " are of a group of another kind."
            for one in (entry, *self.waiting.values()):
                one.tell(problem=found)
            self.waiting = {}
            return
        self.waiting[entry.key] = entry
        self.gone.discard(entry.key)
        if self._is_complete(entry.sides):
            self._begin(entry.sides)

    def missing(self, entry: Entry) -> list[str]:
        """Return who must come, as far as is known, and neither waits nor came before; not more than some."""
        counts = self._counts()
        places = ((side, place) for side in entry.sides for place in range(counts.get(side, 1)))
        missing = itertools.islice((place for place in places if place not in self.waiting), _MOST_NAMED)
        return [name_place(place) if place[0] in counts else f"all of the {place[0]}" for place in missing]

    def _counts(self) -> dict[str, int]:
        return {one.side: one.count for one in self.waiting.values()}

    def _is_complete(self, sides: tuple[str, ...]) -> bool:
        # Places are below the count of their side, and each is taken once: so it is enough to count.
        counts = self._counts()
        if set(counts) != set(sides) or len(self.waiting) < sum(counts.values()):
            return False
        for other in [one for one in self.waiting.values() if one.channel.has_left]:
            self.leave(other)
        return len(self.waiting) == sum(counts.values())

    def leave(self, entry: Entry) -> None:
        """Give a place back."""
        if self.waiting.get(entry.key) is entry:
            del self.waiting[entry.key]
            self.gone.add(entry.key)
        if self.members.get(entry.key) is entry:
            self.lost.add(entry.key)

    def _begin(self, sides: tuple[str, ...]) -> None:
        self.generation += 1
        self.members, self.waiting, self.lost, self.gone = self.waiting, {}, set(), set()
        order = sorted(self.members, key=lambda key: (sides.index(key[0]), key[1]))
        told = [[self.members[key].host, self.members[key].said] for key in order]
        for rank, key in enumerate(order):
            self.members[key].tell(generation=self.generation, told=told, rank=rank)


def name_place(place: Place) -> str:
    """Return how messages call a place. *Pure.*"""
    return f"{place[0] or 'rank'} {place[1]}"


def name_places(places: Iterable[Place]) -> str:
    """Return the names of places, or nothing where there are none. *Pure.*"""
    return ", ".join(name_place(place) for place in sorted(places))
