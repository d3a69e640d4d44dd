"""What the benches found, as a table, as data and as a plot."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

PACKAGES = ("dualmesh-topology", "numpy", "torch", "jax")


@dataclass(frozen=True)
class Row:
    """One measurement; the floor is the fastest equivalent written by hand, measured in turns with it."""

    title: str
    name: str
    seconds: float
    floor: str | None = None
    floor_s: float | None = None

    @property
    def ratio(self) -> float | None:
        return None if self.floor_s is None else self.seconds / self.floor_s


def machine() -> dict[str, str]:
    """Return what the figures depend on."""
    found = {"machine": _processor(), "cores": str(os.cpu_count()), "Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "-"
    return found


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def write(rows: Sequence[Row], where: Mapping[str, str], folder: Path) -> None:
    """Write bench.md, bench.json and bench.png."""
    (folder / "bench.md").write_text(table(rows, where))
    data = {"machine": dict(where), "rows": [{**asdict(row), "ratio": row.ratio} for row in rows]}
    (folder / "bench.json").write_text(json.dumps(data, indent=1) + "\n")
    plot([row for row in rows if row.ratio is not None], where, folder / "bench.png")


def table(rows: Sequence[Row], where: Mapping[str, str]) -> str:
    """Return the rows as a Markdown table under the machine's line."""
    lines = [", ".join(f"{name} {value}" for name, value in where.items()), ""]
    lines += ["| measured | takes | by hand | ratio |", "| --- | --- | --- | --- |"]
    floors = {(row.title, row.floor) for row in rows}
    for row in (row for row in rows if (row.title, row.name) not in floors):
        floor = "" if row.floor_s is None else f"{row.floor}: {duration(row.floor_s)}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append(f"| {row.title}: {row.name} | {duration(row.seconds)} | {floor} | {ratio} |")
    return "\n".join(lines) + "\n"


def duration(seconds: float) -> str:
    """Return a duration in the unit that reads best."""
    for limit, factor, unit in ((1e-6, 1e9, "ns"), (1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def plot(rows: Sequence[Row], where: Mapping[str, str], path: Path) -> None:
    """Draw the ratio of every row to its floor."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.27 * max(len(rows), 1)), layout="constrained")
    axes = figure.add_subplot()
    names = [f"{row.title}: {row.name}" for row in rows]
    ratios = [row.ratio or 0.0 for row in rows]
    places = range(len(rows))
    axes.barh(places, ratios, color=["#3b7dd8" if ratio <= 1.25 else "#d8863b" for ratio in ratios])
    axes.set_yticks(places, names, fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1, color="#444", linewidth=1)
    for place, ratio in zip(places, ratios, strict=True):
        axes.text(ratio, place, f" {ratio:.2f}", va="center", fontsize=7)
    axes.set_xlabel("time / time of the equivalent written by hand", fontsize=8)
    axes.set_title(f"{where.get('machine', '')}, {where.get('cores', '')} cores", fontsize=8)
    figure.savefig(path, dpi=144)
