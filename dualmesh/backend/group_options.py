"""Options of process groups: which there are, and what they may be.

A state's options hold for all of its groups, those of combined axes and views included; what they do is in the
backends. Frameworks without process groups have nothing to set.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dualmesh._support.waits import is_duration
from dualmesh.errors import ArgumentError, did_you_mean, listed
from dualmesh.topology.communicators import Lane

GroupOptions = tuple[tuple[str, Any], ...]

_OPTIONS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "timeout_s": (lambda value: is_duration(value), "seconds above 0"),
    "is_high_priority": (lambda value: isinstance(value, bool), "True or False"),
}


def check_options(options: Mapping[str, Any] | None) -> GroupOptions:
    """Return options as sorted pairs, alike for equal settings, or refuse them. *Pure.*

    Raises:
        ArgumentError: An option is unknown or has a value of another kind.

    >>> check_options({"timeout_s": 60, "is_high_priority": True})
    (('is_high_priority', True), ('timeout_s', 60.0))
    """
    if options is None:
        return ()
    if not isinstance(options, Mapping):
        raise ArgumentError(
            f"group_options: found {options!r}. Give a mapping of options to values, from: {listed(_OPTIONS)}.",
            group_options=options,
        )
    for name, value in options.items():
        if name not in _OPTIONS:
            raise ArgumentError(
                f"group_options: {name!r} is unknown. Options: {listed(_OPTIONS)}.{did_you_mean(name, _OPTIONS)}",
                option=name,
            )
        allows, allowed = _OPTIONS[name]
        if not allows(value):
            raise ArgumentError(f"group_options: {name}={value!r}. Give {allowed}.", option=name, value=value)
    return tuple(sorted((name, float(value) if name == "timeout_s" else value) for name, value in options.items()))


class GroupInUse(NamedTuple):
    """One group of ranks that communicate."""

    ranks: tuple[int, ...]
    """Session ranks, in index order."""
    lane: Lane
    """"data": collectives of the program; "param": reductions that wrappers issue from hooks."""
    backend: str
    """What communicates, for example "gloo" or "nccl"."""
    device_type: str
    options: GroupOptions
    name: str
    """How the framework calls it."""
    states: tuple[str, ...]
    """The names of the states that use it."""
