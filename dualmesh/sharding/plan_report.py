"""What is wrong with a plan for a model, collected and said at once.

Which spec a parameter gets is decided in `plan`.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations

from dualmesh.errors import ShardingError, counted, did_you_mean, listed
from dualmesh.sharding.partition_spec import P, split_axes
from dualmesh.topology.layout import overlap
from dualmesh.topology.topology import Topology

SHOWN_PATHS = 5


class Report:
    """Problems in the order found; parameters with the same problem share a line."""

    def __init__(self) -> None:
        self._paths: dict[str, list[str]] = {}

    def add(self, problem: str, path: str | None = None) -> None:
        """Add a problem, of one parameter or of the plan itself. *Local.*"""
        paths = self._paths.setdefault(problem, [])
        if path is not None:
            paths.append(path or "(the root)")

    def refuse(self) -> None:
        """Raise one ShardingError with all problems, if there are any. *Local.*"""
        problems = tuple(_line(problem, paths) for problem, paths in self._paths.items())
        if len(problems) == 1:
            raise ShardingError(f"ShardingPlan: {problems[0]}", problems=problems)
        if problems:
            lines = "\n".join(f"  - {problem}" for problem in problems)
            raise ShardingError(f"ShardingPlan: {len(problems)} problems.\n{lines}", problems=problems)


def _line(problem: str, paths: Sequence[str]) -> str:
    return f"{problem}: {listed(paths, SHOWN_PATHS)}." if paths else problem


def fit_problems(topology: Topology | None, spec: P, shape: tuple[int, ...]) -> Iterator[str]:
    """Yield everything that keeps a spec from splitting an array of `shape`. *Pure.*

    Without a topology only the number of entries is looked at.
    """
    if len(spec.entries) > len(shape):
        entries = "1 entry" if len(spec.entries) == 1 else f"{len(spec.entries)} entries"
        yield f"{entries} for shape {shape}, which has {counted(len(shape), 'dim')}"
    if topology is None:
        return
    names = topology.axis_names
    for axis in spec.axes:
        if axis not in names:
            yield f"no axis {axis!r}. Axes: {listed(names)}.{did_you_mean(axis, names)} Needed by"
    known = [axis for axis in spec.axes if axis in names]
    clashes = [pair for pair in combinations(known, 2) if overlap(topology.layout(pair[0]), topology.layout(pair[1]))]
    for first, second in clashes:
        yield f"axes {first!r} and {second!r} share ranks, an array can be split by one of them"
    for dim, (size, entry) in enumerate(zip(shape, spec.entries, strict=False)):
        axes = split_axes(entry)
        if not set(axes) <= set(known) or any(set(pair) <= set(axes) for pair in clashes):
            continue
        parts = topology.size(axes)
        if size % parts:
            yield f"dim {dim} of shape {shape} has size {size}, which {entry!r} of size {parts} does not divide"
