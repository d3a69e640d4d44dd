"""The pool of process groups: one per list of ranks, backend, device type, options and lane, shared by all states.

Which groups a rank needs is planned in `dualmesh.topology.communicators`; what states do with them is in `state`.
"""

import hashlib
import threading
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch.distributed as dist

from dualmesh._support import waits
from dualmesh.backend.group_options import GroupOptions
from dualmesh.backend.state import AxisTable
from dualmesh.errors import GroupTimeoutError, LostPeerError, listed
from dualmesh.runtime.agreement import find_left
from dualmesh.topology.communicators import Lane, Membership, RankList
from dualmesh.topology.layout import Layout
from dualmesh_torch import private
from dualmesh_torch.agreement import TorchStore
from dualmesh_torch.bounded import PATIENCE_S, within
from dualmesh_torch.mesh.retirement import Retirement

Group = dist.ProcessGroup


class Key(NamedTuple):
    """What makes two groups the same group."""

    ranks: RankList
    lane: Lane
    backend: str
    device_type: str
    options: GroupOptions = ()
    owner: str = ""
    """Empty: shared. Else whose own group it is, in words that all members know."""


class GroupPool:
    """The groups of one world. It never destroys the default group."""

    def __init__(self, default: Group, session: str, device_backends: dict[str, str]) -> None:
        self.default = default
        self.size = default.size()
        self.rank = default.rank()
        self._everyone = RankList(range(self.size))
        self.device_backends = device_backends
        self.session = session
        self.is_real = "fake" not in device_backends.values()
        """False under torch's fake backend, whose store has no operations."""
        self.planned: dict[object, dict[Layout, RankList]] = {}
        """Lists of ranks that states being built share, by their members and layout."""
        self.handles: WeakValueDictionary[int, AxisTable] = WeakValueDictionary()
        """What states give out by axis, emptied when the world ends: from then on asking is refused."""
        self._groups: dict[Key, Group] = {}
        self._users: dict[Key, dict[int, object]] = {}
        self._generations: dict[Key, int] = {}
        self._retirement = Retirement(self._destroy)
        self._lock = threading.RLock()
        self._stores = threading.local()

    def __len__(self) -> int:
        return len(self._groups)

    def drop_handles(self) -> None:
        """Let no state give out a group any more: the world ended. *Local.*"""
        for table in list(self.handles.values()):
            table.clear()

    def keys(self) -> tuple[Key, ...]:
        """Return what is in use. *Local.*"""
        return tuple(self._groups)

    def has(self, key: Key) -> bool:
        """Tell whether a group exists, or needs none to be made. *Local.*"""
        return key in self._groups or self._is_default(key)

    def generation(self, key: Key) -> int:
        """Return which group of its kind the next one is; the same on all members. *Local.*"""
        return self._generations.get(key, -1) + 1

    def in_use(self) -> Iterator[tuple[Key, Group, list[object]]]:
        """Return the groups and the states that use each. *Local.*"""
        with self._lock:
            return iter([(key, group, list(self._users.get(key, {}).values())) for key, group in self._groups.items()])

    def own_store(self) -> Any | None:
        """Return this thread's own connection to the store; None where it has no operations. *Local.*

        A thread that waits in a connection holds up all that share it.
        """
        found = getattr(self._stores, "own", None)
        shared = private.default_store() if found is None and self.is_real else None
        if shared is not None:
            within(PATIENCE_S, lambda: shared.check(["dualmesh"]))  # where it has died, connecting anew would wait long
            found = self._stores.own = shared.clone() if hasattr(shared, "clone") else shared
        return found

    def key(self, membership: Membership, device_type: str, options: GroupOptions = (), owner: str = "") -> Key:
        """Return the key of a group. *Pure.*"""
        backend = self.device_backends.get(device_type) or dist.get_default_backend_for_device(device_type)
        return Key(*membership, backend, device_type, options, owner)

    def acquire(self, keys: Iterable[Key], user: object, where: str = "init_parallel_state") -> dict[Key, Group]:
        """Return groups, all or none, making those that do not exist. *Collective over each new group's members.*

        Collective order: every rank makes its new groups in the order of their keys.

        Raises:
            GroupTimeoutError: Not all members came.
        """
        with self._lock:
            self._retirement.sweep()
            found: dict[Key, Group] = {}
            try:
                for key in sorted(set(keys)):
                    found[key] = self._groups.get(key) or self._made(key, where)
                    self._users.setdefault(key, {})[id(user)] = user
            except BaseException:
                self._retirement.count_in()
                self.release(user, found)
                raise
            self._retirement.count_in()
            return found

    def make_everywhere(self, keys: Iterable[Key]) -> None:
        """Make groups where torch cannot make them among members alone. *Collective over the world*, keys the same.

        Raises:
            GroupTimeoutError: Torch cannot keep the order of a list.
        """
        for key in sorted(set(keys)):
            if key in self._groups or self._is_default(key):
                continue
            settings = dict(key.options)
            try:
                group = private.world_group(
                    key.ranks, self._timeout(key, settings), key.backend, _native(key, settings)
                )
            except RuntimeError as error:
                raise _unmade("init_parallel_state", key, self, error) from error
            if self.rank in key.ranks:
                self._groups[key] = group

    def release(self, user: object, keys: Iterable[Key] | None = None) -> None:
        """Let go of groups (None: of all); those without another user end, once all members have made them. *Local.*"""
        with self._lock:
            ended = []
            for key in list(self._groups if keys is None else keys):
                users = self._users.get(key, {})
                users.pop(id(user), None)
                if not users:
                    self._users.pop(key, None)
                    ended.append(self._groups.pop(key, None))
            if dist.group.WORLD is self.default:
                self._retirement.retire(group for group in ended if group is not None and group is not self.default)

    def finish(self, timeout_s: float) -> None:
        """Wait until no member still makes a group that was let go of, or the time is over. *Local*, but for the wait.

        The session ends after it, and with the session this rank's ends of what they connect to.
        """
        with self._lock:
            self._retirement.wait(timeout_s)

    @property
    def is_store_silent(self) -> bool:
        """Whether the store was asked and did not answer."""
        return self._retirement.is_silent

    def forget(self) -> None:
        """Drop all groups without ending them: they are another process'. *Local.*"""
        self._groups, self._users = {}, {}
        self._retirement = Retirement(self._destroy)
        self._lock = threading.RLock()  # the old one may be held by a thread that is not here

    def _destroy(self, groups: list[Group]) -> None:
        for group in groups:
            private.destroy_group(group)
        private.forget_plans()

    def _made(self, key: Key, where: str) -> Group:
        group = self.default if self._is_default(key) else self._created(key, where)
        self._groups[key] = group
        return group

    def _is_default(self, key: Key) -> bool:
        """The default group stands for the world in one lane: hooks of a plain DDP use it, so lane "param"."""
        lane = "param" if self.size > 1 else "data"
        if len(key.ranks) != self.size or key.lane != lane or key.options or key.owner:
            return False
        return self.device_backends.get(key.device_type) == key.backend and key.ranks == self._everyone

    def _created(self, key: Key, where: str) -> Group:
        generation = self._generations[key] = self.generation(key)
        options = hashlib.sha256(repr((key.backend, key.device_type, key.options)).encode()).hexdigest()[:8]
        own = f"-own-{hashlib.sha256(key.owner.encode()).hexdigest()[:8]}" if key.owner else ""
        name = f"dualmesh/{self.session}/{key.ranks.digest}/{key.lane}{own}/{options}/{generation}"
        settings = dict(key.options)
        timeout = self._timeout(key, settings)
        # Members that died must not be waited for as long as a collective may take.
        patience = timedelta(seconds=waits.timeout_s()) if private.has_timeouts() and self.is_real else timeout
        try:
            group = private.member_group(key.ranks, self.rank, name, key.backend, patience, _native(key, settings))
        except RuntimeError as error:
            raise _unmade(where, key, self, error) from error
        finally:
            if self.is_real and len(key.ranks) > 1:
                place = key.ranks.index(self.rank)
                self._retirement.note(name, private.address_keys(name, key.device_type, place))
        if patience is not timeout:
            private.set_timeout(group, timeout or private.default_timeout(key.backend))
        return group

    def _timeout(self, key: Key, settings: dict[str, Any]) -> timedelta | None:
        if "timeout_s" in settings:
            return timedelta(seconds=settings["timeout_s"])
        return private.timeout_of(self.default, key.device_type)


def _unmade(where: str, key: Key, pool: GroupPool, error: Exception) -> GroupTimeoutError | LostPeerError:
    found = f"{where}: the group of ranks {listed(key.ranks)} could not be made on rank {pool.rank}: {error}."
    try:
        store = private.default_store() if pool.is_real else None
        words = None if store is None else TorchStore(store, pool.session)
        left = [] if words is None else within(PATIENCE_S, lambda: find_left(words, key.ranks))
    except RuntimeError:
        left = []
    if left:
        return LostPeerError(
            f"{found} Rank{'s' * (len(left) > 1)} {listed(left)} left the session. Keep it open on every rank until "
            f"all have built their states.",
            ranks=key.ranks,
            left=tuple(left),
        )
    return GroupTimeoutError(
        f"{found} Every one of these ranks must build the same states, in the same order.", ranks=key.ranks
    )


def _native(key: Key, settings: dict[str, Any]) -> Any:
    """Return the native options of a group, or None for the defaults."""
    if key.backend != "nccl" or not settings.get("is_high_priority"):
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    return options
