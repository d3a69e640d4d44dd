"""Make every fault and write the table in docs/faults.md: `python -m tests.faults [name ...]`."""

import sys
from pathlib import Path

from tests.faults.fault import wrong
from tests.faults.runs import BACKENDS, made_in

MARK = "<!-- the table is written by python -m tests.faults -->\n"
PAGE = Path(__file__).parents[2] / "docs" / "faults.md"


def rows(faults, outcomes):
    """Yield the lines of the table."""
    for name, ended in outcomes.items():
        fault = faults[name]
        survivors = [one for one in ended.values() if one.kind != "dies"]
        told = dict.fromkeys(_told(fault, one) for one in survivors)
        seconds = max((one.seconds for one in survivors), default=0.0)
        waits = f"{fault.timeout_s:g}" if fault.timeout_s < 30 else "-"
        yield f"| {fault.backend} | {fault.what} | {fault.world} | {waits} | {seconds:.1f} | {', '.join(told)} |\n"


def _told(fault, outcome):
    if fault.exit_code and outcome.exit_code == fault.exit_code:
        return f"ended with exit code {fault.exit_code}"
    return outcome.kind or "none"


def main(names):
    """Make the faults, all or those named; say what is wrong; write the table when all were made."""
    lines, bad = [], []
    for backend, faults in BACKENDS.items():
        wanted = [name for name in faults if not names or name in names]
        outcomes = made_in(backend, wanted)
        for name, ended in outcomes.items():
            bad += [f"{backend} {name}: {one}" for one in wrong(faults[name], ended)]
        lines += rows(faults, outcomes)
    if not names and not bad:
        head = PAGE.read_text().partition(MARK)[0]
        top = "| backend | fault | ranks | timeout, s | longest, s | error |\n| --- | --- | --- | --- | --- | --- |\n"
        PAGE.write_text(head + MARK + "\n" + top + "".join(lines))
    print("".join(lines), *bad, f"{len(lines)} faults, {len(bad)} wrong", sep="\n")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
