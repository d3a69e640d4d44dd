"""Agreement on states before their groups are built, through the store in which the world met.

How ranks agree is in `dualmesh.runtime.agreement`.
"""

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from dualmesh._support import waits
from dualmesh.backend.state_plan import StatePlan, describe_plans, ranks_of
from dualmesh.errors import AgreementError, DualmeshError
from dualmesh.runtime.agreement import ANSWERS_S, ROUND_KEYS, Matter, agree, member_set
from dualmesh_torch import private
from dualmesh_torch.bounded import PATIENCE_S, within

_SHORTEST_POLL_S = 0.0005
_POLL_S_PER_RANK = 1e-4
"""Ranks that wait together take up to a fifth of the time of the store, which needs some 20 us to answer."""
_POLL_SHARE = 0.1
"""How late a rank may see what came, as a share of how long it has waited."""


class TorchStore:
    """A torch.distributed store as agreements need it; keys begin with the session's name."""

    def __init__(self, store: Any, session: str) -> None:
        self._store = store
        self._prefix = f"{session}/"

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(self._prefix + key, amount))

    def set(self, key: str, value: str) -> None:
        self._store.set(self._prefix + key, value)

    def find(self, key: str) -> str | None:
        full = self._prefix + key
        return self._store.get(full).decode() if self._store.check([full]) else None

    def settle(self, key: str, value: str) -> str:
        found: bytes = self._store.compare_set(self._prefix + key, "", value)
        return found.decode()

    def wait(self, key: str, timeout_s: float, waiting: int) -> bool:
        # Asked again and again: torch writes a warning to the terminal for each wait that ends without the key.
        shortest = max(_SHORTEST_POLL_S, waiting * _POLL_S_PER_RANK)
        begin = time.monotonic()
        while not self._store.check([self._prefix + key]):
            waited = time.monotonic() - begin
            if waited >= timeout_s:
                return False
            time.sleep(min(max(shortest, waited * _POLL_SHARE), timeout_s - waited))
        return True

    def forget(self, round_: str) -> None:
        for key in ROUND_KEYS:
            with contextlib.suppress(RuntimeError):  # some stores only grow
                self._store.delete_key(f"{self._prefix}{round_}/{key}")


def agree_on(plans: Sequence[StatePlan], rank: int, session: str) -> None:
    """Return once all ranks of the states mean the same states. *Collective over each state's ranks.*

    Collective order: sets of ranks are agreed on in one common order, so that no two ranks wait for each other.
    """
    store = private.default_store()
    if store is None:
        return
    by_ranks: dict[Sequence[int], list[StatePlan]] = {}
    for plan in plans:
        by_ranks.setdefault(member_set(ranks_of(plan)), []).append(plan)
    for ranks in sorted(by_ranks, key=lambda members: (members[0], len(members), tuple(members[:64]))):
        if rank in ranks:
            said = describe_plans(by_ranks[ranks])
            agree_in_store(TorchStore(store, session), Matter("init_parallel_state", ranks, rank, said))


def agree_on_group(where: str, ranks: Sequence[int], rank: int, session: str, said: str) -> None:
    """Return once all ranks of a group that is made at first use want it made. *Collective over the ranks.*"""
    store = private.default_store()
    if store is not None and len(ranks) > 1:
        agree_in_store(TorchStore(store, session), Matter(where, ranks, rank, said))


def agree_in_store(store: TorchStore, matter: Matter, timeout_s: float | None = None) -> int:
    """Return the number of the round, once all ranks of a matter said the same. *Collective over them*."""
    limit = waits.timeout_s() if timeout_s is None else timeout_s
    try:
        # After its own time is over an agreement still asks what the others said.
        return within(limit + min(ANSWERS_S, limit) + PATIENCE_S, lambda: agree(store, matter, limit))
    except DualmeshError:
        raise
    except RuntimeError as error:
        raise no_answer_error(f"{matter.where} ({matter.said})", matter.rank, error, matter.undone) from error


def no_answer_error(where: str, rank: int, error: Exception, undone: str = "Nothing was built.") -> AgreementError:
    """Return the error for a store that does not answer. *Pure.*"""
    return AgreementError(
        f"{where}: the store in which the ranks met does not answer on rank {rank}: {error}. The process that holds "
        f"it, usually that of rank 0, has probably died, or left its session. {undone} Start the world anew.",
        rank=rank,
    )
