"""The flags of a command, defined with absl, and a command line read by them.

Flags that describe topologies are those of `dualmesh.config.flags`, under shorter names too.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from dualmesh._support.optional_imports import import_optional
from dualmesh.cli.report import EXTRA
from dualmesh.config import flags as parallel_flags
from dualmesh.config.schema import BY_NAME, ENDING, FIELDS, canonical
from dualmesh.errors import ArgumentError, closest, listed

ALIASES: Mapping[str, str] = {
    "config": parallel_flags.FILE[0],
    "state": parallel_flags.NAME[0],
    "spec": parallel_flags.SPEC[0],
}
"""Shorter names of flags that a training script shares with others, and this command line does not."""


class Flag(NamedTuple):
    """A flag of a command."""

    name: str
    kind: Literal["integer", "float", "string", "boolean"]
    help: str
    default: Any = None
    short: str | None = None


JSON = Flag("json", "boolean", "print plain data as JSON instead of tables", False)
WORLD = Flag("world_size", "integer", "ranks in the world; may be left out where all sizes are given")
NODES = Flag("gpus_per_node", "integer", "consecutive ranks on each node; else the configuration's, else 8")


def read_flags(command: str, own: Sequence[Flag], takes_topology: bool, given: Sequence[str]) -> tuple[Any, list[str]]:
    """Return the parsed flags of a command and what stands beside them. *Local.*

    Args:
        command: The name of the command, for messages.
        own: Its flags.
        takes_topology: Whether it takes the flags that describe topologies, too.
        given: The command line after the name.

    Raises:
        ArgumentError: A flag that the command does not have, or a value that the flag cannot have.
        MissingPackageError: absl is not installed.
    """
    flags = import_optional("absl.flags", "absl-py", "dualmesh", EXTRA)
    values = flags.FlagValues()
    if takes_topology:
        parallel_flags.define_parallel_flags(values)
    for flag in (*own, JSON):
        define = getattr(flags, f"DEFINE_{flag.kind}")
        define(flag.name, flag.default, flag.help, short_name=flag.short, flag_values=values, module_name="dualmesh")
    switches = [flag.name for flag in (*own, JSON) if flag.kind == "boolean"]
    names = [flag.name for flag in (*own, JSON)]
    names += [field.name for field in FIELDS] + [name for name, _ in parallel_flags.OTHERS] if takes_topology else []
    try:
        rest = values(["dualmesh", *_canonical(command, given, names, switches)])
    except flags.Error as error:
        raise ArgumentError(f"dualmesh {command}: {_sentence(str(error))}") from None
    return values, rest[1:]


def words(own: Sequence[Flag], takes_topology: bool) -> list[tuple[str, str]]:
    """Return every flag of a command as one writes it, with its help. *Pure.*"""
    lines = [(_write_flag(flag), flag.help) for flag in own]
    if takes_topology:
        lines += [(f"--{_with_dashes(field.name.removesuffix(ENDING))}", field.help) for field in FIELDS]
        short = {full: name for name, full in ALIASES.items()}
        lines += [(f"--{short[name]}", text) for name, text in parallel_flags.OTHERS]
    return [*lines, (_write_flag(JSON), JSON.help)]


def _canonical(command: str, given: Iterable[str], names: Sequence[str], switches: Sequence[str]) -> list[str]:
    """Return a command line with every flag by its full name: --dp-shard is --dp_shard_size."""
    short = {full: name for name, full in ALIASES.items()}
    known = [short.get(name, name.removesuffix(ENDING) if name in BY_NAME else name) for name in names]
    found: list[str] = []
    given = iter(given)
    for word in given:
        if word == "--":
            return [*found, word, *given]
        if word.startswith("--"):
            key, mark, value = word[2:].partition("=")
            name = key.replace("-", "_")
            is_negated = name.startswith("no") and name.removeprefix("no") in switches
            full = name if is_negated else canonical(ALIASES.get(name, name), names)
            if full is None:
                raise ArgumentError(f"dualmesh {command}: no flag --{key}.{_closest(name, known)}", flag=key)
            word = f"--{full}{mark}{value}"
        found.append(word)
    return found


def _closest(name: str, known: Sequence[str]) -> str:
    found = closest(_with_dashes(name), [_with_dashes(one) for one in known])
    return (
        f" Did you mean --{found}?"
        if found is not None
        else f" Known: {listed([f'--{_with_dashes(one)}' for one in known])}."
    )


def _write_flag(flag: Flag) -> str:
    return ", ".join([*([f"-{flag.short}"] if flag.short else []), f"--{_with_dashes(flag.name)}"])


def _with_dashes(name: str) -> str:
    return name.replace("_", "-")


def _sentence(text: str) -> str:
    """Return absl's message in one line; its name for the flags' home is not for people."""
    return " ".join(text.split())
