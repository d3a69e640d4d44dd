"""`SimBackend`: a world of simulated ranks in this process.

What a rank does is in `programs`, how ranks meet in `rendezvous`.
"""

from collections.abc import Sequence

from dualmesh._support import waits
from dualmesh.backend.backend import Backend, Launch
from dualmesh.backend.group_factory import Fabric, ListedFabric
from dualmesh.backend.state import ParallelState
from dualmesh.backend.state_plan import StatePlan, World
from dualmesh.errors import BackendError, SessionError
from dualmesh.topology.resolve import whole
from dualmesh_sim.state import SimState


class SimBackend(Backend):
    """Every rank in one process, in numpy; no framework and no autodiff."""

    name = "sim"

    def __init__(self) -> None:
        self._world: World | None = None
        self._timeout_s = waits.DEFAULT_TIMEOUT_S

    def world(self) -> World | None:
        return self._world

    def start(self, launch: Launch) -> World:
        timeout_s = waits.timeout_s(launch.timeout_s)
        size = _world_size(launch)
        self._timeout_s = timeout_s
        self._world = World(size, tuple(range(size)), "cpu", 1, lambda: self._world is world)
        world = self._world
        return world

    def stop(self, world: World) -> None:
        if self._world is world:
            self._world = None

    def build(self, plans: Sequence[StatePlan], world: World) -> list[ParallelState]:
        for plan in plans:
            if plan.device_type != "cpu":
                raise BackendError(
                    f"Backend 'sim': device_type={plan.device_type!r}. Simulated ranks are on the CPU: leave "
                    f"device_type out.",
                    device_type=plan.device_type,
                )
        return [SimState(plan, world, self._timeout_s) for plan in plans]

    def release(self, states: Sequence[ParallelState]) -> None:
        """Nothing to let go of: simulated groups are tuples of ranks."""

    def fabric(self) -> Fabric:
        return ListedFabric(running=self._world is not None)


def _world_size(launch: Launch) -> int:
    """Return the number of ranks to simulate, or refuse the launch."""
    asked = launch.world_size if launch.world_size is not None else launch.local_devices
    if asked is None and launch.process_count > 1:
        raise SessionError(
            f"Backend 'sim': launched in {launch.process_count} processes, but it simulates every rank in one. Say "
            f"how many ranks to simulate (world_size=...), or run one process.",
            process_count=launch.process_count,
        )
    if launch.local_devices not in (None, asked):
        raise SessionError(
            f"Backend 'sim': world_size={launch.world_size}, local_devices={launch.local_devices}. One process holds "
            f"all simulated ranks: leave local_devices out.",
            world_size=launch.world_size,
            local_devices=launch.local_devices,
        )
    size = whole(1 if asked is None else asked)
    if size is None or size < 1:
        raise SessionError(f"Backend 'sim': world_size={asked!r}. Give an integer of at least 1.", world_size=asked)
    return size
