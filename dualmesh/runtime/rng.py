"""Seeds that differ along some axes of a state and are equal along the others.

Random numbers that are the same on every topology and framework are in `testing.noise`.
"""

from collections.abc import Callable
from typing import Any

from dualmesh._support.optional_imports import np
from dualmesh.backend.state import ParallelState
from dualmesh.errors import ArgumentError
from dualmesh.topology.resolve import whole
from dualmesh.topology.topology import Axis

_MASK = 0xFFFFFFFF


def seed_for(state: ParallelState, axes: Axis, base: int = 0, rank: int | None = None) -> Any:
    """Return a 32-bit seed that differs along `axes` and is equal along every other axis. *Pure.*

    Feed it to `torch.manual_seed`, `numpy.random.default_rng` or `jax.random.key`; inside a JAX `shard_map` it is a
    traced uint32. The numbering is by index, so a seed depends on the topology; the mixing is the finalizer of
    MurmurHash3 (32 bit), which is a bijection: different indices never share a seed.

    Args:
        axes: An axis or a tuple of axes; () gives one seed for all ranks.
        base: The run's seed, an integer.
        rank: A session rank; None: this process' rank.

    >>> import dualmesh as dm
    >>> with dm.session(backend="sim", world_size=4):
    ...     state = dm.init_parallel_state(dp_size=2, tp_size=2)
    ...     seeds = [dm.seed_for(state, "dp", base=7, rank=rank) for rank in range(4)]
    >>> seeds[0] == seeds[1] != seeds[2] == seeds[3]
    True
    """
    if not isinstance(state, ParallelState):
        raise ArgumentError(f"seed_for: {state!r} is no state. Give dm.get_parallel_state() or another.", state=state)
    number = whole(base)
    if number is None:
        raise ArgumentError(f"seed_for: base={base!r} is no integer.", base=base)
    index = state.index(axes, rank)
    start = _mix(number & _MASK, int)
    if isinstance(index, int):
        return _mix((start + index) & _MASK, int)
    return _mix(index.astype("uint32") + np.uint32(start), np.uint32)


def _mix(x: Any, kind: Callable[[int], Any]) -> Any:
    """Mix 32 bits; products wrap, by the mask for Python ints and by the dtype for arrays."""
    mask = kind(_MASK)
    x = x ^ (x >> 16)
    x = (x * kind(0x85EBCA6B)) & mask
    x = x ^ (x >> 13)
    x = (x * kind(0xC2B2AE35)) & mask
    return x ^ (x >> 16)
