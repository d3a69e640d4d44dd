"""A state as plain data beside a checkpoint, and its topology read back.

What differs between two topologies is said by `Topology.diff`.
"""

from collections.abc import Mapping
from typing import Any

from dualmesh.arrays.plan import ShardingPlan
from dualmesh.backend.state import ParallelState
from dualmesh.errors import ArgumentError, SpecError, listed
from dualmesh.runtime.scope import resolve_state
from dualmesh.topology.federation import FederatedSpec
from dualmesh.topology.group_topology import GroupSpec
from dualmesh.topology.spec import TopologySpec
from dualmesh.topology.topology import Topology

FORMAT = 2
_READ = (1, FORMAT)
"""Formats that are read: the first had mappings where order is meaning, read where their order can be known."""
_KEYS = ("format", "names", "backend", "device_type", "world_size", "ranks", "spec", "plan")


def describe(state: ParallelState | None = None, plan: ShardingPlan | None = None) -> dict[str, Any]:
    """Return a state as plain data that JSON takes, to be saved in a checkpoint. *Pure.*

    Args:
        state: The state; None: the ambient one.
        plan: The plan of the model in the checkpoint, to be saved with it.

    >>> import dualmesh as dm
    >>> with dm.session(backend="sim", world_size=4):
    ...     saved = dm.describe(dm.init_parallel_state(dp_size=4))
    >>> with dm.session(backend="sim", world_size=2):
    ...     now = dm.init_parallel_state(dp_size=2)
    >>> print(dm.described(saved).diff(now.topology))
    world_size: 4 -> 2
    dp_shard: size 4 -> 2
    dp: size 4 -> 2
    dp_shard_sp: size 4 -> 2
    dp_sp: size 4 -> 2
    """
    owner = resolve_state("describe", state)
    if plan is not None and not isinstance(plan, ShardingPlan):
        raise ArgumentError(f"describe: plan={plan!r}. Give a dm.ShardingPlan, or leave it out.", plan=plan)
    return {
        "format": FORMAT,
        "names": list(owner.names),
        "backend": owner.backend,
        "device_type": owner.device_type,
        "world_size": owner.topology.world_size,
        "ranks": None if owner.plan.ranks is None else list(owner.plan.ranks),
        "spec": owner.topology.spec.to_dict(),
        "plan": None if plan is None else plan.to_dict(),
    }


def described(data: Mapping[str, Any]) -> Topology:
    """Return the topology that `describe` wrote down. *Pure.*

    Raises:
        SpecError: The data is not of `describe`, or of a later version.
    """
    missing = [key for key in _KEYS if key not in data] if isinstance(data, Mapping) else list(_KEYS)
    if missing or data["format"] not in _READ:
        found = f"{listed(missing)} missing" if missing else f"format {data['format']!r}"
        raise SpecError(f"described: {found}. Give what dm.describe returned, format {listed(_READ)}.", data=data)
    size, spec = data["world_size"], data["spec"]
    if isinstance(spec, Mapping) and "group_sizes" in spec:
        return FederatedSpec.from_dict(spec).resolve(size).group_spec().resolve(size)
    kind = GroupSpec if isinstance(spec, Mapping) and "rank_groups" in spec else TopologySpec
    return kind.from_dict(spec).resolve(size)
