"""All benches as one command: `python -m tests.bench [NAME ...] [--out FOLDER]`.

Each bench runs in a process of its own and compares with the fastest equivalent written by hand, in the same run. What
they found is written as a table (bench.md), as data (bench.json) and as a plot (bench.png).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.bench import report

BENCHES = ("ambient", "collectives", "debugging", "jax_dispatch", "link", "topology_scale")


def main() -> None:
    """Run the benches that were named, or all, and write what they found."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(BENCHES)}; else all")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="where the results go")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in BENCHES]
    if unknown:
        parser.error(f"no bench {', '.join(unknown)}. Benches: {', '.join(BENCHES)}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.jsonl")
        file.touch()
        for name in arguments.names or BENCHES:
            command = [sys.executable, "-W", "ignore", "-m", f"tests.bench.{name}"]
            ended = subprocess.run(command, env={**os.environ, "DUALMESH_BENCH_ROWS": str(file)}, check=False)
            if ended.returncode:
                print(f"{name} ended with code {ended.returncode}", file=sys.stderr)
        rows = [report.Row(**json.loads(line)) for line in file.read_text().splitlines()]
    arguments.out.mkdir(parents=True, exist_ok=True)
    report.write(rows, report.machine(), arguments.out)
    print(f"\nWrote {arguments.out / 'bench.md'}, bench.json and bench.png")


if __name__ == "__main__":
    main()
