"""Every exchange with other ranks: compared beforehand in debug mode, and its failure said in dualmesh's words.

What is exchanged is in `eager`, `pending`, `host` and others; how ranks compare is in `dualmesh.runtime.agreement`.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from dualmesh.errors import DualmeshError, GroupTimeoutError, LostPeerError, listed
from dualmesh.runtime.agreement import Matter, find_left, roll_call
from dualmesh.runtime.debug import call_site, switch
from dualmesh_torch import private
from dualmesh_torch.agreement import TorchStore, agree_in_store
from dualmesh_torch.bounded import PATIENCE_S, within
from dualmesh_torch.collectives.group_member import GroupMember, MeshMembers

ROLL_CALL_S = 1.0
"""How long a rank whose exchange failed waits for word from the others."""
_MOST_NAMED = 256
_LATE = ", which timed out"
_UNEQUAL = ("ops.ragged_all_to_all", "reshard")
"""Exchanges in which ranks may come with different shapes."""
_CURE = (
    "Call the same collectives on every rank, in the same order, on equal shapes and dtypes; a rank that leaves out a "
    "branch, or recomputes in another order, does not."
)


def compare(
    verb: str, member: GroupMember | MeshMembers, x: Any = None, site: str | None = None, **settings: Any
) -> None:
    """Return once all ranks of a group are about to do the same. *Collective over the group*, with a timeout.

    Args:
        verb: What they do.
        x: The tensor that it is done to.
        site: Where the user's code asked for it; None: where it is now.
        settings: What else must be equal.

    Raises:
        AgreementError: They are not; the message says what each does, and where.
        GroupTimeoutError: Some do not come; the message says where they were last.
    """
    store = member.pool.own_store()
    if member.size == 1 or verb == "ops.enter" or store is None:
        return
    unequal = verb in _UNEQUAL
    said = ", ".join(f"{name}={value!r}" for name, value in settings.items() if not unequal)
    said = f"{member.words}: {verb}({said})"
    if isinstance(x, torch.Tensor):
        shape = tuple(x.shape[1:] if unequal else x.shape)
        said += f" of {str(x.dtype).removeprefix('torch.')}{list(shape)}"
    matter = Matter(
        f"debug mode, {verb} over ranks {listed(member.ranks)}",
        *(member.ranks, member.pool.rank, said),
        beside=f", at {site or call_site('torch')}",
        topic=f"/{member.name}",
        is_traced=True,
        undone="Nothing was sent.",
        cure=_CURE,
    )
    agree_in_store(TorchStore(store, member.pool.session), matter)


def refuse_failure(verb: str, member: GroupMember | MeshMembers, error: BaseException) -> None:
    """Say in dualmesh's words what torch could not exchange; return where that was not the reason. *Local.*

    Waits up to a second for word from the other ranks, so that who is silent can be named.

    Raises:
        GroupTimeoutError: The others did not come in time.
        LostPeerError: One of them died or left.
    """
    if isinstance(error, DualmeshError) or not private.is_lost_exchange(error):
        return
    ranks, me = member.ranks, member.pool.rank
    late = _LATE if private.is_timeout(error) else ""
    words = _roll_call(member, ranks, f"{verb} at {call_site('torch')}{late}")
    # Who gives up closes its connections, so others are told of that first.
    kind = GroupTimeoutError if late or any(_LATE in said for said in (words or {}).values()) else LostPeerError
    silent = [rank for rank in ranks if words is not None and rank not in words] if len(ranks) <= _MOST_NAMED else []
    if words is None:
        told = " The store in which the ranks met does not answer either: the process that holds it, usually that of "
        told += "rank 0, has probably died."
    else:
        others = [f"rank {rank} in {said}" for rank, said in words.items() if rank != me]
        told = f" It failed too on {listed(others)}." if others else ""
        told += f" No word from {'rank' if len(silent) == 1 else 'ranks'} {listed(silent)}." if silent else ""
        left = _find_left(member, silent)
        told += f" {'Rank' if len(left) == 1 else 'Ranks'} {listed(left)} left the session." if left else ""
    raise kind(
        f"{verb}: {member.words}: the exchange over ranks {listed(ranks)} failed on rank {me}: "
        f"{_first_sentence(error)}.{told} A rank died, left, or did not "
        f"call the same. The group is broken: end the world on every rank and start it anew. To see which call of "
        f"which rank does not match, run with DUALMESH_DEBUG=1.",
        state=member.state,
        axis=member.axis,
        ranks=ranks,
        silent=tuple(silent),
        words=words,
    ) from error


def _first_sentence(error: BaseException) -> str:
    """Return what happened, without the advice that follows it."""
    return (str(error).splitlines() or [type(error).__name__])[0].partition(". ")[0].rstrip(".")


def _roll_call(member: GroupMember | MeshMembers, ranks: tuple[int, ...], said: str) -> dict[int, str] | None:
    """Return what the ranks say whose exchange failed too, this one included; None where the store is gone."""
    if len(ranks) > _MOST_NAMED:
        ranks = (member.pool.rank,)
    try:
        store = private.default_store()
        words = TorchStore(store, member.pool.session)
        return within(
            ROLL_CALL_S + PATIENCE_S, lambda: roll_call(words, member.name, ranks, member.pool.rank, said, ROLL_CALL_S)
        )
    except (RuntimeError, ValueError, AttributeError):  # no world any more, or a torch that does not hand it out
        return None


def _find_left(member: GroupMember | MeshMembers, ranks: Sequence[int]) -> list[int]:
    try:
        words = TorchStore(private.default_store(), member.pool.session)
        return within(PATIENCE_S, lambda: find_left(words, ranks)) if ranks else []
    except (RuntimeError, ValueError, AttributeError):
        return []


class exchange:
    """A block that exchanges something with the ranks of a group: compared first in debug mode, failures said."""

    __slots__ = ("_party", "_settings", "_verb", "_x")

    def __init__(self, verb: str, member: GroupMember | MeshMembers, x: Any = None, **settings: Any) -> None:
        self._verb = verb
        self._party = member
        self._x = x
        self._settings = settings

    def __enter__(self) -> None:
        if switch.on:
            compare(self._verb, self._party, self._x, **self._settings)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, RuntimeError):
            refuse_failure(self._verb, self._party, error)
