"""Federated averaging of a simulated rank's blocks.

Who exchanges what is planned in `dualmesh.topology.averaging`.
"""

from typing import TYPE_CHECKING, Any

from dualmesh._support.optional_imports import np
from dualmesh.errors import ArrayTypeError
from dualmesh.topology.averaging import AveragingPlan

if TYPE_CHECKING:
    from dualmesh_sim.state import SimState

AXES = {"mean": "replica", "exchange": "federated", "broadcast": "replica"}


def average(state: "SimState", x: Any, plan: AveragingPlan) -> Any:
    """Return the mean of a block. *Collective over the state's ranks.*"""
    value = np.asarray(x)
    if value.dtype.kind not in "fc":
        raise ArrayTypeError(
            f"federated_mean: found {value.dtype} of shape {value.shape}. A mean is taken of floating or complex "
            f"arrays: leave it out of the tree.",
            found=value.dtype,
        )
    state.collectives.admit("federated_mean", value, "world")
    rank = state.grid_rank(state.own_rank())
    for step in plan.steps(rank):
        place, axis = step.ranks.index(rank), AXES[step.action]
        if step.action == "broadcast":
            value = state.collectives.broadcast(value, axis, src=step.src)
            continue
        weight = step.weights[place] if step.pieces[place].place == 0 else 0.0
        part = value * value.dtype.type(weight) if weight else np.zeros_like(value)
        value = state.collectives.all_reduce(part, axis, op="sum")
    return value
