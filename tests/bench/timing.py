"""Timing one statement against a floor in the same run: interleaved repeats, the best of each.

The best is what the machine can do; what other work adds to a repeat is not the statement's.
"""

import json
import os
import time
from collections.abc import Callable, Mapping

Loop = Callable[[int], None]


def interleaved(loops: Mapping[str, Loop], *, number: int, repeats: int = 15) -> dict[str, float]:
    """Return the best seconds per pass of each loop; `loop(n)` does n passes."""
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for loop in loops.values():
        loop(number)
    for _ in range(repeats):
        for name, loop in loops.items():
            start = time.perf_counter()
            loop(number)
            seconds[name].append((time.perf_counter() - start) / number)
    return {name: min(times) for name, times in seconds.items()}


def repeated(statement: str, names: Mapping[str, object]) -> Loop:
    """Return a loop around a statement, compiled so that only the statement is timed."""
    body = "\n        ".join(statement.splitlines())
    source = f"def loop(n):\n    for _ in range(n):\n        {body}\n"
    space = dict(names)
    exec(compile(source, "<bench>", "exec"), space)
    loop = space["loop"]
    return loop  # type: ignore[return-value]


def table(title: str, seconds: Mapping[str, float], floors: Mapping[str, str]) -> None:
    """Print nanoseconds and the ratio to each row's floor."""
    print(f"\n{title}")
    for name, value in seconds.items():
        floor = floors.get(name)
        ratio = f"{value / seconds[floor]:6.2f} x {floor}" if floor else "  floor"
        print(f"  {name:42s} {value * 1e9:10.0f} ns  {ratio}")
        record(title, name, value, floor, seconds[floor] if floor else None)


def record(title: str, name: str, seconds: float, floor: str | None = None, floor_s: float | None = None) -> None:
    """Keep one measurement for `python -m tests.bench`, which names the file."""
    path = os.environ.get("DUALMESH_BENCH_ROWS")
    if path:
        row = {"title": title, "name": name, "seconds": seconds, "floor": floor, "floor_s": floor_s}
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")
