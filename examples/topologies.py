"""The two topologies of the composite model, for any world size that fits them."""

from collections.abc import Mapping

import dualmesh as dm

BATCH = 8


def specs(world_size: int) -> dict[str, dm.TopologySpec]:
    """Return the specs of thinker and talker.

    Raises:
        ValueError: The world size does not divide the batch.
    """
    if world_size < 1 or BATCH % world_size:
        fits = ", ".join(str(n) for n in range(1, BATCH + 1) if BATCH % n == 0)
        raise ValueError(f"--world-size {world_size} does not divide the batch of {BATCH}. Choose one of {fits}.")
    ulysses = 2 if world_size % 2 == 0 else 1
    dp = world_size // ulysses
    return {
        "thinker": dm.parallel_spec(dp_size=dp, dp_shard_size=dp, ulysses_size=ulysses),
        "talker": dm.parallel_spec(dp_size=world_size, dp_shard_size=world_size),
    }


def register(world_size: int) -> Mapping[str, dm.ParallelState]:
    """Register both states; the thinker's becomes the default."""
    return dm.init_parallel_states(specs(world_size), default="thinker")
