"""What looking at the flag of debug mode, and saying failures in dualmesh's words, cost when debug mode is off.

`python -m tests.bench.debugging`: collectives in 2 gloo processes, as they are and without that part, interleaved.
"""

import statistics
import time
from typing import Any

import dualmesh as dm
from tests.bench.timing import record
from tests.worlds import torch_pool, torch_world

PASSES, REPEATS = 40, 25
COUNTS = {"16 B": 4, "64 KiB": 16_384}


def without(collectives: Any) -> Any:
    """Return what `_move` would be without debug mode and the watchdog."""

    def moved(verb: str, x: Any, member: Any, settings: dict[str, Any]) -> Any:
        return collectives.eager.VERBS[verb](collectives.resolved(x), member, **settings)

    return moved


def measured() -> dict[tuple[str, str], tuple[float, float]]:
    """Return {(collective, size): (seconds with, seconds without)} on this rank."""
    import torch
    import torch.distributed as dist

    from dualmesh_torch.collectives import collectives

    dm.init_parallel_state(spec=dm.TopologySpec({"a": 2}, roles={"sequence": ("a",)}))
    ways = {"with": collectives._move, "without": without(collectives)}
    found = {}
    for verb in ("all_reduce", "all_gather"):
        for size, count in COUNTS.items():
            x = torch.ones(count)
            times: dict[str, list[float]] = {way: [] for way in ways}
            for repeat in range(REPEATS + 2):
                for way in list(ways)[:: 1 if repeat % 2 else -1]:
                    collectives._move = ways[way]
                    dist.barrier()
                    start = time.perf_counter()
                    for _ in range(PASSES):
                        getattr(dm.ops, verb)(x, "a")
                    if repeat > 1:
                        times[way].append((time.perf_counter() - start) / PASSES)
            found[verb, size] = (statistics.median(times["with"]), statistics.median(times["without"]))
    collectives._move = ways["with"]
    return found


def alone() -> tuple[float, float]:
    """Return the seconds of one call of `_move` with and without, over an exchange that does nothing."""
    import torch

    from dualmesh_torch.collectives import collectives

    ways = {"with": collectives._move, "without": without(collectives)}
    nothing = {"nothing": lambda x, member: x}
    x, kept, times = torch.ones(4), collectives.eager.VERBS, {way: [] for way in ways}
    collectives.eager.VERBS = nothing
    try:
        for _ in range(REPEATS):
            for way, moved in ways.items():
                start = time.perf_counter()
                for _ in range(20_000):
                    moved("nothing", x, None, {})
                times[way].append((time.perf_counter() - start) / 20_000)
    finally:
        collectives.eager.VERBS = kept
    return statistics.median(times["with"]), statistics.median(times["without"])


def main() -> None:
    """Print both tables."""
    ranks = torch_world(measured, world_size=2)
    for key in ranks[0]:
        seconds = [statistics.median(rank[key][side] for rank in ranks) * 1e6 for side in (0, 1)]
        ours, floor = seconds
        print(f"{key[0]:12s} {key[1]:8s} {ours:8.1f} us, without {floor:8.1f} us, ratio {ours / floor:.3f}")
        record("debug mode off", " ".join(map(str, key)), ours / 1e6, "without it", floor / 1e6)
    both = [seconds * 1e9 for seconds in torch_pool.run(alone, [()])[0]]
    print(f"alone: {both[0]:.0f} ns, without {both[1]:.0f} ns: {both[0] - both[1]:.0f} ns a collective")
    torch_pool.close()


if __name__ == "__main__":
    main()
