"""`python -m tests.fuzz [inputs]`: 20,000 random inputs over all targets, other ones each time."""

import sys
import traceback

from tests.fuzz.run import fuzzed
from tests.fuzz.targets import TARGETS


def main(total: int) -> int:
    """Try that many inputs; print what each target came to."""
    tried, bad = 0, 0
    for name in TARGETS:
        try:
            count = fuzzed(name, -(-total // len(TARGETS)), derandomize=False)
        except AssertionError as error:
            bad += 1
            cause = error.__cause__
            where = traceback.extract_tb(cause.__traceback__)[-1] if cause is not None else ""
            print(f"{name}: {str(error)[:1000]}\n    {where}")
        else:
            tried += count
            print(f"{name}: {count} inputs")
    print(f"{tried} inputs, {bad} targets with faults")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000))
