"""The life of a world: its session, which states it has, how it ends.

What users call to start one, or several together, is in `launch`; states are built in `init`.
"""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from dualmesh.backend import discovery
from dualmesh.backend.backend import Backend
from dualmesh.backend.state import ParallelState
from dualmesh.backend.state_plan import World
from dualmesh.errors import BackendError, ScopeError, SessionError, listed
from dualmesh.runtime import environment, scope
from dualmesh.runtime.registry import registry
from dualmesh.topology.resolve import whole

_sessions: dict[str, "Session"] = {}
_lock = threading.RLock()


class Session:
    """The life of one world. `close()` ends it; a world that the caller started stays the caller's.

    Attributes:
        backend: The backend's name.
        world_size: Ranks in the world.
        local_ranks: Ranks that this process holds.
    """

    def __init__(self, driver: Backend, world: World, *, owned: bool) -> None:
        self.driver = driver
        self.world = world
        self.owned = owned
        self.backend = driver.name
        self.world_size = world.size
        self.local_ranks = world.local_ranks

    @property
    def is_live(self) -> bool:
        """Whether the world still exists."""
        return self.world.is_live()

    def states(self) -> list[ParallelState]:
        """Return the registered states of this session. *Local.*"""
        return [state for state in registry.states() if state.world is self.world]

    def close(self) -> None:
        """Clear the session's states and end its world, if dualmesh started it. *Local*; idempotent."""
        with _lock:
            forget(self.states())
            if _sessions.get(self.backend) is self:
                del _sessions[self.backend]
            if self.owned and self.is_live:
                self.driver.stop(self.world)

    def __repr__(self) -> str:
        life = "live" if self.is_live else "ended"
        return f"<Session {self.backend!r}, world_size={self.world_size}, local_ranks={self.local_ranks}, {life}>"


def start_session(
    backend: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
    local_devices: int | None = None,
    timeout_s: float | None = None,
    device_order: Any = None,
    axis_types: str | None = None,
) -> Session:
    """Return the session of one framework's world, starting it where none runs: see `launch.init_distributed`."""
    if world_size is not None and whole(world_size) is None:
        raise SessionError(f"init_distributed: world_size={world_size!r} is no integer.", world_size=world_size)
    if init_method is not None and not isinstance(init_method, str):
        raise SessionError(
            f"init_distributed: init_method={init_method!r}. Give 'tcp://host:port' of process 0.",
            init_method=init_method,
        )
    with _lock:
        driver = discovery.choose(backend, _live_backends())
        launch = environment.launch_from(
            os.environ,
            rank=rank,
            world_size=world_size,
            init_method=init_method,
            local_devices=local_devices,
            timeout_s=timeout_s,
        )
        settings = {"device_order": device_order, "axis_types": axis_types}
        settings = {name: value for name, value in settings.items() if value is not None}
        launch = replace(launch, **settings)
        running = _running(driver, settings)
        if running is not None:
            session = adopt_world(driver, running)
            noun, found = ("ranks", running.size) if rank is None else ("processes", running.process_count)
            if world_size is not None and world_size != found:
                raise SessionError(
                    f"init_distributed: a {driver.name} world of {found} {noun} runs already, asked for "
                    f"{world_size}. End it first (Session.close()).",
                    found=found,
                    asked=world_size,
                )
            return session
        return keep_session(Session(driver, driver.start(launch), owned=True))


def _running(driver: Backend, settings: Mapping[str, Any]) -> World | None:
    """Return the world that runs already, unless settings that it was not started with are still possible."""
    foreign = [name for name in settings if name not in driver.launch_settings]
    if foreign:
        raise BackendError(
            f"init_distributed: backend {driver.name!r} has no {listed(foreign)}. Leave it out; its settings: "
            f"{listed(driver.launch_settings)}.",
            settings=tuple(foreign),
        )
    running = driver.world()
    if running is None or not settings:
        return running
    if driver.name in _live_backends():
        raise SessionError(
            f"init_distributed: a {driver.name} world runs already, and {listed(settings)} hold from its start. End it "
            f"first (Session.close()).",
            settings=tuple(settings),
        )
    return None


@contextmanager
def session_for(backend: str | None) -> Iterator[Session]:
    """Yield the live session of the backend meant; a world started for the block ends if the block raises. *Local.*"""
    with _lock:
        driver = driver_for(backend)
        running = driver.world()
        current = start_session(driver.name) if running is None else adopt_world(driver, running)
    try:
        yield current
    except BaseException:
        if running is None:
            current.close()
        raise


def driver_for(backend: str | None) -> Backend:
    """Return the backend meant, whether its world runs or not. *Local.*"""
    with _lock:
        return discovery.choose(backend, _live_backends())


def adopt_world(driver: Backend, running: World) -> Session:
    """Return the session of a running world; states of a world that ended before are forgotten. *Local.*"""
    known = _sessions.get(driver.name)
    if known is not None and known.is_live:
        return known
    if known is not None:
        forget(known.states())
    return keep_session(Session(driver, running, owned=False))


def keep_session(new: Session) -> Session:
    """Remember a session as the one that is meant when none is named. *Local.*"""
    _sessions.pop(new.backend, None)
    _sessions[new.backend] = new
    return new


def _live_backends() -> list[str]:
    for name in [name for name, known in _sessions.items() if not known.is_live]:
        forget(_sessions.pop(name).states())
    return list(_sessions)


def forget(states: list[ParallelState]) -> None:
    """Unregister states and let their backends release what only they hold. *Local.*"""
    default = scope.default_state()
    if any(state is default for state in states):
        scope.close_all()
    registry.drop(states)
    for name in dict.fromkeys(state.backend for state in states):
        mine = [state for state in states if state.backend == name]
        for state in mine:
            state.release()
        discovery.load(name).release(mine)
    _next_default()


def _next_default() -> None:
    """Keep a default while states of another session are registered."""
    names = registry.names()
    if names and scope.default_state() is None:
        scope.set_default(registry.get(names[0]), names[0])


def clear_parallel_state(name: str | None = None) -> None:
    """Forget the ambient state, all names and all states, and release their groups. *Local*; idempotent.

    The world goes on. Old handles still answer sizes and ranks; using their groups, meshes or collectives raises
    `StaleStateError`. Safe before and after the world was destroyed.

    Args:
        name: Forget this name only, and its state where it has no other; the next name takes its place as default.

    Raises:
        UnknownStateError: The name is not registered.
        ScopeError: A name is cleared while a scope is open.
    """
    with _lock:
        if name is None:
            scope.close_all()
            forget(registry.states())
        else:
            _clear_name(name)


def _clear_name(name: str) -> None:
    was_last = registry.get(name).names == [name]
    open_scope = scope.current_scope()
    if open_scope is not None:
        raise ScopeError(
            f"clear_parallel_state: {name!r} is cleared inside the scope {open_scope.name!r}. Leave all scopes first.",
            name=name,
            inner=(open_scope.name,),
        )
    was_default = scope.scope_name() == name
    state = registry.drop_name(name)
    if was_last:
        forget([state])
    elif was_default:
        scope.set_default(state, state.names[0])
