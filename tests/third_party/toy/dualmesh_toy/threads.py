"""Ranks as threads that meet at barriers."""

import contextvars
import threading
from collections import defaultdict

from dualmesh.backend import timeout_s
from dualmesh.errors import AgreementError, GroupTimeoutError

here = contextvars.ContextVar("toy_rank", default=None)


class Crew:
    """One thread per rank for one call of a function."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.errors = {}
        self.results = {}
        self._lock = threading.Lock()
        self._slots = defaultdict(dict)
        self._barriers = {}

    def run(self, fn):
        """Return `fn(rank)` of every rank; raise what the first failed rank raised."""
        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(self._one, fn, rank), daemon=True)
            for rank in self.ranks
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        own = {r: e for r, e in self.errors.items() if not isinstance(e, threading.BrokenBarrierError)}
        if own:
            raise own[min(own)]
        if self.errors:
            raise GroupTimeoutError(f"toy: ranks {sorted(self.errors)} waited for others that did not come.")
        return [self.results[rank] for rank in self.ranks]

    def swap(self, rank, group, call, value):
        """Return the values of all ranks of a group in its order."""
        barrier = self._barrier(group)
        slots = self._slots[group]
        slots[rank] = (call, value)
        barrier.wait()
        found = [slots[member] for member in group]
        barrier.wait()
        if len({call for call, _ in found}) > 1:
            calls = "; ".join(f"rank {member} {call}" for member, (call, _) in zip(group, found, strict=True))
            raise AgreementError(f"toy: ranks {group} do not call the same: {calls}.")
        return [value for _, value in found]

    def _barrier(self, group):
        with self._lock:
            if group not in self._barriers:
                self._barriers[group] = threading.Barrier(len(group), timeout=timeout_s())
                if self.errors:
                    self._barriers[group].abort()
            return self._barriers[group]

    def _one(self, fn, rank):
        here.set((self, rank))
        try:
            self.results[rank] = fn(rank)
        except BaseException as error:
            with self._lock:
                self.errors[rank] = error
                for barrier in self._barriers.values():
                    barrier.abort()
