"""Where a test function runs: torch processes, JAX devices, simulated ranks, or a stranger's backend.

Worker processes are in `pools`; comparing what comes back is in `comparison`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dualmesh._support.checks import is_one_of
from dualmesh._support.ports import free_port
from dualmesh.errors import ArgumentError, did_you_mean, listed
from dualmesh.runtime.launch import session
from dualmesh.testing.instruments import instruments_of
from dualmesh.testing.pools import DEFAULT_TIMEOUT_S, Pool, retire

JAX_DEVICES = 8
# One thread per process: the ranks share the cores.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Place:
    """A backend, and the processes in which its worlds run. Two equal places share their processes."""

    backend: str
    env: tuple[tuple[str, str], ...] = ()
    """Environment variables of the processes."""
    processes: str = "one"
    """one: a process that holds every rank. per rank: one each. none: this process."""
    path: tuple[str, ...] = ()
    """Folders that the processes import from before all others: where a backend under test is installed."""

    def pool(self) -> Pool:
        """Return the processes of this place, which start when first used. *Local.*"""
        if self not in _pools:
            _pools[self] = Pool(dict(self.env), self.path)
        return _pools[self]

    def run(
        self, fn: Callable[..., Any], *args: Any, world_size: int, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> list[Any]:
        """Run `fn(*args)` in a fresh world; return one result per process. See `run_on`."""
        if self.processes == "none":
            return [_in_world(self.backend, fn, args, world_size, None, None)]
        if self.processes == "one":
            calls: list[tuple[Any, ...]] = [(self.backend, fn, args, world_size, None, None)]
        else:
            method = f"tcp://127.0.0.1:{free_port()}"
            calls = [(self.backend, fn, args, world_size, rank, method) for rank in range(world_size)]
        return self.pool().run(_in_world, calls, timeout_s=timeout_s)


_pools: dict[Place, Pool] = {}


def place_of(backend: str, *, env: Mapping[str, str] | None = None, processes: str = "one", path: Any = ()) -> Place:
    """Return a place for a backend: with an environment, and an import path, of its own. *Pure.*

    >>> place_of("jax", env={"JAX_PLATFORMS": "cpu"}).env
    (('JAX_PLATFORMS', 'cpu'),)
    """
    if not is_one_of(processes, ("one", "per rank", "none")):
        raise ArgumentError(f"place_of: processes={processes!r}. Allowed: one, per rank, none.", processes=processes)
    return Place(backend, tuple(sorted((env or {}).items())), processes, tuple(path))


def jax_place(devices: int = JAX_DEVICES, *, x64: bool = False) -> Place:
    """Return a JAX process with virtual CPU devices; with `x64` it keeps 64-bit numbers. *Pure.*"""
    env = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}
    return place_of("jax", env={**env, **({"JAX_ENABLE_X64": "1"} if x64 else {})})


PLACES: dict[str, Place] = {
    "sim": place_of("sim", processes="none"),
    "torch": place_of("torch", env=_ONE_THREAD, processes="per rank"),
    "jax": jax_place(),
    "jax_x64": jax_place(x64=True),
}
"""The places with a name. torch: gloo processes. jax: one process with 8 virtual CPU devices. sim: this process."""


def place_named(place: str | Place) -> Place:
    """Return a place for its name; a place stays as it is. *Pure.*"""
    if isinstance(place, Place):
        return place
    if not is_one_of(place, PLACES):
        raise ArgumentError(
            f"dualmesh.testing: no place {place!r}. Places: {listed(PLACES)}; of other backends: place_of(...)."
            f"{did_you_mean(place, PLACES)}",
            place=place,
        )
    return PLACES[place]


def run_on(
    place: str | Place,
    fn: Callable[..., Any],
    *args: Any,
    world_size: int,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> list[Any]:
    """Run `fn(*args)` inside an open session, once per process of the place, and return the results in rank order.

    Processes start once and are reused by later calls. Functions and arguments travel by cloudpickle, so closures and
    lambdas may be sent. `fn` must leave nothing behind but what the session owns.

    Args:
        place: "torch" (one process per rank), "jax" or "jax_x64" (one process, one device per rank), "sim" (this
            process), or a `Place`.
        fn: The function; it registers its states and returns what can be pickled.
        world_size: Ranks in the world.
        timeout_s: How long to wait; then the processes are ended.

    Raises:
        WorkerError: A process raised, died or did not answer.

    >>> import dualmesh as dm
    >>> run_on("sim", lambda: dm.init_parallel_state(tp_size=4).ranks("tp", 0), world_size=4)
    [(0, 1, 2, 3)]
    """
    return place_named(place).run(fn, *args, world_size=world_size, timeout_s=timeout_s)


def _in_world(
    backend: str, fn: Callable[..., Any], args: tuple[Any, ...], world_size: int, rank: int | None, method: str | None
) -> Any:
    try:
        with session(backend=backend, rank=rank, world_size=world_size, init_method=method):
            result = fn(*args)
            # A rank that leaves at once closes connections that slower ranks are still making.
            if rank is not None:
                instruments_of(backend).leave_together()
            return result
    finally:
        if instruments_of(backend).ended():
            retire()
