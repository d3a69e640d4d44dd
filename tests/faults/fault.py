"""`Fault`: something that ranks do wrong together, and how it must end."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

GRACE_S = 5.0
"""How long beyond its timeout a fault may take to end."""


@dataclass(frozen=True)
class Fault:
    """A program with a mistake in it, run as every rank of a world."""

    what: str
    """For the table: what one rank does."""
    body: Callable[[int], Any]
    kind: str
    """The error on every rank that is not named otherwise; "|" between several that it may be."""
    parts: tuple[str, ...] = ()
    """What its message must name."""
    at: Mapping[int, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    """Other ranks' error and parts; "" for no error, "dies" for a rank that does not live to have one."""
    world: int = 4
    devices: int = 2
    """How many devices, each a rank, a process of JAX holds."""
    timeout_s: float = 30.0
    """How long ranks wait for each other; short where the fault makes them wait."""
    has_world: bool = True
    """Whether the world runs before the body."""
    debug: bool = False
    backend: str = "torch"
    leaves: bool = False
    """Whether a rank leaves the world as soon as it is through, whatever the others do."""
    exit_code: int = 0
    """What surviving processes end with: not 0 where the message is on stderr, since the process had to end."""

    def wanted(self, rank: int) -> tuple[str, tuple[str, ...]]:
        """Return the error of a rank, and what its message names."""
        return self.at.get(rank, (self.kind, self.parts))


@dataclass
class Outcome:
    """How one rank ended."""

    kind: str = "hung"
    """The error's class, "" for none, "dies" for a process that ended without an answer, "hung" for one that had to be
    killed."""
    lineage: tuple[str, ...] = ()
    text: str = ""
    seconds: float = 0.0
    exit_code: int = 0
    left: bool = False
    """Whether processes of it were left behind."""


def wrong(fault: Fault, outcomes: Mapping[int, Outcome]) -> list[str]:
    """Return what is not as it must be, in words."""
    found = []
    for rank, outcome in outcomes.items():
        kind, parts = fault.wanted(rank)
        if outcome.left:
            found.append(f"rank {rank} left processes behind")
        if outcome.kind == "dies" and fault.exit_code and outcome.exit_code == fault.exit_code:
            outcome.kind = kind  # the message came on stderr
        if outcome.kind not in kind.split("|"):
            found.append(f"rank {rank}: {outcome.kind or 'no error'} instead of {kind or 'no error'}: {outcome.text}")
        if outcome.kind in ("", "dies", "hung"):
            continue
        if "DualmeshError" not in outcome.lineage and rank not in fault.at and not fault.exit_code:
            found.append(f"rank {rank}: {kind} is no DualmeshError")
        found += [f"rank {rank}: {part!r} is not in: {outcome.text}" for part in parts if part not in outcome.text]
        if outcome.seconds > fault.timeout_s + GRACE_S:
            found.append(f"rank {rank}: {outcome.seconds:.1f} s are more than {fault.timeout_s:g} + {GRACE_S:g}")
    return found
