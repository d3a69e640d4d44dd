"""When groups end: once no member makes them any more.

A rank whose part of a group is made may let go of it while another still connects, and that one would see a closed
connection. So members count in the store who is through, and a group that is let go before all are is kept until then.
"""

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.distributed as dist

from dualmesh_torch import private
from dualmesh_torch.bounded import PATIENCE_S, SilentStoreError, within

_THROUGH, _ENDED = 1, 1 << 20
"""What is added to a group's counter by who is through with making it, and by who ends it."""
_POLL_S = 0.01
T = TypeVar("T")


class Retirement:
    """Groups of one world that this rank made, until they are ended.

    Args:
        end: Destroys groups.
    """

    def __init__(self, end: Callable[[list[dist.ProcessGroup]], None]) -> None:
        self._end = end
        self._made: dict[str, tuple[str, ...]] = {}
        """By name: the keys that this rank left in the store when it made the group."""
        self._uncounted: list[str] = []
        self._kept: list[dist.ProcessGroup] = []
        self.is_silent = False
        """The store did not answer once: it is not asked again."""

    def __len__(self) -> int:
        return len(self._kept)

    def note(self, name: str, keys: Iterable[str]) -> None:
        """Note that this rank no longer connects to the members of a group, made or not. *Local.*"""
        self._made[name] = tuple(keys)
        self._uncounted.append(name)

    def count_in(self) -> None:
        """Tell the other members what was noted. *Local.*"""
        names, self._uncounted = self._uncounted, []

        def tell(store: Any) -> list[int]:
            return [store.add(_counter(name), _THROUGH) for name in names]

        if names:
            self._ask(tell)

    def retire(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """End groups, those that a member still makes later. *Local.*"""
        retired = list(groups)
        if retired or self._kept:
            self._end_ready(self._kept, retired)

    def sweep(self) -> None:
        """End the groups that were kept and that no member makes any more. *Local.*"""
        if self._kept:
            self._end_ready(self._kept, [])

    def wait(self, timeout_s: float) -> None:
        """Return once nothing is kept, or the time is over. *Local*, but for the wait for members that still make."""
        deadline = time.monotonic() + timeout_s
        while self._kept and time.monotonic() < deadline:
            self.sweep()
            if self._kept:
                time.sleep(_POLL_S)

    def _end_ready(self, kept: list[dist.ProcessGroup], retired: list[dist.ProcessGroup]) -> None:
        def look(store: Any) -> list[dist.ProcessGroup]:
            found = [group for group in kept if _are_all_through(store, group, 0)]
            foreign = [group for group in retired if group.group_name not in self._made]
            mine = [group for group in retired if group.group_name in self._made]
            found += [group for group in mine if _are_all_through(store, group, _ENDED)]
            for group in found:
                for key in self._made.pop(group.group_name, ()):
                    with contextlib.suppress(RuntimeError):  # some stores only grow
                        store.delete_key(key)
            return found + foreign

        ready = self._ask(look)
        ended = [*kept, *retired] if ready is None else ready  # without a store nobody can make a group
        self._kept = [group for group in (*kept, *retired) if group not in ended]
        if ended:
            self._end(ended)

    def _ask(self, ask: Callable[[Any], T]) -> T | None:
        """Return what a function says of the store; None where the store does not answer any more."""
        store = None if self.is_silent else private.default_store()
        if store is None:
            return None
        try:
            return within(PATIENCE_S, lambda: ask(store))
        except RuntimeError as error:
            self.is_silent = isinstance(error, SilentStoreError)
            return None


def _are_all_through(store: Any, group: dist.ProcessGroup, amount: int) -> bool:
    """Tell whether all members are through with making a group; the last one to end it deletes the counter."""
    size, counter = group.size(), _counter(group.group_name)
    count = store.add(counter, amount)
    ended, through = divmod(count, _ENDED)
    if ended == size or count == 0:  # 0: who ended it last has deleted it
        with contextlib.suppress(RuntimeError):
            store.delete_key(counter)
    return bool(through >= size or count == 0)


def _counter(name: str) -> str:
    return f"dualmesh/through/{name}"
