"""From any spec to any other, on every backend: what each rank then holds, against the core's integers.

The suite goes the ways that `some_ways` gives. All of them, for example on 2x2x2 in torch:

    python -m tests.cross.redistributions 2x2x2 torch
"""

import sys
import time

import numpy as np

import dualmesh as dm
from dualmesh.sharding.partition_spec import canonical, slices_of
from dualmesh.testing import difference
from tests.core.all_specs import TOPOLOGIES, whole_specs
from tests.worlds import held, worlds

SIZES = {"2x2x2": 8, "2x3": 6, "view": 8, "inner view": 8}
"""{topology: size of both dims of the array}, which every spec divides."""


def layouts(name):
    """Return one spec for every way to lay an array out, whatever its axes are called."""
    topology = TOPOLOGIES[name]
    return list({canonical(topology, spec): spec for spec in whole_specs(topology)}.values())


def all_ways(name):
    """Return every ordered pair of layouts, also from one to itself."""
    specs = layouts(name)
    return [(one, other) for one in specs for other in specs]


def some_ways(name, most):
    """Return all pairs, or about `most` of them, in which every layout comes and goes equally often."""
    specs = layouts(name)
    if len(specs) ** 2 <= most:
        return all_ways(name)
    steps = np.linspace(1, len(specs) - 1, max(1, most // len(specs))).astype(int)
    return [(one, specs[(place + step) % len(specs)]) for step in steps for place, one in enumerate(specs)]


def wrong_ways(state, ways, size, by_exchange):
    """Return what differs in the blocks of this process' ranks after going from one spec to the other, per way.

    Args:
        by_exchange: Give both ends, as from state to state, rather than the new spec.
    """
    whole = np.arange(1, 1 + size * size, dtype=np.float32).reshape(size, size)
    given = {spec: dm.distribute(whole, spec) for spec, _ in ways}
    wrong = []
    for one, other in ways:
        ends = {"src": one, "dst": other} if by_exchange else {"spec": other}
        for rank, block in held(dm.reshard(given[one], **ends), state).items():
            wanted = whole[slices_of(state.topology, other, whole.shape, rank)]
            apart = difference(f"{one} to {other} on rank {rank}", wanted, block, rtol=0)
            wrong += [] if apart is None else [str(apart)]
    return wrong


def gone(name, ways, by_exchange):
    """Go all ways in a world of their own."""
    return wrong_ways(dm.init_parallel_state(spec=TOPOLOGIES[name].spec), ways, SIZES[name], by_exchange)


def main(name, *backends):
    """Go every way and say how many, how long, and which went wrong."""
    ways, size = all_ways(name), TOPOLOGIES[name].world_size
    failed = False
    for backend in backends or ("sim", "torch", "jax"):
        for by_exchange in (False, True):
            start = time.perf_counter()
            answers = worlds()[backend](gone, name, ways, by_exchange, world_size=size, timeout_s=3600.0)
            wrong = [each for answer in answers for each in answer]
            route = "from end to end" if by_exchange else "within the state"
            print(
                f"{backend} {name} {route}: {len(ways)} ways, {len(wrong)} wrong, {time.perf_counter() - start:.1f} s"
            )
            print(*wrong[:20], sep="\n", end="\n" if wrong else "")
            failed = failed or bool(wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
