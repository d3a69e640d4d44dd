"""The same test function in every backend's world: `worlds()[backend](fn, *args, world_size=4)`.

`fn(*args)` runs inside an open session, on torch once per rank, on JAX and sim once; the list of its results comes
back. It must leave nothing behind but what the session owns.
"""

from collections.abc import Callable
from typing import Any

from tests.workers import Pool, free_port

# One thread per process: ranks share two cores.
_THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
JAX_DEVICES = 8

torch_pool = Pool(_THREADS)
_JAX = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={JAX_DEVICES}", "JAX_PLATFORMS": "cpu"}
jax_pool = Pool(_JAX)
wide_jax_pool = Pool({**_JAX, "JAX_ENABLE_X64": "1"})


def torch_world(fn: Callable[..., Any], *args: Any, world_size: int, timeout_s: float = 120.0) -> list[Any]:
    """Run `fn` on every rank of a gloo world; return one result per rank."""
    method = f"tcp://127.0.0.1:{free_port()}"
    calls = [(fn, args, rank, world_size, method) for rank in range(world_size)]
    return torch_pool.run(_in_torch, calls, timeout_s=timeout_s)


def jax_world(fn: Callable[..., Any], *args: Any, world_size: int, timeout_s: float = 120.0) -> list[Any]:
    """Run `fn` once over the first `world_size` of 8 virtual CPU devices; return [result]."""
    return jax_pool.run(_in_one_process, [(fn, args, "jax", world_size)], timeout_s=timeout_s)


def wide_jax_world(fn: Callable[..., Any], *args: Any, world_size: int, timeout_s: float = 120.0) -> list[Any]:
    """Run `fn` as `jax_world` does, where JAX keeps 64-bit numbers; return [result]."""
    return wide_jax_pool.run(_in_one_process, [(fn, args, "jax", world_size)], timeout_s=timeout_s)


def sim_world(fn: Callable[..., Any], *args: Any, world_size: int, timeout_s: float = 120.0) -> list[Any]:
    """Run `fn` here, with every rank simulated; return [result]."""
    return [_in_one_process(fn, args, "sim", world_size)]


def worlds() -> dict[str, Callable[..., list[Any]]]:
    """Return the worlds of all backends by name."""
    return {"sim": sim_world, "torch": torch_world, "jax": jax_world}


def wide_worlds() -> dict[str, Callable[..., list[Any]]]:
    """Return the worlds of all backends by name, each of which keeps 64-bit numbers."""
    return {**worlds(), "jax": wide_jax_world}


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` as trainers of the open world run a step: jitted on JAX, as it is elsewhere."""
    import dualmesh as dm

    if dm.get_parallel_state().backend != "jax":
        return fn
    import jax

    return jax.jit(fn)


def _in_torch(fn: Callable[..., Any], args: tuple[Any, ...], rank: int, world_size: int, method: str) -> Any:
    import torch

    import dualmesh as dm

    with dm.session(backend="torch", rank=rank, world_size=world_size, init_method=method):
        result = fn(*args)
        # A rank that leaves at once closes connections that slower ranks are still making.
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        return result


def _in_one_process(fn: Callable[..., Any], args: tuple[Any, ...], backend: str, world_size: int) -> Any:
    import dualmesh as dm

    with dm.session(backend=backend, world_size=world_size):
        return fn(*args)
