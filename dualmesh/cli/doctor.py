"""`dualmesh doctor`: is this machine fit to run, and if not, what to do.

What is looked at is in `diagnosis` (no framework needed) and `framework_probes`.
"""

import os
from collections.abc import Sequence
from typing import Any

from dualmesh.cli.command_flags import NODES, WORLD, Flag
from dualmesh.cli.diagnosis import Finding, frameworks, installed_version, packages, ports, variables
from dualmesh.cli.framework_probes import looked_at
from dualmesh.cli.report import PROBLEM, Report, Table
from dualmesh.errors import ArgumentError, counted, did_you_mean, listed
from dualmesh.topology.resolve import positive

SUMMARY = "versions, devices, environment, two ranks per framework; what is wrong and how to mend it"
FLAGS = (
    WORLD,
    NODES,
    Flag("imports", "string", "modules of the trainer, comma separated: does importing them start a framework"),
    Flag("frameworks", "string", "which to look at, comma separated; else all that are installed"),
    Flag("smoke", "boolean", "whether two ranks of each framework add up numbers", True),
    Flag("timeout_s", "float", "seconds that each answer of a framework may take", 120.0),
)


def doctor(values: Any, arguments: Sequence[str]) -> Report:
    """Answer `dualmesh doctor`. *Local.*"""
    found = [*packages(), *variables(os.environ), *ports(os.environ)]
    modules = _items(values["imports"].value)
    names = _chosen(_items(values["frameworks"].value))
    here = _ranks_here(values["world_size"].value, values["gpus_per_node"].value)
    found += looked_at(names, modules, here, values["timeout_s"].value, values["smoke"].value)
    problems = [finding for finding in found if finding.status == "problem"]
    data = {"is_well": not problems, "findings": [finding._asdict() for finding in found]}
    verdict = f"{counted(len(problems), 'problem')} found." if problems else "All is well."
    return Report(data, [_table(found), verdict], PROBLEM if problems else 0)


def _table(found: Sequence[Finding]) -> Table:
    marks = {"ok": "ok", "note": "note", "problem": "PROBLEM"}
    rows = [
        (finding.check, marks[finding.status], finding.found + (f"\n-> {finding.cure}" if finding.cure else ""))
        for finding in found
    ]
    return Table(("looked at", "", "found"), rows)


def _items(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _chosen(names: Sequence[str]) -> list[str]:
    known = frameworks()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ArgumentError(
            f"dualmesh doctor: --frameworks={listed(names)}. Known: {listed(known)}.{did_you_mean(unknown[0], known)}"
        )
    return list(names) or [name for name in known if installed_version(name) is not None]


def _ranks_here(world_size: int | None, per_node: int | None) -> int | None:
    """Return how many ranks this machine is to hold: as launched, or as asked."""
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    launched = int(said) if said.isdecimal() else None
    named = {"world_size": world_size, "gpus_per_node": per_node}
    asked = [positive("dualmesh doctor", name, count) for name, count in named.items() if count is not None]
    return min(asked) if asked else launched
