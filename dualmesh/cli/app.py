"""The app: which command is meant, its flags, its answer, and the code that the process ends with.

What each command answers is in its own module.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dualmesh._support.optional_imports import import_optional
from dualmesh.cli import check, doctor, draw, plan, show
from dualmesh.cli.command_flags import Flag, read_flags, words
from dualmesh.cli.report import ABSENT, EXTRA, USAGE, Report, print_answer
from dualmesh.errors import ArgumentError, DualmeshError, MissingPackageError, did_you_mean, listed

CODES = """\
Exit codes: 0 all is well; 1 a problem was found (check, doctor); 2 the question is wrong: an unknown command or flag,
sizes that do not fit; 3 a package is missing."""


class Command(NamedTuple):
    """A command by name."""

    run: Callable[[Any, Sequence[str]], Report]
    summary: str
    flags: Sequence[Flag]
    takes_topology: bool
    argument: str = ""


COMMANDS = {
    "show": Command(show.show, show.SUMMARY, show.FLAGS, True),
    "draw": Command(draw.draw, draw.SUMMARY, draw.FLAGS, True),
    "plan": Command(plan.plan, plan.SUMMARY, plan.FLAGS, True),
    "doctor": Command(doctor.doctor, doctor.SUMMARY, doctor.FLAGS, False),
    "check": Command(check.check, check.SUMMARY, check.FLAGS, False, "FILE"),
}
_HELP = ("help", "-h", "--help", "-help", "--helpfull")


def main() -> None:
    """Answer the command line of this process, and end it. *Local.*"""
    try:
        app, flags = (
            import_optional("absl.app", "absl-py", "dualmesh", EXTRA),
            import_optional("absl.flags", "absl-py", "dualmesh"),
        )
    except MissingPackageError as error:
        sys.exit(_report_refusal(error, "--json" in sys.argv))

    def leave(argv: Sequence[str]) -> Sequence[str]:
        """Leave the flags to the command, for they are its own."""
        flags.FLAGS(argv[:1])
        return argv

    app.run(lambda argv: _run(argv[1:]), flags_parser=leave)


def _run(argv: Sequence[str]) -> int:
    """Run, also for a reader that goes when it has enough, as `head` does."""
    try:
        code = run(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at its end
        return 0
    return code


def run(argv: Sequence[str]) -> int:
    """Answer a command line, print the answer, and return the exit code. *Local.*

    >>> run(["draw", "--dp=2", "--spec=tp2", "--world-size=2", "--state=a", "--json"])  # doctest: +ELLIPSIS
    {"error": "...", "kind": "SpecError", "code": 2}
    2
    """
    as_json = "--json" in argv
    try:
        name, rest = _split_command(argv)
        if name is None or any(word in _HELP for word in rest):
            sys.stdout.write(_help(name))
            return 0
        command = COMMANDS[name]
        values, arguments = read_flags(name, command.flags, command.takes_topology, rest)
        if arguments and not command.argument:
            raise ArgumentError(f"dualmesh {name}: {listed(arguments)} is no flag. Flags begin with --.")
        report = command.run(values, arguments)
        print_answer(report, values["json"].value)
        return report.code
    except DualmeshError as error:
        return _report_refusal(error, as_json)


def _split_command(argv: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """Return the command's name, which stands first, and what follows; None where help is asked for."""
    if not argv or argv[0] in _HELP:
        following = argv[1:2]
        return (following[0], _HELP[:1]) if following and following[0] in COMMANDS else (None, ())
    name = argv[0]
    if name not in COMMANDS:
        raise ArgumentError(
            f"dualmesh: no command {name!r}. Commands: {listed(COMMANDS)}.{did_you_mean(name, COMMANDS)}", command=name
        )
    return name, argv[1:]


def _report_refusal(error: DualmeshError, as_json: bool) -> int:
    code = ABSENT if isinstance(error, MissingPackageError) else USAGE
    if as_json:
        sys.stdout.write(json.dumps({"error": str(error), "kind": type(error).__name__, "code": code}) + "\n")
    else:
        sys.stderr.write(f"{error}\n")
    return code


def _help(name: str | None) -> str:
    if name is None:
        lines = [f"  {command:<8}{known.summary}" for command, known in COMMANDS.items()]
        start = "dualmesh COMMAND [flags]: parallel topologies, seen before they are launched.\n\n"
        return start + "\n".join(lines) + f"\n\ndualmesh COMMAND --help lists its flags.\n{CODES}\n"
    known = COMMANDS[name]
    flags = [f"  {flag:<28}{text}" for flag, text in words(known.flags, known.takes_topology)]
    usage = " ".join(["dualmesh", name, *([known.argument] if known.argument else []), "[flags]"])
    return f"{usage}: {known.summary}.\n\n" + "\n".join(flags) + f"\n\n{CODES}\n"
