"""Do all ranks mean the same? Agreement through a store before anything is built, and who is missing or differs.

One write and one blocking wait per rank when all agree; details are exchanged only when they do not. What is agreed
on, and the store, come from the backends.
"""

import hashlib
import time
from collections.abc import Sequence
from typing import Protocol

from dualmesh.errors import AgreementError, GroupTimeoutError, listed

_COUNT_BITS = 18
_SUM_BITS = 62
_POLL_S = 0.02


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

    def wait(self, key: str, timeout_s: float) -> bool:
        """Wait until there is a value; tell whether it came in time."""


def agree(
    store: Store,
    where: str,
    ranks: Sequence[int],
    rank: int,
    said: str,
    timeout_s: float,
    *,
    nouns: tuple[str, str] = ("rank", "ranks"),
) -> None:
    """Return once every rank said the same. *Collective over the ranks.*

    Each rank adds fingerprint * 2**18 + 1 to one counter, so the last one to come sees from the sum alone whether all
    fingerprints are equal, and settles the verdict that the others wait for.

    Args:
        store: Shared by the ranks.
        where: What is to be agreed on, for messages.
        ranks: The ranks that must agree.
        rank: This one.
        said: What this rank says.
        timeout_s: How long to wait for the others, in seconds.
        nouns: What the ranks are, one and several, for messages.

    Raises:
        AgreementError: Ranks said different things; the message names them and what they said.
        GroupTimeoutError: Ranks did not come in time; the message names them.
    """
    if len(ranks) == 1:
        return
    topic = f"dualmesh/agree/{_name(ranks)}"
    round_ = f"{topic}/{store.add(f'{topic}/round', 0)}"
    mine = (_fingerprint(said, len(ranks)) << _COUNT_BITS) + 1
    total = store.add(f"{round_}/sum", mine)
    if total & ((1 << _COUNT_BITS) - 1) == len(ranks):
        verdict = _settled(store, topic, round_, "same" if total == mine * len(ranks) else "differ")
    elif store.wait(f"{round_}/verdict", timeout_s):
        verdict = store.find(f"{round_}/verdict") or "late"
    else:
        verdict = _settled(store, topic, round_, "late")
    if verdict != "same":
        raise _disagreement(store, where, round_, ranks, rank, said, timeout_s, verdict, nouns)


def _settled(store: Store, topic: str, round_: str, verdict: str) -> str:
    """End the round, once, then say how it ended; a next attempt is a round of its own."""
    if store.add(f"{round_}/ended", 1) == 1:
        store.add(f"{topic}/round", 1)
    return store.settle(f"{round_}/verdict", verdict)


def _disagreement(
    store: Store,
    where: str,
    round_: str,
    ranks: Sequence[int],
    rank: int,
    said: str,
    timeout_s: float,
    verdict: str,
    nouns: tuple[str, str],
) -> AgreementError | GroupTimeoutError:
    store.set(f"{round_}/said/{rank}", said)
    told = store.add(f"{round_}/told", 1)
    came = store.add(f"{round_}/sum", 0) & ((1 << _COUNT_BITS) - 1)
    deadline = time.monotonic() + min(5.0, timeout_s)
    while told < came and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        told = store.add(f"{round_}/told", 0)
    answers = {member: store.find(f"{round_}/said/{member}") for member in ranks}
    missing = [member for member, answer in answers.items() if answer is None]
    opinions: dict[str, list[int]] = {}
    for member, answer in answers.items():
        if answer is not None:
            opinions.setdefault(answer, []).append(member)
    lines = "".join(f"\n  {_named(members, nouns)}: {answer}" for answer, members in opinions.items())
    if missing:
        return GroupTimeoutError(
            f"{where}: {_named(missing, nouns)} did not come within {timeout_s:g} s, of {_counted(len(ranks), nouns)} "
            f"that must all call it. Who came said:{lines}\nNothing was built. Call it on every {nouns[0]}, in the "
            f"same order.",
            missing=tuple(missing),
            timeout_s=timeout_s,
        )
    if verdict == "late":
        return GroupTimeoutError(
            f"{where}: {_counted(came, nouns)} of {len(ranks)} came within {timeout_s:g} s, the others later. Who came "
            f"said:{lines}\nNothing was built. Call it on every {nouns[0]} at about the same time, or raise "
            f"DUALMESH_TIMEOUT_S.",
            missing=(),
            timeout_s=timeout_s,
        )
    return AgreementError(
        f"{where}: the {nouns[1]} do not mean the same.{lines}\nNothing was built. Give every {nouns[0]} the same "
        f"arguments, in the same order.",
        opinions={answer: tuple(members) for answer, members in opinions.items()},
    )


def _named(members: Sequence[int], nouns: tuple[str, str]) -> str:
    return f"{nouns[len(members) != 1]} {listed(members)}"


def _counted(count: int, nouns: tuple[str, str]) -> str:
    return f"{count} {nouns[count != 1]}"


def _name(ranks: Sequence[int]) -> str:
    """Return a short name of a list of ranks; a range is not written out."""
    text = repr(ranks) if isinstance(ranks, range) else ",".join(map(str, ranks))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _fingerprint(said: str, count: int) -> int:
    """Hash to as many bits as `count` of them, summed beside a count, leave in 62."""
    bits = _SUM_BITS - _COUNT_BITS - count.bit_length()
    return int.from_bytes(hashlib.sha256(said.encode()).digest()[:8], "big") >> (64 - bits)
