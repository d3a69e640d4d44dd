"""What a state is made from: the live world that it is in, and the plan that makes two states the same state.

Here is also the text of plans that ranks compare, once for all backends. States themselves are in `state`.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from dualmesh import __version__
from dualmesh.backend.group_options import GroupOptions
from dualmesh.topology.spec import TopologySpec
from dualmesh.topology.topology import Topology


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


def describe_plans(plans: Sequence[StatePlan], world: str = "") -> str:
    """Return the text that ranks compare before they build states: whatever differs between plans is in it. *Pure.*

    Args:
        plans: The states to be built, in an order that all ranks share.
        world: What else they depend on, in words.
    """
    return f"{len(plans)} to build by dualmesh {__version__}{world}: " + "; ".join(map(_describe_plan, plans))


def _describe_plan(plan: StatePlan) -> str:
    # Read off the fields, so that a new one cannot be forgotten here.
    said = [f"{plan.name!r}: {_describe_spec(plan.topology.spec)}"]
    for each in fields(plan):
        value = getattr(plan, each.name)
        is_usual = value is None or (each.default is not MISSING and value == each.default)
        if each.init and each.name not in ("name", "topology") and (each.name == "dp_mode" or not is_usual):
            said.append(f"{each.name}={dict(value) if each.name == 'group_options' else value!r}")
    return ", ".join(said)


def _describe_spec(spec: Any) -> str:
    """Return a spec as it is written; lists of ranks, which messages shorten, with a digest of the whole."""
    if isinstance(spec, TopologySpec):
        return repr(spec)
    return f"{spec!r} ({hashlib.sha256(repr(spec.to_dict()).encode()).hexdigest()[:8]})"


def ranks_of(plan: StatePlan) -> Sequence[int]:
    """Return the session ranks of a state in grid order. *Pure.*"""
    first = plan.topology.rank_offset
    return plan.ranks if plan.ranks is not None else range(first, first + plan.topology.world_size)
