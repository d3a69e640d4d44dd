"""The same test function in every backend's world: `worlds()[backend](fn, *args, world_size=4)`.

The places of `dualmesh.testing` as functions: see `dualmesh.testing.run_on`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from dualmesh.testing import PLACES
from dualmesh.testing.places import JAX_DEVICES as JAX_DEVICES

torch_world, jax_world, wide_jax_world, sim_world = (PLACES[name].run for name in ("torch", "jax", "jax_x64", "sim"))
torch_pool, jax_pool, wide_jax_pool = (PLACES[name].pool() for name in ("torch", "jax", "jax_x64"))


def worlds() -> dict[str, Callable[..., list[Any]]]:
    """Return the worlds of all backends by name."""
    return {"sim": sim_world, "torch": torch_world, "jax": jax_world}


def wide_worlds() -> dict[str, Callable[..., list[Any]]]:
    """Return the worlds of all backends by name, each of which keeps 64-bit numbers."""
    return {**worlds(), "jax": wide_jax_world}


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` as trainers of the open world run a step: jitted on JAX, as it is elsewhere."""
    import dualmesh as dm
    from dualmesh.testing.instruments import instruments_of

    return instruments_of(dm.get_parallel_state().backend).compiled(fn)


def held(x: Any, state: Any) -> dict[int, Any]:
    """Return {session rank: block} of what this process holds of a global array; without asking other ranks."""
    if not state.is_member:
        return {}
    if state.backend == "sim":
        return {rank: x.block(rank) for rank in state.members}
    if state.backend == "torch":
        return {state.own_rank(): x.to_local().detach().numpy()}
    ranks = dict(zip(state.shared.devices, state.members, strict=True))
    return {ranks[shard.device]: np.asarray(shard.data) for shard in x.addressable_shards}
