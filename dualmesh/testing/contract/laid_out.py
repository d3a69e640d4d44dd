"""What workers run about arrays: distributing, reading back, building from blocks, constraining."""

from collections.abc import Callable
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


def refilled(world: int, dtype: str, spec: Any, alignment: int) -> "dict[str, tuple[Any, Any]]":
    """Return {how: (the value after the buffer that it came from was filled anew, the value before)}.

    Args:
        world: How many ranks there are.
        dtype: The buffer's.
        spec: How arrays are split; over "dp" at most, of all ranks.
        alignment: Where the buffer starts, modulo 64 bytes; a multiple of the itemsize.
    """
    dm.init_parallel_state(dp_size=world)
    whole = (np.arange(8 * world * 640) % 113).astype(dtype).reshape(8 * world, 640)
    found: dict[str, tuple[Any, Any]] = {}

    def check(how: str, make: Callable[[Any], Any], value: Any, expected: Any) -> None:
        buffer = _placed(value, alignment)
        made = make(buffer)
        buffer[...] = ~value if value.dtype == bool else 1 - value  # a loader puts its next batch where this one was
        found[how] = np.asarray(dm.to_numpy(made)), expected
        read = dm.to_numpy(made)
        read[...] = 7 if read.dtype != bool else ~read
        found[f"{how}, after its value was written to"] = np.asarray(dm.to_numpy(made)), expected

    def read_only(buffer: Any) -> Any:
        view = buffer.view()
        view.flags.writeable = False
        return dm.distribute(view, spec)

    check("distribute", lambda buffer: dm.distribute(buffer, spec), whole, whole)
    check("distribute, read-only", read_only, whole, whole)
    check("distribute, a view", lambda buffer: dm.distribute(buffer[:, ::2], spec), whole, whole[:, ::2])
    wide = np.broadcast_to(whole[0], whole.shape)
    check(
        "distribute, broadcast",
        lambda row: dm.distribute(np.broadcast_to(row, whole.shape), spec),
        whole[0],
        wide,
    )
    check("distribute, pad", lambda buffer: dm.distribute(buffer, spec, pad=True), whole, whole)
    check("constrain", lambda buffer: dm.constrain(buffer, spec), whole, whole)
    check("shard_local", lambda buffer: dm.shard_local(buffer, spec), whole[held(spec, whole.shape)], whole)
    dm.clear_parallel_state()
    return found


def _placed(value: Any, alignment: int) -> Any:
    """Return a copy of an array that starts at an address of this alignment."""
    room = np.empty(value.nbytes + 128, np.uint8)
    start = (alignment - room.ctypes.data) % 64
    own = room[start : start + value.nbytes].view(value.dtype).reshape(value.shape)
    own[...] = value
    return own
