"""When groups end: once no member makes them any more.

A rank whose part of a group is made may let go of it while another still connects, and that one would see a closed
connection. So members count in the store who is through, and a group that is let go before all are is kept until then.
"""

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from dualmesh_torch import private

_ENDED = 1 << 20
"""Added to a group's counter by who ends it; who is through adds 1."""
_POLL_S = 0.01


class Retirement:
    """Groups of one world that this rank made, until they are ended.

    Args:
        end: Destroys groups.
    """

    def __init__(self, end: Callable[[list[dist.ProcessGroup]], None]) -> None:
        self._end = end
        self._made: dict[str, tuple[str, ...]] = {}
        """By name: the keys that this rank left in the store when it made the group."""
        self._kept: list[dist.ProcessGroup] = []

    def __len__(self) -> int:
        return len(self._kept)

    def count_in(self, name: str, keys: Iterable[str]) -> None:
        """Note that this rank no longer connects to the members of a group, made or not. *Local.*"""
        store = private.default_store()
        if store is not None:
            self._made[name] = tuple(keys)
            with contextlib.suppress(RuntimeError):  # without a store nobody can connect any more
                store.add(_counter(name), 1)

    def retire(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """End groups, those that a member still makes later. *Local.*"""
        ended = self._ready()
        for group in groups:
            if group.group_name not in self._made or _are_all_through(group, _ENDED):
                ended.append(group)
            else:
                self._kept.append(group)
        self._finish(ended)

    def sweep(self) -> None:
        """End the groups that were kept and that no member makes any more. *Local.*"""
        if self._kept:
            self._finish(self._ready())

    def wait(self, timeout_s: float) -> None:
        """Return once nothing is kept, or the time is over. *Local*, but for the wait for members that still make."""
        deadline = time.monotonic() + timeout_s
        while self._kept and time.monotonic() < deadline:
            self.sweep()
            if self._kept:
                time.sleep(_POLL_S)

    def _ready(self) -> list[dist.ProcessGroup]:
        ready = [group for group in self._kept if _are_all_through(group, 0)]
        self._kept = [group for group in self._kept if group not in ready]
        return ready

    def _finish(self, groups: list[dist.ProcessGroup]) -> None:
        if not groups:
            return
        store = private.default_store()
        for group in groups:
            for key in self._made.pop(group.group_name, ()):
                with contextlib.suppress(RuntimeError):  # some stores only grow
                    store.delete_key(key)  # type: ignore[union-attr]
        self._end(groups)


def _are_all_through(group: dist.ProcessGroup, amount: int) -> bool:
    """Tell whether all members are through with making a group; the last one to end it deletes the counter."""
    store: Any = private.default_store()
    size, counter = group.size(), _counter(group.group_name)
    try:
        count = store.add(counter, amount)
        ended, through = divmod(count, _ENDED)
        if ended == size or count == 0:  # 0: who ended it last has deleted it
            with contextlib.suppress(RuntimeError):
                store.delete_key(counter)
    except RuntimeError:
        return True  # without a store nobody can make a group
    return bool(through >= size or count == 0)


def _counter(name: str) -> str:
    return f"dualmesh/through/{name}"
