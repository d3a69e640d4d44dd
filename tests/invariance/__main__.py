"""Every split of 8 ranks, form, number of micro-batches and dtype: python -m tests.invariance [FORM ...].

Writes the table of docs/invariance.md, keeping the columns of forms that are not run, and leaves with 1 when anything
is farther from the oracle than it may be.
"""

import sys
import time
from pathlib import Path

from tests.invariance import reference
from tests.invariance.comparison import LIMITS
from tests.invariance.splits import every, named
from tests.invariance.training import FORMS, compared, job

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "invariance.md"
BEGIN = "<!-- table: python -m tests.invariance -->"
AT_ONCE = 7
COLUMNS = [(form, dtype) for form in FORMS for dtype in LIMITS]


def main(forms):
    """Run the forms and write the table; return whether all is well."""
    table = read()
    for form in forms:
        splits, expected, begun = every(), reference.trained(), time.monotonic()
        for first in range(0, len(splits), AT_ONCE):
            some = splits[first : first + AT_ONCE]
            jobs = [job(form, split, n, dtype) for split in some for n in (1, 2) for dtype in LIMITS]
            for one, (_, by) in compared(jobs, expected).items():
                row = table.setdefault(named(dict(one.split)), {})
                row.setdefault((form, one.dtype), []).append(by)
            print(f"{form}: {first + len(some)}/{len(splits)} splits, {time.monotonic() - begun:.0f} s", flush=True)
        for row in table.values():
            row |= {key: f"{max(values):.0e}" for key, values in row.items() if key[0] == form}
        write(table)
    numbers = [(split, key, float(value)) for split, row in table.items() for key, value in row.items() if value]
    wrong = [(split, *key, value) for split, key, value in numbers if not value <= LIMITS[key[1]]]
    print(f"{len(numbers)} columns of {len(table)} splits; beyond the limit: {wrong}")
    return not wrong


def read():
    """Return {split: {(form, dtype): number}} of the document."""
    lines = DOCUMENT.read_text().split(BEGIN)[1].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")][2:]
    return {row[0]: dict(zip(COLUMNS, row[1:], strict=True)) for row in rows}


def write(table):
    """Put the table into the document."""
    lines = ["| split | " + " | ".join(f"{form} {dtype}" for form, dtype in COLUMNS) + " |"]
    lines.append("|---" * (len(COLUMNS) + 1) + "|")
    for split, row in table.items():
        lines.append(f"| {split} | " + " | ".join(row.get(key, "") for key in COLUMNS) + " |")
    text = DOCUMENT.read_text().split(BEGIN)[0]
    DOCUMENT.write_text(text + BEGIN + "\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(0 if main(sys.argv[1:] or FORMS) else 1)
