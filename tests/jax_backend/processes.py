"""Several JAX processes on this machine, each with some virtual CPU devices; started once per layout and reused.

Worlds of one process are in `tests.worlds`.
"""

import functools
from collections.abc import Callable
from typing import Any

from tests.workers import Pool, free_port

# 64-bit numbers, so that the contract's cases run as they are; one thread each, since they share two cores.
_ENV = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1", "XLA_FLAGS": "", "OMP_NUM_THREADS": "1"}
_pools: dict[tuple[int, ...], Pool] = {}


def processes(fn: Callable[..., Any], *args: Any, devices: tuple[int, ...], timeout_s: float = 120.0) -> list[Any]:
    """Run `fn` in one process per entry of `devices`, in a session over all of them; return one result per process.

    A JAX world cannot be made anew in a process, so every layout has workers of its own.
    """
    pool = _pools.setdefault(devices, Pool(_ENV))
    method = f"tcp://127.0.0.1:{free_port()}"
    calls = [(fn, args, rank, len(devices), method, held) for rank, held in enumerate(devices)]
    return pool.run(_in_process, calls, timeout_s=timeout_s)


def in_processes(*devices: int):
    """Run the decorated test's body in several processes, where a session is open."""

    def decorate(body):
        @functools.wraps(body)
        def test(**arguments):
            processes(functools.partial(_called, body, arguments), devices=devices)

        return test

    return decorate


def _called(body, arguments):
    body(**arguments)


def _in_process(fn, args, rank, count, method, held):
    import dualmesh as dm

    with dm.session("jax", rank=rank, world_size=count, init_method=method, local_devices=held, timeout_s=20.0):
        return fn(*args)
