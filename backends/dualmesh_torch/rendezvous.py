"""Where the ranks of a world meet: a store at an address, and in it a prefix for each life of the world.

A world that starts anew at the same address, in the same processes or in restarted ones, finds what the last one left
there: addresses of sockets that are closed. So each life has keys of its own, under a number that all ranks agree on.
"""

import contextlib
import os
import time
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from dualmesh._support import waits
from dualmesh.backend.backend import Launch
from dualmesh.runtime.agreement import Matter, count_left, leave
from dualmesh_torch.agreement import TorchStore, agree_in_store
from dualmesh_torch.bounded import PATIENCE_S, within

_LINGER_S = 2.0
"""How long the process that holds the store stays for others to hear that it leaves."""
_POLL_S = 0.02


class Rendezvous:
    """The store at one address, kept by this process for all lives of its world.

    Kept, because rank 0 holds it: were it dropped between two lives, a rank that is early in the second would meet
    the first one's store, and lose it.
    """

    def __init__(self) -> None:
        self._key: tuple[object, ...] = ()
        self._store: Any = None

    def meet(self, launch: Launch, said: str) -> Any:
        """Return the store for a new life of a world. *Collective over its ranks.*

        Args:
            launch: The address, and this process' rank in the world.
            said: What the world is, in words; all ranks must say the same.

        Raises:
            AgreementError: Ranks want different worlds.
            GroupTimeoutError: Ranks did not come in time.
            RuntimeError: Nobody answers at the address.
        """
        if launch.init_method is None:
            return HashStore()
        wait = dist.default_pg_timeout if launch.timeout_s is None else timedelta(seconds=launch.timeout_s)
        store = self._at(launch, wait)
        lives = TorchStore(store, f"dualmesh/attempts/{launch.attempt}")
        matter = Matter(
            *("init_distributed", range(launch.process_count), launch.rank, said),
            is_traced=True,
            undone="No world was started.",
            cure="Start every process with the same address, world size and kind of devices.",
        )
        life = agree_in_store(lives, matter, wait.total_seconds())
        return PrefixStore(f"dualmesh/attempts/{launch.attempt}/lives/{life}", store)

    def _at(self, launch: Launch, wait: timedelta) -> Any:
        key = (launch.init_method, launch.rank, launch.process_count, os.getpid())
        if key != self._key or not _answers(self._store):
            self._store = None  # its port may be the one that is asked for
            self._store, self._key = _store_at(launch, wait), key
        return self._store


def _answers(store: Any) -> bool:
    try:
        within(PATIENCE_S, lambda: store.check(["dualmesh"]))
    except RuntimeError:
        return False
    return True


def _store_at(launch: Launch, wait: timedelta) -> Any:
    """Return the store at an address; rank 0 holds it, unless the launcher does. *Local*, but for the wait."""
    address = urlsplit(str(launch.init_method))
    if address.scheme != "tcp" or address.hostname is None or address.port is None:
        meet: Any = dist.rendezvous  # type: ignore[attr-defined]
        found, _, _ = next(iter(meet(launch.init_method, launch.rank, launch.process_count, timeout=wait)))
        return found
    # Who is missing is told by the agreement, which knows names; the constructor would only count.
    return TCPStore(
        address.hostname,
        address.port,
        is_master=launch.rank == 0 and not launch.has_launchers_store,
        timeout=wait,
        wait_for_workers=False,
        multi_tenant=True,
    )


def say_goodbye(store: Any, session: str, rank: int, size: int) -> None:
    """Leave word that this rank ends its session; rank 0, which may hold the store, stays for a while. *Local.*"""
    words = TorchStore(store, session)

    def tell() -> None:
        leave(words, rank)
        deadline = time.monotonic() + min(_LINGER_S, waits.timeout_s())
        while rank == 0 and count_left(words) < size and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    with contextlib.suppress(RuntimeError):  # the store is gone: nobody can be told
        within(_LINGER_S + PATIENCE_S, tell)
