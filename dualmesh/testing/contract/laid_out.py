"""What workers run about arrays: distributing, reading back, building from blocks, constraining."""

from typing import Any

import numpy as np

import dualmesh as dm
from dualmesh.testing.contract.runs import opened


def round_trips(world: Any, whole: Any, specs: Any) -> Any:
    """Return for every spec: (distributed, from blocks, constrained) read back, and the block of every rank."""
    opened(world)
    return [_round_trip(whole, spec) for spec in specs]


def _round_trip(whole: Any, spec: Any) -> Any:
    distributed = dm.distribute(whole, spec)
    built = dm.shard_local(whole[held(spec, whole.shape)], spec)
    constrained = dm.constrain(dm.distribute(whole, dm.P()), spec)
    return {
        "distribute": np.asarray(dm.to_numpy(distributed)),
        "shard_local": np.asarray(dm.to_numpy(built)),
        "constrain": np.asarray(dm.to_numpy(constrained)),
        "there": [blocks(x, spec) for x in (distributed, built, constrained)],
        "slices": [dm.local_slices(spec, whole.shape, rank) for rank in range(dm.get_parallel_state().world_size)],
    }


def held(spec: Any, shape: Any) -> Any:
    """The smallest slice that covers what this process holds."""
    ranks = dm.get_parallel_state().local_ranks
    cuts = [dm.local_slices(spec, shape, rank) for rank in ranks]
    return tuple(slice(min(c.start for c in cut), max(c.stop for c in cut)) for cut in zip(*cuts, strict=True))


def blocks(x: Any, spec: Any) -> Any:
    """The block of every rank, stacked in rank order."""
    lifted = dm.shard_map(lambda block: block[None, ...], (spec,), dm.P("world"))
    return np.asarray(dm.to_numpy(lifted(x)))


def subset(size: Any, settings: Any, offset: Any, whole: Any) -> Any:
    """Return (is_member, what to_numpy gives) of an array over a state of some ranks in a custom order."""
    state = dm.init_parallel_state(spec=dm.TopologySpec({"a": size}, rank_offset=offset), name="some", **settings)
    if not state.is_member:
        return False, None
    lifted = dm.shard_map(lambda x: dm.ops.all_gather(x, "a", state=state), dm.P("a"), dm.P("a"), state=state)
    x = dm.distribute(whole, dm.P("a"), state=state)
    return True, np.asarray(dm.to_numpy(lifted(x), state=state))
