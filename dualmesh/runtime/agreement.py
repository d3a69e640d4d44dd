"""Do all ranks mean the same? Agreement through a store before anything is done, and who is missing or differs.

One write and one wait per rank when all agree; details are exchanged only when they do not. What is agreed
on, and the store, come from the backends.
"""

import hashlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dualmesh.errors import AgreementError, GroupTimeoutError, LostPeerError, listed

_COUNT_BITS = 18
_SUM_BITS = 62
_POLL_S = 0.02
_WAITS_S = (0.25, 0.5, 1.0)
"""How long to wait before looking whether somebody left: longer each time, the last from then on."""
_LEFT = "dualmesh/left"
ANSWERS_S = 3.0
"""How long ranks that do not agree wait for what the others said."""
ROUND_KEYS = ("sum", "ended", "verdict")
"""What a round leaves in the store."""


class Store(Protocol):
    """What the processes of a world share."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0; return its value after that."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def find(self, key: str) -> str | None:
        """Return a value, or None where there is none yet."""

    def settle(self, key: str, value: str) -> str:
        """Write a value unless there is one; return the one that stands."""

    def wait(self, key: str, timeout_s: float, waiting: int) -> bool:
        """Wait until there is a value, as do up to so many ranks at once; tell whether it came in time."""

    def forget(self, round_: str) -> None:
        """Drop the `ROUND_KEYS` of a round, where the store can."""


@dataclass(frozen=True)
class Matter:
    """What is to be agreed on, and by whom."""

    where: str
    """What the caller does, for messages."""
    ranks: Sequence[int]
    """The ranks that must agree; if their order matters, `said` must tell it."""
    rank: int
    """This one."""
    said: str
    """What this rank says; all must say the same."""
    beside: str = ""
    """What it adds, which may differ; told when ranks do not agree."""
    topic: str = ""
    """Tells matters of the same ranks apart."""
    is_traced: bool = False
    """Whether this rank leaves word of what it does, for matters to which it will not come."""
    nouns: tuple[str, str] = ("rank", "ranks")
    """What the ranks are, one and several."""
    undone: str = "Nothing was built."
    cure: str = "Give every rank the same arguments, in the same order."


def agree(store: Store, matter: Matter, timeout_s: float) -> int:
    """Return how many rounds of this matter there were before, once every rank said the same. *Collective over them.*

    Each rank adds fingerprint * 2**18 + 1 to one counter, so the last one to come sees from the sum alone whether all
    fingerprints are equal, and settles the verdict that the others wait for.

    Args:
        store: Shared by the ranks.
        matter: What is to be agreed on.
        timeout_s: How long to wait for the others, in seconds.

    Raises:
        AgreementError: Ranks said different things; the message names them and what they said.
        GroupTimeoutError: Ranks did not come in time; the message names them.
        LostPeerError: Ranks have left, and so will not come; the message names them.
    """
    count = len(matter.ranks)
    if count == 1:
        return 0
    topic = f"dualmesh/agree/{_name(matter.ranks)}{matter.topic}"
    number = store.add(f"{topic}/round", 0)
    round_ = f"{topic}/{number}"
    if matter.is_traced:
        store.set(f"dualmesh/at/{matter.rank}", f"{matter.where}: {matter.said}{matter.beside}")
    mine = (_fingerprint(matter.said, count) << _COUNT_BITS) + 1
    total = store.add(f"{round_}/sum", mine)
    if total & ((1 << _COUNT_BITS) - 1) == count:
        verdict = _settle(store, topic, round_, "same" if total == mine * count else "differ")
        if verdict == "same" and number:  # all came, so all have left the round before
            store.forget(f"{topic}/{number - 1}")
    elif _has_come(store, matter, f"{round_}/verdict", timeout_s):
        verdict = store.find(f"{round_}/verdict") or "late"
    else:
        verdict = _settle(store, topic, round_, "late")
    if verdict != "same":
        raise _disagreement(store, matter, round_, timeout_s, verdict)
    return number


def leave(store: Store, rank: int) -> None:
    """Leave word that a rank ends its session, so that whoever waits for it hears of it at once. *Local.*"""
    store.set(f"{_LEFT}/{rank}", "left")
    store.add(_LEFT, 1)


def count_left(store: Store) -> int:
    """Return how many ranks have left. *Local.*"""
    return store.add(_LEFT, 0) & ((1 << _COUNT_BITS) - 1)


def find_left(store: Store, ranks: Sequence[int]) -> list[int]:
    """Return which of some ranks have left. *Local.*"""
    if not count_left(store):
        return []
    return [rank for rank in ranks if store.find(f"{_LEFT}/{rank}") is not None]


def _has_come(store: Store, matter: Matter, key: str, timeout_s: float) -> bool:
    """Wait for a key; stop when the time is over or one of the ranks has left."""
    deadline = time.monotonic() + timeout_s
    known = 0
    for wait_s in itertools.chain(_WAITS_S, itertools.repeat(_WAITS_S[-1])):
        rest = deadline - time.monotonic()
        if store.wait(key, max(0.001, min(wait_s, rest)), len(matter.ranks)):
            return True
        if rest <= wait_s:
            return False
        gone = count_left(store)
        if gone != known and find_left(store, matter.ranks):
            return False
        known = gone
    return False


def roll_call(store: Store, topic: str, ranks: Sequence[int], rank: int, said: str, wait_s: float) -> dict[int, str]:
    """Return what those of some ranks say that come in time, this one included. *Local*, but for the wait.

    Args:
        store: Shared by the ranks.
        topic: What it is about; asked anew, it has the words of the first time.
        ranks: The ranks that may come.
        rank: This one.
        said: What this rank says.
        wait_s: How long to wait for the others, in seconds.
    """
    key = f"dualmesh/calls/{topic}"
    store.set(f"{key}/{rank}", said)
    deadline = time.monotonic() + wait_s
    told = store.add(f"{key}/told", 1)
    while told < len(ranks) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        told = store.add(f"{key}/told", 0)
    found = {member: store.find(f"{key}/{member}") for member in ranks}
    return {member: words for member, words in found.items() if words is not None}


def _settle(store: Store, topic: str, round_: str, verdict: str) -> str:
    """End the round, once, then say how it ended; a next attempt is a round of its own."""
    if store.add(f"{round_}/ended", 1) == 1:
        store.add(f"{topic}/round", 1)
    return store.settle(f"{round_}/verdict", verdict)


def _disagreement(
    store: Store, matter: Matter, round_: str, timeout_s: float, verdict: str
) -> AgreementError | GroupTimeoutError | LostPeerError:
    ranks, nouns = matter.ranks, matter.nouns
    came, answers = _answers(store, matter, round_, timeout_s)
    missing = [member for member in ranks if member not in answers]
    opinions: dict[str, list[int]] = {}
    for member, answer in answers.items():
        opinions.setdefault(answer, []).append(member)
    lines = "".join(f"\n  {_named(members, nouns)}: {answer}" for answer, members in opinions.items())
    left = find_left(store, missing)
    if left:
        return LostPeerError(
            f"{matter.where}: {_named(left, nouns)} left the session and will not come, of "
            f"{_counted(len(ranks), nouns)} that must all call it. Who came said:{lines}"
            f"{_traces(store, left, nouns)}\n{matter.undone} Keep the session open on every {nouns[0]} until all have "
            f"called it.",
            missing=tuple(missing),
            left=tuple(left),
        )
    if missing:
        return GroupTimeoutError(
            f"{matter.where}: {_named(missing, nouns)} did not come within {timeout_s:g} s, of "
            f"{_counted(len(ranks), nouns)} that must all call it. Who came said:{lines}"
            f"{_traces(store, missing, nouns)}\n{matter.undone} Call it on every {nouns[0]}, in the same order.",
            missing=tuple(missing),
            timeout_s=timeout_s,
        )
    if verdict == "late":
        return GroupTimeoutError(
            f"{matter.where}: {_counted(came, nouns)} of {len(ranks)} came within {timeout_s:g} s, the others later. "
            f"Who came said:{lines}\n{matter.undone} Call it on every {nouns[0]} at about the same time, or raise "
            f"DUALMESH_TIMEOUT_S.",
            missing=(),
            timeout_s=timeout_s,
        )
    return AgreementError(
        f"{matter.where}: the {nouns[1]} do not mean the same.{lines}\n{matter.undone} {matter.cure}",
        opinions={answer: tuple(members) for answer, members in opinions.items()},
    )


def _answers(store: Store, matter: Matter, round_: str, timeout_s: float) -> tuple[int, dict[int, str]]:
    """Exchange what each rank said: return how many came, and what those said that still answer."""
    store.set(f"{round_}/said/{matter.rank}", matter.said + matter.beside)
    told = store.add(f"{round_}/told", 1)
    came = store.add(f"{round_}/sum", 0) & ((1 << _COUNT_BITS) - 1)
    deadline = time.monotonic() + min(ANSWERS_S, timeout_s)
    while told < came and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        told = store.add(f"{round_}/told", 0)
    found = {member: store.find(f"{round_}/said/{member}") for member in matter.ranks}
    return came, {member: answer for member, answer in found.items() if answer is not None}


def _traces(store: Store, missing: Sequence[int], nouns: tuple[str, str]) -> str:
    """Say where the ranks that did not come were last."""
    last = {member: store.find(f"dualmesh/at/{member}") for member in missing[:20]}
    return "".join(f"\n  {nouns[0]} {member} came last to {at}" for member, at in last.items() if at is not None)


def _named(members: Sequence[int], nouns: tuple[str, str]) -> str:
    return f"{nouns[len(members) != 1]} {listed(members)}"


def _counted(count: int, nouns: tuple[str, str]) -> str:
    return f"{count} {nouns[count != 1]}"


def member_set(ranks: Sequence[int]) -> Sequence[int]:
    """Return ranks in ascending order, as a range where they are one: the same however they are listed. *Pure.*

    >>> member_set((2, 1, 3)), member_set((4, 2))
    (range(1, 4), (2, 4))
    """
    if isinstance(ranks, range):  # never written out: it may be as long as the world
        return ranks if ranks.step == 1 else tuple(sorted(ranks))
    members = tuple(sorted(ranks))
    whole = range(members[0], members[0] + len(members))
    return whole if members[-1] == whole[-1] and len(set(members)) == len(members) else members


def _name(ranks: Sequence[int]) -> str:
    """Return a short name of a set of ranks, so that ranks that list them in another order meet and say so."""
    members = member_set(ranks)
    text = repr(members) if isinstance(members, range) else ",".join(map(str, members))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _fingerprint(said: str, count: int) -> int:
    """Hash to as many bits as `count` of them, summed beside a count, leave in 62."""
    bits = _SUM_BITS - _COUNT_BITS - count.bit_length()
    return int.from_bytes(hashlib.sha256(said.encode()).digest()[:8], "big") >> (64 - bits)
