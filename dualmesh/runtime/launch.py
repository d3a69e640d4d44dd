"""What users call to start worlds: of one framework, or of several in the same processes.

The life of a world, and adopting one that runs, is in `session`; launcher variables are read in `environment`.
"""

import atexit
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dualmesh._support.checks import check_strings
from dualmesh.backend import discovery
from dualmesh.backend.backend import Backend, Launch
from dualmesh.backend.state import ParallelState
from dualmesh.errors import BackendError, SessionError, listed
from dualmesh.runtime.environment import local_rank_of
from dualmesh.runtime.session import Session, adopt_world, keep_session, start_session

NO_LEADER = (
    "init_distributed: none of {names} can tell the other processes where to meet. Name 'torch' among them: its store "
    "carries the address."
)


class JointSession(Session):
    """The life of several worlds in the same processes: rank r of one is rank r of each.

    The first named is the default of `init_parallel_state`.

    Attributes:
        sessions: The session of each framework by name, in the order given.
    """

    def __init__(self, sessions: dict[str, Session]) -> None:
        first = next(iter(sessions.values()))
        super().__init__(first.driver, first.world, owned=False)
        self.sessions = sessions

    @property
    def is_live(self) -> bool:
        """Whether all worlds still exist."""
        return all(one.is_live for one in self.sessions.values())

    def states(self) -> list[ParallelState]:
        """Return the registered states of all worlds. *Local.*"""
        return [state for one in self.sessions.values() for state in one.states()]

    def close(self) -> None:
        """Clear the states of all worlds and end those that dualmesh started, last one first. *Local*; idempotent."""
        for one in reversed(self.sessions.values()):
            one.close()


def init_distributed(
    backend: str | Sequence[str] | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
    local_devices: int | None = None,
    timeout_s: float | None = None,
    device_order: Any = None,
    axis_types: str | None = None,
) -> Session:
    """Start the world of a framework. *Collective over all processes.*

    Reads what torchrun set (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), or SLURM for the tasks of an
    srun, unless `rank` and `init_method` are given; with none of them, one process. A world that already runs is
    adopted and never ended by dualmesh.

    Args:
        backend: "torch", "jax", "sim" or another installed one; None: see `discovery.choose`. Several of them, as in
            ("torch", "jax"): all in the same processes, one rank each; rank r of one is rank r of the other (see
            `ParallelState.on`). JAX's address is agreed through torch's store.
        rank: This process' rank; with it world_size counts processes.
        world_size: Ranks (JAX and sim: devices and simulated ranks in one process).
        init_method: "tcp://host:port" of process 0; "auto": what JAX finds out about its cluster by itself.
        local_devices: Ranks that this process holds, where the backend lets one choose.
        timeout_s: How long to wait for the other processes, in seconds.
        device_order: JAX: which device is which rank. None: by process and position; "topology": as
            `jax.experimental.mesh_utils` orders them, so that neighbours in rank are neighbours in hardware; or the
            devices themselves, in rank order.
        axis_types: JAX: "auto" (None) or "explicit" meshes.

    Raises:
        LaunchError: Variables or arguments are half given or contradict each other.
        SessionError: A world of another size runs already, or the world cannot be started.
    """
    given: dict[str, Any] = {"rank": rank, "world_size": world_size, "init_method": init_method, "timeout_s": timeout_s}
    settings = {"local_devices": local_devices, "device_order": device_order, "axis_types": axis_types}
    if backend is None or isinstance(backend, str):
        return start_session(backend, **given, **settings)
    names = check_strings("init_distributed", "backend", backend)
    if not names or len(set(names)) < len(names) or local_devices not in (None, 1):
        raise BackendError(
            f"init_distributed: backend={backend!r}, local_devices={local_devices!r}. Name different backends, at "
            f"least one; together each process holds one rank.",
            backend=backend,
        )
    return _together([discovery.load(name) for name in names], given, device_order, axis_types)


@contextmanager
def session(
    backend: str | Sequence[str] | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
    local_devices: int | None = None,
    timeout_s: float | None = None,
    device_order: Any = None,
    axis_types: str | None = None,
) -> Iterator[Session]:
    """Run a block in a world of its own; tear down in order, also when the block raises. See `init_distributed`.

    >>> import dualmesh as dm
    >>> with dm.session(backend="sim", world_size=4) as session:
    ...     dm.init_parallel_state(dp_size=2, tp_size=2).size("dp")
    2
    """
    opened = init_distributed(
        backend,
        rank=rank,
        world_size=world_size,
        init_method=init_method,
        local_devices=local_devices,
        timeout_s=timeout_s,
        device_order=device_order,
        axis_types=axis_types,
    )
    # A block that is open when the interpreter ends is left while modules are torn down: too late to close anything.
    atexit.register(opened.close)
    is_too_late = sys.is_finalizing
    try:
        yield opened
    finally:
        if not is_too_late():
            atexit.unregister(opened.close)
            opened.close()


def _together(drivers: Sequence[Backend], given: dict[str, Any], device_order: Any, axis_types: str | None) -> Session:
    """Start the world that can lead, then the others where it says; all or none."""
    leaders = [driver for driver in drivers if driver.leads]
    if not leaders:
        raise BackendError(NO_LEADER.format(names=listed(driver.name for driver in drivers)))
    opened = {leaders[0].name: start_session(leaders[0].name, **given)}
    try:
        for driver in drivers:
            if driver is not leaders[0]:
                launch = _following(opened[leaders[0].name], given["timeout_s"], device_order, axis_types)
                opened[driver.name] = _start_beside(driver, launch, opened[leaders[0].name])
    except BaseException:
        for one in reversed(opened.values()):
            one.close()
        raise
    joint = JointSession({driver.name: opened[driver.name] for driver in drivers})
    keep_session(joint.sessions[drivers[0].name])
    return joint


def _following(leader: Session, timeout_s: float | None, device_order: Any, axis_types: str | None) -> Launch:
    """Return the place of this process in a world that starts beside the leader's. *Collective.*"""
    (rank,) = leader.local_ranks
    several = leader.world_size > 1
    return Launch(
        rank=rank,
        world_size=None if several else 1,
        process_count=leader.world_size,
        local_rank=local_rank_of(os.environ, rank),
        init_method=f"tcp://{leader.driver.agreed_address(leader.world)}" if several else None,
        local_devices=1,
        timeout_s=timeout_s,
        device_order=device_order,
        axis_types=axis_types,
        shares_devices=leader.world.device_type != "cpu",
    )


def _start_beside(driver: Backend, launch: Launch, leader: Session) -> Session:
    running = driver.world()
    one = (
        keep_session(Session(driver, driver.start(launch), owned=True))
        if running is None
        else adopt_world(driver, running)
    )
    if one.local_ranks != leader.local_ranks or one.world_size != leader.world_size:
        found = f"this process holds the ranks {listed(one.local_ranks)} of {one.world_size}"
        one.close()
        raise SessionError(
            f"init_distributed: {driver.name}: {found}, but in {leader.backend} {listed(leader.local_ranks)} of "
            f"{leader.world_size}. Together each process is one rank, the same in both: start both worlds here, "
            f"before either framework is used.",
            found=one.local_ranks,
            asked=leader.local_ranks,
        )
    return one
