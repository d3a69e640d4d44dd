"""One run of a function on every simulated rank, and how its ranks meet.

Each rank has a thread. Ranks of a group exchange values in rounds, one per collective; a rank that raises, calls
something else or does not come frees all others. What is computed from the values is in `collectives` and `host`.
"""

import contextvars
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from dualmesh.errors import AgreementError, GroupTimeoutError, MembershipError, listed
from dualmesh.runtime.thread_check import this_thread

Result = TypeVar("Result")
Group = tuple[int, ...]

# How long a failed run waits for ranks that are busy in their own code before it raises without them.
GRACE_S = 1.0


class Place(NamedTuple):
    """The rank that this code runs as, and the run that it is part of."""

    run: "Run"
    rank: int


_PLACE: contextvars.ContextVar[Place | None] = contextvars.ContextVar("dualmesh_sim_place", default=None)
place = _PLACE.get


class Freed(BaseException):
    """Ends a rank because another one failed; no `except Exception` of the caller's catches it."""


@dataclass
class _Round:
    """One collective of one group: what each rank came with."""

    calls: dict[int, str] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    is_full: bool = False


class Run:
    """A function running on some ranks at once, one thread each."""

    def __init__(self, ranks: Sequence[int], timeout_s: float) -> None:
        self.ranks = tuple(ranks)
        self._timeout_s = timeout_s
        self._moved = threading.Condition()
        self._rounds: dict[tuple[Group, int], _Round] = {}
        self._entered: Counter[tuple[Group, int]] = Counter()
        self._waiting: dict[int, tuple[Group, int]] = {}
        self._results: dict[int, Any] = {}
        self._errors: dict[int, BaseException] = {}
        self._ended: set[int] = set()
        self._failed = False

    def of(self, body: Callable[[int], Result]) -> list[Result]:
        """Call `body(rank)` for all ranks in the caller's context and return the results in the order of the ranks.

        Raises:
            BaseException: What a rank raised; of several, the first rank's.
        """
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run, args=(self._live, rank, body), name=f"rank {rank}", daemon=True
            )
            for rank in self.ranks
        ]
        for thread in threads:
            thread.start()
        try:
            with self._moved:
                self._moved.wait_for(lambda: self._failed or len(self._ended) == len(self.ranks))
        except BaseException:
            self._fail()
            raise
        deadline = time.monotonic() + GRACE_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()) if self._failed else None)
        if self._errors:
            raise self._first_error()
        return [self._results[rank] for rank in self.ranks]

    def exchange(self, rank: int, group: Group, call: str, value: Any) -> list[Any]:
        """Return what all ranks of the group came with, in the order of the group, once all are here.

        Args:
            rank: The rank that comes.
            group: The ranks that meet, in index order.
            call: What the rank does, in words; it must be the same on all of them.
            value: Handed to the others as it is; nobody may change it afterwards.

        Raises:
            MembershipError: The group has ranks that are not in this run.
            AgreementError: The ranks of the group do different things, or some can never come.
            GroupTimeoutError: Some did not come in time.
        """
        self._check_members(group, call)
        with self._moved:
            number = self._entered[group, rank]
            self._entered[group, rank] += 1
            here = self._rounds.setdefault((group, number), _Round())
            here.calls[rank], here.values[rank] = call, value
            if len(here.values) == len(group):
                self._fill(group, number)
            else:
                self._wait(rank, group, number)
            self._check_agreement(group, here)
            return [here.values[member] for member in group]

    def _live(self, rank: int, body: Callable[[int], Any]) -> None:
        _PLACE.set(Place(self, rank))
        this_thread.is_started = False  # it has the scope, or the lack of one, of who started the run
        try:
            result = body(rank)
        except Freed:
            self._end(rank)
        except BaseException as error:
            self._errors[rank] = error
            self._fail()
            self._end(rank)
        else:
            self._results[rank] = result
            self._end(rank)

    def _end(self, rank: int) -> None:
        with self._moved:
            self._ended.add(rank)
            self._moved.notify_all()

    def _fail(self) -> None:
        with self._moved:
            self._failed = True
            self._moved.notify_all()

    def _fill(self, group: Group, number: int) -> None:
        """Let all ranks of a round go on; the round is forgotten."""
        self._rounds.pop((group, number)).is_full = True
        for member in group:
            self._waiting.pop(member, None)
        self._moved.notify_all()

    def _wait(self, rank: int, group: Group, number: int) -> None:
        here = self._rounds[group, number]
        deadline = time.monotonic() + self._timeout_s
        self._waiting[rank] = (group, number)
        self._moved.notify_all()
        while not here.is_full:
            if self._failed:
                raise Freed
            if len(self._waiting) + len(self._ended) == len(self.ranks):
                raise self._never(group)
            if not self._moved.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                raise GroupTimeoutError(
                    f"shard_map: ranks {listed(group)} did not meet within {self._timeout_s:g} s. "
                    f"{self._doings(self.ranks)} Every rank of a group must call the same collectives, in the same "
                    f"order.",
                    ranks=group,
                    timeout_s=self._timeout_s,
                )

    def _check_members(self, group: Group, call: str) -> None:
        missing = [member for member in group if member not in self.ranks]
        if missing:
            raise MembershipError(
                f"{call}: ranks {listed(group)} must meet, but {listed(missing)} take no part in this shard_map. Its "
                f"ranks: {listed(self.ranks)}. Use a state over them.",
                ranks=tuple(missing),
            )

    def _check_agreement(self, group: Group, here: _Round) -> None:
        if len(set(here.calls.values())) > 1:
            raise AgreementError(
                f"shard_map: ranks {listed(group)} do not do the same. {_group_doings(here.calls)} Every "
                f"rank of a group must call the same collectives, in the same order, on equal shapes and dtypes.",
                calls=dict(here.calls),
            )

    def _never(self, group: Group) -> AgreementError:
        return AgreementError(
            f"shard_map: ranks {listed(group)} can never meet. {self._doings(self.ranks)} Every rank of a group must "
            f"call the same collectives, in the same order.",
            ranks=group,
        )

    def _doings(self, ranks: Group) -> str:
        return _group_doings({rank: self._doing(rank) for rank in ranks})

    def _doing(self, rank: int) -> str:
        if rank in self._ended:
            return "returned"
        at = self._waiting.get(rank)
        if at is None:
            return "in its own code"
        return f"waiting in {self._rounds[at].calls[rank]} for ranks {listed(at[0])}"

    def _first_error(self) -> BaseException:
        rank = min(self._errors, key=self.ranks.index)
        others = [other for other in self._errors if other != rank]
        error = self._errors[rank]
        also = f" (and rank {listed(sorted(others))})" if others else ""
        error.add_note(f"shard_map: raised on rank {rank}{also}.")
        busy = [other for other in self.ranks if other not in self._ended]
        if busy:
            error.add_note(f"shard_map: rank {listed(busy)} is still busy in code of its own.")
        return error


def _group_doings(doings: Mapping[int, str]) -> str:
    """Write what ranks do, those that do the same together."""
    ranks: dict[str, list[int]] = {}
    for rank in sorted(doings):
        ranks.setdefault(doings[rank], []).append(rank)
    return "; ".join(f"rank {listed(same)}: {doing}" for doing, same in ranks.items()) + "."
