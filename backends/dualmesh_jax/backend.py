"""`JaxBackend`: a world of JAX devices, one per rank, in one process or several.

Which states share a mesh is in `meshes`, how jit learns of the scope in `scope`.
"""

import os
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType

from dualmesh._support import waits
from dualmesh.backend.array_bridge import Border
from dualmesh.backend.backend import Backend, Launch
from dualmesh.backend.group_factory import Fabric
from dualmesh.backend.state import ParallelState
from dualmesh.backend.state_plan import StatePlan, World
from dualmesh.errors import BackendError, SessionError
from dualmesh.runtime.registry import registry
from dualmesh.runtime.scope import add_mirror
from dualmesh.topology.resolve import whole
from dualmesh_jax.agreement import agree_on, members
from dualmesh_jax.arrays.arrays import is_tracing
from dualmesh_jax.cache_keys import key_by_names
from dualmesh_jax.devices import axis_type, check_local, ordered_devices, request_cpu_devices, too_few
from dualmesh_jax.group_factory import JaxFabric
from dualmesh_jax.interop import JaxBorder
from dualmesh_jax.launch import join, joins_others, leave_memory
from dualmesh_jax.mesh.meshes import MeshBook
from dualmesh_jax.models import scoped_modules
from dualmesh_jax.private import backend_is_initialized
from dualmesh_jax.scope import JaxMirror
from dualmesh_jax.state import JaxState
from dualmesh_jax.store import JaxStore, open_store

EXCHANGE_S = 1800.0


class JaxBackend(Backend):
    """JAX devices as ranks, in the order (process, position in the process)."""

    name = "jax"
    launch_settings = ("device_order", "axis_types")

    def __init__(self) -> None:
        self._world: World | None = None
        self._book = MeshBook(())
        self._states: list[JaxState] = []
        self._store: JaxStore | None = None
        self._launched = False
        add_mirror(JaxMirror())
        registry.add_compiler(is_tracing, key_by_names)

    def world(self) -> World | None:
        if self._world is None and not self._launched and jax.distributed.is_initialized():
            # The user's own runtime; asking must not start JAX's backend, which waits for the other processes.
            return self._opened(ordered_devices()) if backend_is_initialized() else None
        return self._world

    def start(self, launch: Launch) -> World:
        several, types = joins_others(launch), axis_type(launch.axis_types)
        if launch.shares_devices:
            leave_memory()
        asked = _asked_size(launch, several)
        if several:
            request_cpu_devices(launch.local_devices)
            join(launch, waits.timeout_s(launch.timeout_s))
            self._launched = True
            check_local(launch.local_devices)
        else:
            request_cpu_devices(asked)
        devices = ordered_devices(launch.device_order)
        size = len(devices) if asked is None else asked
        if size > len(devices):
            raise too_few(size, devices)
        return self._opened(devices[:size], launch.timeout_s, types)

    def _opened(
        self, devices: Sequence[jax.Device], timeout_s: float | None = None, types: AxisType = AxisType.Auto
    ) -> World:
        mine = tuple(rank for rank, device in enumerate(devices) if device.process_index == jax.process_index())
        kind = devices[0].platform
        world = World(
            size=len(devices),
            local_ranks=mine,
            device_type="cuda" if kind == "gpu" else kind,
            process_count=len({device.process_index for device in devices}),
            is_live=lambda: self._world is world,
        )
        self._world, self._book = world, MeshBook(devices, types)
        self._store = open_store(_wait_s(timeout_s))
        return world

    def stop(self, world: World) -> None:
        """End the session's epoch; JAX's own world cannot be re-created in a process, so it goes on."""
        if self._world is world:
            if self._store is not None:
                self._store.leave()
            self._world, self._book, self._store = None, MeshBook(()), None

    def build(self, plans: Sequence[StatePlan], world: World) -> list[ParallelState]:
        for plan in plans:
            if plan.device_type not in (world.device_type, "gpu" if world.device_type == "cuda" else world.device_type):
                raise BackendError(
                    f"Backend 'jax': device_type={plan.device_type!r}, but the world's devices are "
                    f"{world.device_type!r}. Leave device_type out, or choose JAX's platform before it starts "
                    f"(JAX_PLATFORMS).",
                    device_type=plan.device_type,
                )
        if self._store is not None:
            process_of = {rank: device.process_index for rank, device in enumerate(self._book.devices)}
            agree_on(plans, process_of, self._book.said(ordered_devices()), self._store)
        shared = [self._book.shared(members(plan), plan.topology) for plan in plans]
        built = [JaxState(plan, world, mesh, self._store) for plan, mesh in zip(plans, shared, strict=True)]
        self._states += built
        return list(built)

    def border(self) -> Border:
        return JaxBorder()

    def fabric(self) -> Fabric:
        self.world()
        return JaxFabric(self._book.devices, self._store)

    def scoped(self, target: Any, name_or_state: str | ParallelState) -> Any | None:
        return scoped_modules.scope_module(target, name_or_state)

    def release(self, states: Sequence[ParallelState]) -> None:
        gone = {id(state) for state in states}
        self._states = [state for state in self._states if id(state) not in gone]
        self._book.keep_only({state.shared.serial for state in self._states})


def _asked_size(launch: Launch, several: bool) -> int | None:
    """Return how many ranks the launch asks for in this world, or None for as many as there are."""
    asked = launch.world_size
    if asked is None and not several:
        asked = launch.local_devices
    size = whole(asked)
    if asked is not None and (size is None or size < 1):
        raise SessionError(f"Backend 'jax': world_size={asked!r}. Give an integer of at least 1.", world_size=asked)
    return size


def _wait_s(given: float | None) -> float:
    """Return how long objects between processes wait: what was given or set, else as long as torch does."""
    if given is None and not os.environ.get(waits.TIMEOUT_VARIABLE):
        return EXCHANGE_S
    return waits.timeout_s(given)
