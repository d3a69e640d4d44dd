"""What a state is made from: the live world that it is in, and the plan that makes two states the same state.

States themselves are in `state`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from dualmesh.group_options import GroupOptions
from dualmesh.topology import Topology


@dataclass(frozen=True)
class World:
    """The live world that a backend runs in: torch processes, JAX devices, simulated ranks."""

    size: int
    local_ranks: tuple[int, ...]
    """Ranks that this process holds."""
    device_type: str
    process_count: int
    is_live: Callable[[], bool] = field(compare=False)
    """Whether this very world still exists; a re-created one is another."""


@dataclass(frozen=True)
class StatePlan:
    """Everything that makes two states the same state."""

    topology: Topology
    ranks: tuple[int, ...] | None
    """Session ranks in grid order; None: the topology's own ranks."""
    backend: str
    device_type: str
    dp_mode: str = "fsdp2"
    async_enabled: bool = False
    own_groups: bool = False
    group_options: GroupOptions = ()
    extra_parallel_names: tuple[str, ...] | None = None
    """The extra parallels as they were declared, those of size 1 too; None: as the topology's views say."""
    name: str = field(default="", compare=False)
    """The name that it was first asked for under; equal states under several names are one state."""
    owner: str = field(init=False, default="")
    """The name, where the state has groups of its own: each name that asks for them is another state."""

    def __post_init__(self) -> None:
        if self.own_groups:
            object.__setattr__(self, "owner", self.name)
