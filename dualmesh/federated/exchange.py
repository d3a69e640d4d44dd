"""`federated_mean`: the weighted mean of the models of all federations, on every rank.

Which steps that takes is planned in `averaging`; backends carry them out.
"""

from collections.abc import Iterable
from typing import Any

from dualmesh.backend.state import ParallelState
from dualmesh.errors import ArgumentError, SessionError
from dualmesh.federated.distributed_state import DistributedState
from dualmesh.runtime.registry import registry
from dualmesh.runtime.scope import get_parallel_state
from dualmesh.topology.averaging import AveragingPlan, averaging_plan
from dualmesh.topology.federation_axes import FederatedGroups

NO_FEDERATION = (
    "federated_mean: {label} has no federations. Register one, dm.init_parallel_state(spec=dm.FederatedSpec((4, 2)), "
    "name='federation'), and give that state or its name."
)


def federated_mean(
    tree: Any,
    state: ParallelState | DistributedState | str | None = None,
    weights: Iterable[float] | None = None,
    *,
    average_replicas: bool = False,
) -> Any:
    """Return a tree of the weighted means of all federations' values. *Collective over the state's ranks.*

    Only the communicating ranks exchange between federations; each then broadcasts to its replica group. Values enter
    as they are, without gradient; narrow floats are summed in 32 bits. Every rank of a federation gives its own model.

    - torch: plain tensors are whole values (or, where every rank's peers hold the same part, like shards); DTensors lie
      on a mesh of the federation's ranks, split over the ranks of one replica.
    - JAX, in `dm.shard_map`: this rank's blocks. Outside: arrays over the federation's devices; a process with ranks of
      several federations gives a list with one tree for each of these, and gets one.
    - sim: this rank's blocks in `dm.shard_map`.

    Args:
        tree: Nested containers of arrays.
        state: A state (or its name) registered from a `FederatedSpec`, or a `DistributedState` with federations; None:
            the ambient state.
        weights: One per federation, for example its number of samples; None: all the same.
        average_replicas: Whether the replicas of a federation differ, so that each federation first takes their mean.

    Raises:
        SpecError: The weights are not one finite number of at least 0 per federation, or all 0.
        ArgumentError: The state has no federations.
        AgreementError: Ranks gave different trees or weights.

    >>> import numpy as np, dualmesh as dm
    >>> with dm.session(backend="sim", world_size=6):
    ...     state = dm.init_parallel_state(spec=dm.FederatedSpec((4, 2), shard_size=2), name="federation")
    ...     models = np.array([[1.0], [2.0], [1.0], [2.0], [5.0], [6.0]])  # two shards, three replicas
    ...     mean = dm.shard_map(lambda x: dm.federated_mean(x, state, (3, 1)), dm.P("world"), dm.P("world"), state)
    ...     dm.to_numpy(mean(models), state=state).ravel().tolist()
    [2.0, 3.0, 2.0, 3.0, 2.0, 3.0]
    """
    if isinstance(state, DistributedState):
        if state.federated_topology is None:
            raise SessionError(
                "federated_mean: the DistributedState has no federations. Call set_federated_scaling(sizes) first."
            )
        plan = averaging_plan(state.federated_topology, weights, averages_replicas=average_replicas)
        return state.fabric_in_use.federated_mean(tree, plan, state)
    found = get_parallel_state() if state is None else registry.get(state) if isinstance(state, str) else state
    if not isinstance(found, ParallelState):
        raise ArgumentError(f"federated_mean: {state!r} is no state. Give a state or its name.", state=state)
    found.require_live("federated_mean")
    return found.programs.federated_mean(tree, plan_for(found, weights, average_replicas))


def plan_for(state: ParallelState, weights: Iterable[float] | None, average_replicas: bool) -> AveragingPlan:
    """Return the plan of a state's federations. *Pure.*"""
    spec: object = state.spec
    if not isinstance(spec, FederatedGroups):
        raise ArgumentError(NO_FEDERATION.format(label=state.label), state=state)
    return averaging_plan(spec.federation, weights, averages_replicas=average_replicas)
