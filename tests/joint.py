"""Four processes that each hold one rank of a torch world and the same rank of a JAX world, started once."""

from collections.abc import Callable
from typing import Any

from dualmesh._support.ports import free_port
from dualmesh.testing.pools import Pool

RANKS = 4
TIMEOUT_S = 60.0
ENV = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
pool = Pool(ENV)
lone_pool = Pool({**ENV, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"})


def joint_world(fn: Callable[..., Any], *args: Any, backends: tuple[str, ...] = ("torch", "jax")) -> list[Any]:
    """Run `fn(*args)` in both worlds of four ranks; return one result a rank. JAX's world outlives the call."""
    method = f"tcp://127.0.0.1:{free_port()}"
    return pool.run(_in_both, [(fn, args, backends, rank, RANKS, method) for rank in range(RANKS)])


def lone_world(fn: Callable[..., Any], *args: Any) -> Any:
    """Run `fn(*args)` in one process that is both worlds' only rank."""
    return lone_pool.run(_in_both, [(fn, args, ("torch", "jax"), None, None, None)])[0]


def _in_both(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    backends: tuple[str, ...],
    rank: int | None,
    size: int | None,
    method: str | None,
) -> Any:
    import dualmesh as dm
    from dualmesh.testing.instruments import instruments_of

    with dm.session(backend=backends, rank=rank, world_size=size, init_method=method, timeout_s=TIMEOUT_S):
        result = fn(*args)
        if rank is not None:
            instruments_of("torch").leave_together()
        return result
