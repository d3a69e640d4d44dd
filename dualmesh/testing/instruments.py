"""`Instruments`: what tests need of a backend beyond the contract, and where a backend keeps it.

A backend's package brings them in a module `testing`, as its class `Instruments`; one that brings none gets the
defaults here, which say what is missing where it is asked for.
"""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from dualmesh.backend import discovery
from dualmesh.backend.state import ParallelState
from dualmesh.errors import BackendError


class Held(NamedTuple):
    """What one rank really holds of a global array: its block, and which positions of every dim that is."""

    rank: int
    positions: tuple[tuple[int, ...], ...]
    block: Any
    """A numpy array; None where only the layout was asked for."""


class Instruments:
    """How tests look into arrays, programs and leftovers of one backend."""

    name = "this backend"
    differentiates = True
    """Whether `dm.value_and_grad` works."""

    def held(self, state: ParallelState, x: Any) -> list[Held]:
        """Return what each rank of this process really holds of a global array. *Collective over the state.*

        Raises:
            ShardingError: It is no global array, or a value still to be summed.
        """
        raise self._missing("shards")

    def watched(
        self,
        state: ParallelState,
        x: Any,
        value: Callable[[int, Any], None],
        gradient: Callable[[], Callable[[int, Any], None]] | None,
    ) -> Any:
        """Return a per-rank block unchanged, and call `value(rank, numpy block)` when it is computed. *Local.*

        `gradient()` is called where the backward is traced or runs; what it returns gets the rank and the cotangent.
        """
        raise self._missing("taps")

    def finished(self) -> None:
        """Return once everything that `watched` started has been called. *Local.*"""

    def retraced(self, key: tuple[Any, ...]) -> AbstractContextManager[None]:
        """Return a context in which compiled programs that were made outside of it (or of its equal) are not used."""
        return nullcontext()

    def compiled(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function as trainers run a step: jitted on JAX, as it is elsewhere. *Local.*"""
        return fn

    def leave_together(self) -> None:
        """Return once every process of the world is here. *Collective over all processes.*"""

    def ended(self) -> bool:
        """Free what holds on to a world that ended, where that costs later ones time. *Local.*

        Returns:
            Whether so much is left that later worlds should run in a fresh process.
        """
        return False

    def leftovers(self) -> dict[str, object]:
        """Return what this process holds of the framework's ambient state now, for comparing. *Local.*"""
        return {}

    def untouched(self) -> dict[str, object]:
        """Return what `leftovers` returns of these where nothing was ever left, for backends first used in a test."""
        return {}

    def _missing(self, what: str) -> BackendError:
        return BackendError(
            f"dualmesh.testing: {self.name} shows no {what} to tests. Its package needs a module `testing` with a "
            f"class Instruments(dualmesh.testing.Instruments).",
            backend=self.name,
        )


_known: dict[str, Instruments] = {}


def instruments_of(backend: str) -> Instruments:
    """Return the instruments of a backend, imported when first asked for. *Local.*"""
    if backend not in _known:
        _known[backend] = _find(backend)
        _known[backend].name = f"backend {backend!r}"
    return _known[backend]


def _find(backend: str) -> Instruments:
    package = type(discovery.load(backend)).__module__.partition(".")[0]
    try:
        module = importlib.import_module(f"{package}.testing")
    except ModuleNotFoundError as error:
        if error.name != f"{package}.testing":
            raise
        return Instruments()
    made: Instruments = module.Instruments()
    return made
