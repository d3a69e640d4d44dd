"""Every error that dualmesh raises, and how a wrong name is answered.

What a message says is decided where the fault is found; only its class and its shape are decided here.
"""

import difflib
from collections.abc import Iterable
from typing import Any


def refusing() -> None:
    """Do nothing: a backend whose framework traces Python learns here that what it traces is refused. *Pure.*"""


class DualmeshError(Exception):
    """Base of all dualmesh errors; the offending values are attributes of the instance.

    >>> DualmeshError("State 'a' has no axis 'b'.", axis="b").axis
    'b'
    """

    def __init__(self, message: str, **values: Any) -> None:
        refusing()
        super().__init__(message)
        self.__dict__.update(values)

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__} carries no value {name!r}. It carries: {_listed(self.__dict__)}.")


class SpecError(DualmeshError, ValueError):
    """A topology that cannot be: sizes, names, views or combined axes that do not fit."""


class UnknownAxisError(DualmeshError, KeyError):
    """An axis that the topology does not have."""


class RankError(DualmeshError, ValueError):
    """A rank outside the world, or a question that needs one rank asked where a process holds several."""


class UnknownStateError(DualmeshError, ValueError):
    """A state name that is not registered."""


class TakenNameError(DualmeshError, ValueError):
    """A state name that already means other sizes, in strict mode."""


class NoStateError(DualmeshError, RuntimeError):
    """Communication asked for in a world of several processes before any state was registered."""


class StaleStateError(DualmeshError, RuntimeError):
    """A state used after its session ended."""


class MembershipError(DualmeshError, RuntimeError):
    """Communication asked for by a rank that is not a member."""


class ScopeError(DualmeshError, RuntimeError):
    """Scopes left out of order, or storages of the ambient state that disagree."""


class SessionError(DualmeshError, RuntimeError):
    """A world that cannot be started, adopted or ended as asked."""


class LaunchError(DualmeshError, ValueError):
    """Launcher or dualmesh environment variables that are half set, malformed or contradict each other."""


class BackendError(DualmeshError, RuntimeError):
    """No backend could be chosen, or the chosen one cannot do what was asked."""


class BackendImportError(DualmeshError, ImportError):
    """A backend that is not installed or does not import."""


class MissingPackageError(DualmeshError, ImportError):
    """An optional package that is not installed."""


class ArgumentError(DualmeshError, ValueError):
    """An argument outside what the function allows."""


class ShapeError(DualmeshError, ValueError):
    """A dim out of range, a size that does not divide, shapes that do not match."""


class ArrayTypeError(DualmeshError, TypeError):
    """An array of another framework, or a dtype that the operation does not define."""


class ShardingError(DualmeshError, ValueError):
    """A sharding that cannot be expressed or that the value does not have."""


class NotDifferentiableError(DualmeshError, RuntimeError):
    """A gradient asked of an operation that has none."""


class OutsideShardMapError(DualmeshError, RuntimeError):
    """A per-rank operation used where no rank is defined."""


class OutsideCompileError(DualmeshError, RuntimeError):
    """Something that compiled code cannot do, and that must happen before."""


class AgreementError(DualmeshError, RuntimeError):
    """Ranks that do not agree on what they build."""


class GroupTimeoutError(DualmeshError, TimeoutError):
    """A wait for other ranks that ran out."""


class LostPeerError(DualmeshError, RuntimeError):
    """A rank that died or left while others exchanged something with it."""


class WorkerError(DualmeshError, RuntimeError):
    """A worker process of `dualmesh.testing` raised, died or did not answer; `errors` maps worker to exception."""


class DifferenceError(DualmeshError, AssertionError):
    """Two runs that should compute the same do not; `differences` lists what differs, first one first."""


class RecordingError(DualmeshError, ValueError):
    """A recording that is missing, incomplete, of another format, or already there."""


class ChecksumError(DualmeshError, RuntimeError):
    """Bytes that arrived other than they were sent; `messages` lists them."""


class NonFiniteError(DualmeshError, RuntimeError):
    """A norm that is NaN or infinite, where that is refused."""


class StateWarning(UserWarning):
    """Something legal about states that is probably not meant."""


def _listed(names: Iterable[object]) -> str:
    return ", ".join(str(name) for name in names) or "none"


def listed(names: Iterable[object], limit: int = 20) -> str:
    """Write names for a message: comma separated, 'none' when empty, cut after `limit`.

    >>> listed(["dp", "tp"])
    'dp, tp'
    """
    names = list(names)
    shown = _listed(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def did_you_mean(name: object, options: Iterable[str]) -> str:
    """Write " Did you mean 'x'?" for the option closest to `name`, or nothing.

    >>> did_you_mean("spp", ["dp", "sp"])
    " Did you mean 'sp'?"
    """
    found = closest(name, options)
    return f" Did you mean {found!r}?" if found is not None else ""


def closest(name: object, options: Iterable[str]) -> str | None:
    """Return the option that a name is most like, or None. *Pure.*"""
    refusing()
    close = difflib.get_close_matches(str(name), map(str, options), n=1)
    return close[0] if close else None


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Write a count with its noun in the right number; the plural is the noun with an s unless it is given.

    >>> counted(1, "rank"), counted(3, "rank"), counted(2, "axis", "axes")
    ('1 rank', '3 ranks', '2 axes')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {plural or f'{noun}s'}"
