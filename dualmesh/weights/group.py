"""Transfer groups: processes of several worlds, each world with ranks of its own, joined under a name.

Where they meet is in `store`; who would send weights to whom is planned in `assignment` and
`plan`.
"""

import time
from typing import Any, NamedTuple

from dualmesh._support import waits
from dualmesh._support.waits import check_timeout
from dualmesh.backend.carrier import Carrier
from dualmesh.errors import (
    AgreementError,
    ArgumentError,
    BackendError,
    GroupTimeoutError,
    RankError,
    SessionError,
    StaleStateError,
    listed,
)
from dualmesh.runtime.session import driver_for
from dualmesh.topology.resolve import positive, whole
from dualmesh.weights.key import find_key
from dualmesh.weights.store import MOST_PLACES, StoreClient, address_of, connect_to_store, hold, let_go, reachable

NO_NATIVE = (
    "TransferGroup {name!r}: no process group joins its ranks, of the backends {backends}. torch makes one where all "
    "are torch; dm.transfer_link moves weights between any."
)
_PAUSE_S = 0.1
_LONGEST_NAME = 256


class MemberPlace(NamedTuple):
    """What a process asks for: a place among the processes of its side."""

    side: str
    """"" where the group has one side only."""
    place: int
    total: int
    sides: tuple[str, ...]
    """All sides, in the order of their ranks."""

    @property
    def is_first(self) -> bool:
        """Whether it is transfer rank 0."""
        return self.side == self.sides[0] and self.place == 0


class TransferGroup:
    """This process' place in a transfer group, of one generation; made by `dualmesh.transfer_group`.

    Attributes:
        name: The group's name.
        rank: This process' rank in it.
        size: How many ranks it has.
        generation: How often the group was made in the life of its store, this time included.
        life: A name of that life.
        hosts: Where each rank can be reached, by rank.
        told: What each rank said when it joined, by rank.
    """

    made_by = "dm.transfer_group"
    """What messages tell to call again."""

    def __init__(
        self, name: str, seat: MemberPlace, address: tuple[str, int], carrier: Carrier, key: str | bytes | None
    ) -> None:
        self.name, self.rank, self.size = name, seat.place, seat.total
        self.seat = seat
        self.generation = 0
        self.hosts: list[str] = []
        self.told: list[Any] = []
        self._address, self._carrier = address, carrier
        self._door: StoreClient | None = None
        self.life = ""
        self._native: Any = None
        self._ended = ""
        self._offers: list[dict[str, Any]] = []
        self.secret = find_key(self.made_by, key)
        self._holds = seat.is_first and hold(address, key)

    @property
    def process_group(self) -> Any:
        """The native group (torch: `ProcessGroup`), in which index i is transfer rank i.

        Raises:
            StaleStateError: The group was closed or replaced.
            BackendError: There is none, as not all ranks are torch.
        """
        self._require_own("process_group")
        if self._native is not None and not self._carrier.is_live(self._native):
            raise self._stale("process_group", "its process group ended, with the world of this process")
        if self._native is None:
            raise BackendError(NO_NATIVE.format(name=self.name, backends=listed(dict.fromkeys(self.backends))))
        return self._native

    @property
    def backends(self) -> list[str]:
        """The backend of each rank."""
        return [one["backend"] for one in self._offers]

    @property
    def has_process_group(self) -> bool:
        """Whether a native group joins all ranks."""
        return self._native is not None

    def require_live(self, where: str) -> None:
        """Refuse use after a rank left, or asked for the next generation. *Local*: asks the store.

        Raises:
            StaleStateError: Who did so is named.
        """
        self._require_own(where)
        try:
            found = self._door.ask("look", self.name) if self._door else {}
        except OSError as error:
            raise self._stale(where, f"it lost its store at {self._address[0]}:{self._address[1]} ({error})") from error
        if found.get("life") != self.life or found["generation"] != self.generation:
            raise self._stale(where, f"it was replaced by generation {found.get('generation')}")
        if found["lost"] or found["waiting"]:
            gone = f"{found['lost']} left" if found["lost"] else ""
            back = f"{found['waiting']} waits for the next generation" if found["waiting"] else ""
            raise self._stale(where, ", and ".join(part for part in (gone, back) if part))

    def join(self, said: Any, timeout_s: float) -> "TransferGroup":
        """Wait for the others and make the native group. *Collective*; called once, by `dualmesh.transfer_group`."""
        where, deadline = f"transfer_group {self.name!r}", time.monotonic() + timeout_s
        offer = {"backend": self._carrier.backend, **self._carrier.offer(self.rank)}
        while True:
            self._door = connect_to_store(where, self._address, self.secret, deadline)
            if self._ended:  # another thread of this process asked for the next generation
                self._door.close()
                raise self._stale(where, self._ended)
            left = max(deadline - time.monotonic(), 0.0)
            try:
                answer = self._door.ask("join", self.name, left, said=[offer, said], **self.seat._asdict())
                break
            except OSError as error:  # the store's process ended; it may start anew
                self._door.close()
                if time.monotonic() > deadline:
                    raise SessionError(
                        f"{where}: the store at {self._address[0]}:{self._address[1]} does not answer: {error}. Start "
                        f"its process anew.",
                        address=self._address,
                    ) from error
                time.sleep(_PAUSE_S)
        if "problem" in answer:
            raise AgreementError(
                f"{where}: {answer['problem']} Give every process the same size and a rank of its own.",
                rank=self.rank,
            )
        if "generation" not in answer:
            raise _incomplete(where, answer, timeout_s)
        self.generation, self.life = answer["generation"], answer["life"]
        self.rank, self.size = answer["rank"], len(answer["told"])
        self.hosts = [reachable(host, self._address[0]) for host, _ in answer["told"]]
        self._offers = [one[0] for _, one in answer["told"]]
        self.told = [one[1] for _, one in answer["told"]]
        self._native = self._made(where, max(deadline - time.monotonic(), 1.0))
        return self

    def close(self) -> None:
        """Leave the group and end its native group. *Local*; idempotent."""
        self.end("it was closed")

    def end(self, how: str) -> None:
        """Leave for a reason, which later uses are told. *Local*; idempotent."""
        if self._ended:
            return
        self._ended = how
        if _current.get(self.key) is self:
            del _current[self.key]
        self._carrier.end(self._native)
        self._native = None
        if self._door is not None:
            self._door.close()
        if self._holds:
            let_go(self._address)

    @property
    def key(self) -> tuple[Any, ...]:
        """What a next generation of this process takes the place of."""
        return (self.name, self.seat.side, self.seat.place, *self._address)

    def __enter__(self) -> "TransferGroup":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        life = self._ended or "live"
        return f"<TransferGroup {self.name!r}, rank {self.rank} of {self.size}, generation {self.generation}, {life}>"

    # -- inside ----------------------------------------------------------------------------------------------------

    def _made(self, where: str, timeout_s: float) -> Any:
        if len(set(self.backends)) > 1:
            return None
        name = f"dualmesh/transfer/{self.name}/{self.life}/{self.generation}"
        try:
            return self._carrier.join(name, self.rank, self.hosts, self._offers, timeout_s)
        except RuntimeError as error:
            if isinstance(error, AgreementError):
                raise
            lost = self._door.ask("look", self.name)["lost"] if self._door else ""
            raise GroupTimeoutError(
                f"{where}: the process group of generation {self.generation} could not be made on transfer rank "
                f"{self.rank}: {error}. Who left: {lost or 'nobody'}. Call it again on all.",
                timeout_s=timeout_s,
            ) from error

    def _require_own(self, where: str) -> None:
        if self._ended:
            raise self._stale(where, self._ended)

    def _stale(self, where: str, what: str) -> StaleStateError:
        return StaleStateError(
            f"{where}: TransferGroup {self.name!r}, rank {self.rank}, generation {self.generation}: {what}. Call "
            f"{self.made_by}({self.name!r}, ...) again on all its ranks.",
            group=self,
        )


_current: dict[tuple[Any, ...], TransferGroup] = {}
"""The groups of this process that were not closed."""


def transfer_group(
    name: str,
    *,
    rank: int,
    size: int,
    store: str,
    said: Any = None,
    timeout_s: float | None = None,
    backend: str | None = None,
    key: str | bytes | None = None,
) -> TransferGroup:
    """Join a group of processes of several worlds, in a rank space of its own. *Collective over its ranks.*

    A process keeps its own world, or has none. Called again, as after one side restarted, the next generation takes the
    old one's place; what is left of that raises `StaleStateError` where it is used.

    Args:
        name: The group's name, the same in all its processes.
        rank: This process' rank in the group, 0 to size - 1.
        size: How many processes join.
        store: "tcp://host:port", where they meet: transfer rank 0 serves there, unless a `dm.TransferStore` does.
        said: Plain data (JSON) that the others find in `told`.
        timeout_s: How long to wait for the others, in seconds; None: as for states.
        backend: As in `init_distributed`: the framework whose native group joins the ranks, where all have it.
        key: The secret that all processes of the group know; None: DUALMESH_TRANSFER_KEY, or that of this user on this
            machine. Who does not know it is refused.

    Raises:
        ArgumentError: The name or the address is none.
        RankError: The rank is not in the group.
        AgreementError: Processes said different sizes or communication backends, or one rank twice.
        GroupTimeoutError: Ranks did not come in time; the message names them.
        SessionError: Nobody serves at the address.

    >>> import dualmesh as dm
    >>> with dm.TransferStore() as store:
    ...     address = f"tcp://localhost:{store.port}"
    ...     with dm.transfer_group("weights", rank=0, size=1, store=address, backend="sim") as group:
    ...         group.generation
    1
    """
    where = "transfer_group"
    check_name(where, name)
    count = positive(where, "size", size)
    if count > MOST_PLACES:
        raise ArgumentError(f"{where}: size={size!r}. A group has at most {MOST_PLACES} ranks.", size=size)
    number = whole(rank)
    if number is None or not 0 <= number < count:
        raise RankError(f"{where} {name!r}: rank {rank!r} is none of its ranks. Ranks: 0..{count - 1}.", rank=rank)
    address = address_of(where, store)
    limit = waits.timeout_s() if timeout_s is None else check_timeout(where, timeout_s)
    seat = MemberPlace("", number, count, ("",))
    return join_group(TransferGroup(name, seat, address, driver_for(backend).transfer_carrier(), key), said, limit)


def check_name(where: str, name: Any) -> None:
    """Refuse what is no name of a group or link. *Pure.*"""
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
        raise ArgumentError(
            f"{where}: name={str(name)[:80]!r}. Give a text of 1 to {_LONGEST_NAME} characters.", name=name
        )


def join_group(group: TransferGroup, said: Any, timeout_s: float) -> TransferGroup:
    """Return a group once all have come; what this process had in its place ends. *Collective*, with a timeout."""
    old = _current.get(group.key)
    if old is not None:  # the new one holds the store by now, so that it goes on
        old.end("it was replaced: this process asked for the next generation")
    _current[group.key] = group
    try:
        return group.join(said, timeout_s)
    except BaseException:
        group.close()
        raise


def _incomplete(where: str, answer: dict[str, Any], timeout_s: float) -> GroupTimeoutError:
    who = listed(answer["missing"]) if answer["missing"] else "some that came earlier and gave up"
    earlier = f", and earlier, then gone: {answer['gone']}" if answer["gone"] else ""
    return GroupTimeoutError(
        f"{where}: {who} did not come within {timeout_s:g} s. Who came: {answer['came']}{earlier}. Call it on all of "
        f"them at about the same time, or raise timeout_s.",
        missing=tuple(answer["missing"]),
        timeout_s=timeout_s,
    )
