"""`JaxStore`: what the processes of a world share beside arrays, in the store in which JAX's processes met.

Agreement through it is in `agreement`, Python objects through it in `host`.
"""

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from dualmesh.errors import GroupTimeoutError, listed
from dualmesh.runtime.agreement import leave
from dualmesh_jax import private

# JAX's store counts in 32 bits; agreements count participants in the low 18 bits and sum 44 bits above them.
_COUNT_BITS = 18
_LIMB_BITS = 13
_CHUNK = 1 << 20


class JaxStore:
    """The store of one life of a world; keys begin with the session's number.

    Args:
        client: JAX's client of the store.
        session: A name that all processes give this life of the world, and no other.
        process: This process.
        wait_s: How long exchanges wait for the other processes, in seconds.
    """

    def __init__(self, client: Any, session: str, process: int, wait_s: float) -> None:
        self.process = process
        self.wait_s = wait_s
        self._client = client
        self._prefix = f"dualmesh/{session}/"
        self._rounds: dict[str, int] = {}
        self.watch: Any = None
        """Looks after what waits for other processes; see `watch`."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0; the result is exact once the low 18 bits have counted everyone.

        Who adds large amounts adds their high parts first, so that whoever sees all counted sees all of their parts.
        """
        counter, high = f"{self._prefix}{key}/count", f"{self._prefix}{key}/high/"
        limb, rest = 0, amount >> _COUNT_BITS
        while rest:
            self._client.key_value_increment(f"{high}{limb}", rest & ((1 << _LIMB_BITS) - 1))
            limb, rest = limb + 1, rest >> _LIMB_BITS
        total = int(self._client.key_value_increment(counter, amount & ((1 << _COUNT_BITS) - 1)))
        for name, value in self._client.key_value_dir_get(high):
            total += int(value) << (_COUNT_BITS + _LIMB_BITS * int(name.rsplit("/", 1)[1]))
        return total

    def set(self, key: str, value: str) -> None:
        self._client.key_value_set(self._prefix + key, value, allow_overwrite=True)

    def find(self, key: str) -> str | None:
        try:
            return str(self._client.key_value_try_get(self._prefix + key))
        except jax.errors.JaxRuntimeError as error:
            if private.has_status(error, "NOT_FOUND"):
                return None
            raise

    def settle(self, key: str, value: str) -> str:
        try:
            self._client.key_value_set(self._prefix + key, value)
        except jax.errors.JaxRuntimeError as error:
            if not private.has_status(error, "ALREADY_EXISTS"):
                raise
        return self.find(key) or value

    def wait(self, key: str, timeout_s: float, waiting: int) -> bool:
        try:
            self._client.blocking_key_value_get(self._prefix + key, _milliseconds(timeout_s))
        except jax.errors.JaxRuntimeError as error:
            if not private.has_status(error, "DEADLINE_EXCEEDED"):
                raise
            return self.find(key) is not None
        return True

    def forget(self, round_: str) -> None:
        self._client.key_value_delete(f"{self._prefix}{round_}/")

    def leave(self) -> None:
        """Leave word that this process ends its session, so that whoever waits for it hears of it. *Local.*"""
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # nobody can be told: the store is gone
            leave(self, self.process)

    def exchanged(self, where: str, processes: Sequence[int], value: bytes) -> Mapping[int, bytes]:
        """Return what every one of some processes gave. *Collective over them, in the same order, with a timeout.*

        Raises:
            GroupTimeoutError: Processes did not come in time; the message names them.
        """
        topic = f"{self._prefix}exchange/{_name(processes)}"
        number = self._rounds[topic] = self._rounds.get(topic, 0) + 1
        if number > 2:  # everyone has come to the last round, so everyone has read the one before it
            self._client.key_value_delete(f"{topic}/{number - 2}/{self.process}/")
        round_ = f"{topic}/{number}"
        for place in range(0, max(len(value), 1), _CHUNK):
            key = f"{round_}/{self.process}/{place // _CHUNK:06d}"
            self._client.key_value_set_bytes(key, value[place : place + _CHUNK])
        try:
            self._client.wait_at_barrier(round_, _milliseconds(self.wait_s), list(processes))
        except jax.errors.JaxRuntimeError as error:
            raise self._nobody_came(where, processes, self._found(round_)) from error
        return self._found(round_)

    def _found(self, round_: str) -> dict[int, bytes]:
        parts: dict[int, list[bytes]] = {}
        for key, part in sorted(self._client.key_value_dir_get_bytes(f"{round_}/")):
            parts.setdefault(int(key.rsplit("/", 2)[1]), []).append(part)
        return {process: b"".join(chunks) for process, chunks in parts.items()}

    def _nobody_came(self, where: str, processes: Sequence[int], came: Mapping[int, bytes]) -> GroupTimeoutError:
        missing = [process for process in processes if process not in came]
        away, every = describe_processes(missing), describe_processes(processes)
        return GroupTimeoutError(
            f"{where}: {away} did not come within {self.wait_s:g} s, of {every}, which must all call it, in the same "
            f"order. Who came: {listed(sorted(came))}. If that is too short, raise timeout_s of "
            f"dm.init_distributed, or DUALMESH_TIMEOUT_S.",
            missing=tuple(missing),
            timeout_s=self.wait_s,
        )


def open_store(wait_s: float) -> JaxStore | None:
    """Return the store for a new life of the world, or None: one process, or this JAX has none. *Local.*

    Each process counts the lives of the world in which it took part, so all give one life the same number.
    """
    client = private.store_client()
    if client is None or jax.process_count() == 1:
        return None
    process = jax.process_index()
    session = client.key_value_increment(f"dualmesh/worlds/{process}", 1)
    return JaxStore(client, str(session), process, wait_s)


def _name(processes: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, processes)).encode()).hexdigest()[:16]


def describe_processes(numbers: Sequence[int]) -> str:
    """Return processes as messages show them. *Pure.*"""
    return f"{'process' if len(numbers) == 1 else 'processes'} {listed(numbers)}"


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))
