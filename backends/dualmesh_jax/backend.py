"""`JaxBackend`: a world of JAX devices, one per rank, in one process or several.

Which states share a mesh is in `meshes`, how jit learns of the scope in `scope`.
"""

from collections.abc import Sequence

import jax

from dualmesh import environment
from dualmesh.backend import Backend, Launch
from dualmesh.errors import BackendError, SessionError
from dualmesh.resolution import whole
from dualmesh.scope import add_mirror
from dualmesh.state import ParallelState, StatePlan, World
from dualmesh_jax.devices import launched, ordered_devices, request_cpu_devices, too_few
from dualmesh_jax.meshes import MeshBook
from dualmesh_jax.private import backend_is_initialized
from dualmesh_jax.scope import JaxMirror
from dualmesh_jax.state import JaxState


class JaxBackend(Backend):
    """JAX devices as ranks, in the order (process, position in the process)."""

    name = "jax"

    def __init__(self) -> None:
        self._world: World | None = None
        self._book = MeshBook(())
        self._states: list[JaxState] = []
        self._launched = False
        add_mirror(JaxMirror())

    def world(self) -> World | None:
        if self._world is None and not self._launched and jax.distributed.is_initialized():
            # The user's own runtime; asking must not start JAX's backend, which waits for the other processes.
            return self._opened(ordered_devices()) if backend_is_initialized() else None
        return self._world

    def start(self, launch: Launch) -> World:
        asked = _asked_size(launch)
        timeout_s = environment.timeout_s(launch.timeout_s)
        if launch.process_count > 1:
            request_cpu_devices(launch.local_devices)
            launched(launch, timeout_s)
            self._launched = True
        else:
            request_cpu_devices(asked)
        devices = ordered_devices()
        size = len(devices) if asked is None else asked
        if size > len(devices):
            raise too_few(size, devices)
        return self._opened(devices[:size])

    def _opened(self, devices: Sequence[jax.Device]) -> World:
        mine = tuple(rank for rank, device in enumerate(devices) if device.process_index == jax.process_index())
        kind = devices[0].platform
        world = World(
            size=len(devices),
            local_ranks=mine,
            device_type="cuda" if kind == "gpu" else kind,
            process_count=len({device.process_index for device in devices}),
            is_live=lambda: self._world is world,
        )
        self._world, self._book = world, MeshBook(devices)
        return world

    def stop(self, world: World) -> None:
        """End the session's epoch; JAX's own world cannot be re-created in a process, so it goes on."""
        if self._world is world:
            self._world, self._book = None, MeshBook(())

    def build(self, plans: Sequence[StatePlan], world: World) -> list[ParallelState]:
        for plan in plans:
            if plan.device_type not in (world.device_type, "gpu" if world.device_type == "cuda" else world.device_type):
                raise BackendError(
                    f"Backend 'jax': device_type={plan.device_type!r}, but the world's devices are "
                    f"{world.device_type!r}. Leave device_type out, or choose JAX's platform before it starts "
                    f"(JAX_PLATFORMS).",
                    device_type=plan.device_type,
                )
        built = [JaxState(plan, world, self._book.shared(_order(plan), plan.topology)) for plan in plans]
        self._states += built
        return list(built)

    def release(self, states: Sequence[ParallelState]) -> None:
        gone = {id(state) for state in states}
        self._states = [state for state in self._states if id(state) not in gone]
        self._book.keep_only({state.shared.serial for state in self._states})


def _order(plan: StatePlan) -> tuple[int, ...]:
    """Return the session ranks of a state in grid order."""
    places, first = plan.ranks, plan.topology.rank_offset
    return tuple(rank if places is None else places[rank - first] for rank in plan.topology.members)


def _asked_size(launch: Launch) -> int | None:
    """Return how many ranks the launch asks for in this world, or None for as many as there are."""
    asked = launch.world_size
    if asked is None and launch.process_count == 1:
        asked = launch.local_devices
    size = whole(asked)
    if asked is not None and (size is None or size < 1):
        raise SessionError(f"Backend 'jax': world_size={asked!r}. Give an integer of at least 1.", world_size=asked)
    return size
