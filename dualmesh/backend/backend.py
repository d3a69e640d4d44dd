"""The contract of a backend: start a world, build states in it, mirror the scope.

What a backend does to arrays is in `collectives`; how backends are found and chosen is in `discovery`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dualmesh.backend.array_bridge import Border
from dualmesh.backend.carrier import Carrier, NoCarrier
from dualmesh.backend.group_factory import Fabric
from dualmesh.backend.state import ParallelState
from dualmesh.backend.state_plan import StatePlan, World
from dualmesh.errors import BackendError

if TYPE_CHECKING:
    from dualmesh.backend.group_options import GroupInUse


@dataclass(frozen=True)
class Launch:
    """What a launcher or the caller said about this process' place in the world."""

    rank: int = 0
    """Process rank."""
    world_size: int | None = None
    """Torch: processes. JAX and sim: ranks. None: whatever there is."""
    process_count: int = 1
    local_rank: int = 0
    init_method: str | None = None
    """"tcp://host:port" or "env://"; None: nobody to meet."""
    by_launcher: bool = False
    """The launcher said `init_method`, not the caller: its own store may listen there."""
    has_launchers_store: bool = False
    """A store of torchrun's listens there, so no process of the world need hold one."""
    attempt: int = 0
    """How often the launcher has started these processes anew: what they left in its store is another world's."""
    has_own_device: bool = False
    """The launcher gives each process the device of its `local_rank`."""
    local_devices: int | None = None
    """Ranks that this process holds, where the backend lets one choose."""
    timeout_s: float | None = None
    device_order: Any = None
    """Which device is which rank, where the backend lets one choose: see `init_distributed`."""
    axis_types: str | None = None
    """What kind of axes meshes have, where the framework has several."""
    shares_devices: bool = False
    """Another framework computes on this process' device too: leave it memory, and use no other device."""


class Backend(ABC):
    """A framework that dualmesh can drive. One instance per process, made by the entry point `dualmesh.backends`.

    The entry point's name is the backend's name and, where there is one, the framework's import name.
    """

    name: ClassVar[str]
    launch_settings: ClassVar[tuple[str, ...]] = ()
    """Those of `device_order`, `axis_types` that `start` understands."""
    leads: ClassVar[bool] = False
    """Whether a running world can tell its processes where those of another framework meet: `agreed_address`."""

    @abstractmethod
    def world(self) -> World | None:
        """Return the live world, whoever started it, or None. *Local.*"""

    @abstractmethod
    def start(self, launch: Launch) -> World:
        """Start a world. *Collective over all processes, with a timeout.*

        Raises:
            SessionError: It cannot be started as asked; nothing is left half started.
        """

    @abstractmethod
    def stop(self, world: World) -> None:
        """End a world that `start` started. *Local*; never waits for other ranks."""

    def agreed_address(self, world: World) -> str:
        """Return host:port of process 0 on which nobody listens, the same in every process. *Collective.*"""
        raise BackendError(f"Backend {self.name!r} cannot tell other processes where to meet.", backend=self.name)

    @abstractmethod
    def build(self, plans: Sequence[StatePlan], world: World) -> list[ParallelState]:
        """Build states, all or none. *Collective over the members, in the same order.*

        Everything that can be wrong with a plan is refused before the first group exists.
        """

    @abstractmethod
    def release(self, states: Sequence[ParallelState]) -> None:
        """Let go of what only these states hold. *Local.*"""

    def scoped(self, target: Any, name_or_state: str | ParallelState) -> Any | None:
        """Return a module of this framework whose calls run in a state, or None for any other object. *Local.*

        The same object where it can be; the name is looked up at each call. See `dualmesh.scoped`.
        """
        return None

    def groups_in_use(self) -> "tuple[GroupInUse, ...]":
        """Return the process groups that the backend holds in this process. *Local.* See `dualmesh.groups_in_use`."""
        return ()

    def border(self) -> Border:
        """Return what hands arrays to other frameworks and takes theirs in. *Local.*

        Raises:
            BackendError: The backend has none.
        """
        raise BackendError(f"Backend {self.name!r} hands no arrays to other frameworks.", backend=self.name)

    def transfer_carrier(self) -> Carrier:
        """Return what makes the native group of one transfer group, where there is such a thing. *Local.*"""
        return NoCarrier(self.name)

    def fabric(self) -> Fabric:
        """Return what makes the meshes and groups of a `DistributedState`. *Local.*

        Raises:
            BackendError: The backend has none.
        """
        raise BackendError(
            f"Backend {self.name!r} makes no meshes and groups for a DistributedState. Give one: "
            f"DistributedState(fabric=...).",
            backend=self.name,
        )
