"""Every split of 8 ranks, form, number of micro-batches and dtype: python -m tests.invariance [--missing] [FORM ...].

Writes the table of docs/invariance.md as it goes, keeping the columns of forms that are not run, and leaves with 1 when
anything is farther from the oracle than it may be. --missing runs what has no number in the table yet.
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


def main(forms, only_missing):
    """Run the forms and write the table; return whether all is well."""
    table = {named(split): {} for split in every()} | read()
    expected, begun = reference.trained(), time.monotonic()
    for form in forms:
        splits = [split for split in every() if not only_missing or not table[named(split)].get((form, "float32"))]
        for first in range(0, len(splits), AT_ONCE):
            run(form, splits[first : first + AT_ONCE], expected, table)
            write(table)
            print(f"{form}: {first + AT_ONCE} of {len(splits)} splits, {time.monotonic() - begun:.0f} s", flush=True)
    numbers = [(split, *key, float(value)) for split, row in table.items() for key, value in row.items() if value]
    wrong = [one for one in numbers if not one[-1] <= LIMITS[one[2]]]
    print(f"{len(numbers)} numbers, {len(table) * len(COLUMNS) - len(numbers)} missing; beyond the limit: {wrong}")
    return not wrong


def run(form, splits, expected, table):
    """Run some splits with everything, and note the largest difference of each."""
    jobs = [job(form, split, n, dtype) for split in splits for n in (1, 2) for dtype in LIMITS]
    found = compared(jobs, expected)
    for split in splits:
        for dtype in LIMITS:
            far = [by for one, (_, by) in found.items() if dict(one.split) == split and one.dtype == dtype]
            table[named(split)][form, dtype] = f"{max(far):.0e}"


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
    asked = [word for word in sys.argv[1:] if word != "--missing"]
    sys.exit(0 if main(asked or FORMS, "--missing" in sys.argv) else 1)
