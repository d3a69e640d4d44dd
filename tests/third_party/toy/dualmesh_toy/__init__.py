"""A backend by a stranger, from dualmesh's public classes alone: starting worlds and building states."""

from dualmesh.backend import Backend, World
from dualmesh.errors import BackendError
from dualmesh_toy.state import ToyState


class ToyBackend(Backend):
    """Ranks are threads of this process."""

    name = "toy"

    def __init__(self):
        self._world = None

    def world(self):
        return self._world

    def start(self, launch):
        size = launch.world_size or 1
        world = World(size, tuple(range(size)), "cpu", 1, lambda: self._world is world)
        self._world = world
        return world

    def stop(self, world):
        self._world = None

    def build(self, plans, world):
        for plan in plans:
            if plan.device_type != "cpu":
                raise BackendError(f"toy: device_type={plan.device_type!r}. Only 'cpu' is there.")
        return [ToyState(plan, world) for plan in plans]

    def release(self, states):
        pass
