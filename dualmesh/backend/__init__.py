"""All that a backend implements and is given.

A backend is found by the entry-point group `dualmesh.backends`. Its author imports from here, and errors from `errors`;
inside dualmesh each name is imported from its own module.
"""

from typing import TYPE_CHECKING

from dualmesh._support.public_names import load_on_demand

if TYPE_CHECKING:
    from dualmesh._support.waits import timeout_s
    from dualmesh.backend.array_bridge import Border, Linear, Piece
    from dualmesh.backend.arrays import Arrays
    from dualmesh.backend.backend import Backend, Launch
    from dualmesh.backend.carrier import Carrier, NoCarrier
    from dualmesh.backend.collectives import Collectives, Kind
    from dualmesh.backend.group_factory import Fabric
    from dualmesh.backend.group_options import GroupInUse, GroupOptions
    from dualmesh.backend.host import HostObjects
    from dualmesh.backend.host_blocks import HostLeaf
    from dualmesh.backend.models import Models
    from dualmesh.backend.pending import Finished, Pending
    from dualmesh.backend.plain_models import PlainModels
    from dualmesh.backend.state import ParallelState
    from dualmesh.backend.state_plan import StatePlan, World
    from dualmesh.backend.transforms import Programs
    from dualmesh.backend.transpose_rules import Call, call, gradient
    from dualmesh.sharding.partition_spec import P, check_axes, dim_layouts, global_shape, local_shape, slices_of
    from dualmesh.sharding.redistribution import Placed, Reshard
    from dualmesh.sharding.tree import leaves, mapped, spec_tree
    from dualmesh.topology.averaging import AveragingPlan
    from dualmesh.topology.topology import Axis, Topology

_HOMES = {
    "_support.waits": "timeout_s",
    "backend.array_bridge": "Border Linear Piece",
    "backend.arrays": "Arrays",
    "backend.backend": "Backend Launch",
    "backend.carrier": "Carrier NoCarrier",
    "backend.collectives": "Collectives Kind",
    "backend.group_factory": "Fabric",
    "backend.group_options": "GroupInUse GroupOptions",
    "backend.host": "HostObjects",
    "backend.host_blocks": "HostLeaf",
    "backend.models": "Models",
    "backend.pending": "Finished Pending",
    "backend.plain_models": "PlainModels",
    "backend.state": "ParallelState",
    "backend.state_plan": "StatePlan World",
    "backend.transforms": "Programs",
    "backend.transpose_rules": "Call call gradient",
    "sharding.partition_spec": "P check_axes dim_layouts global_shape local_shape slices_of",
    "sharding.redistribution": "Placed Reshard",
    "sharding.tree": "leaves mapped spec_tree",
    "topology.averaging": "AveragingPlan",
    "topology.topology": "Axis Topology",
}
if not TYPE_CHECKING:
    __getattr__, __dir__ = load_on_demand(__name__, (), _HOMES, base="dualmesh")

__all__ = [
    "Arrays",
    "AveragingPlan",
    "Axis",
    "Backend",
    "Border",
    "Call",
    "Carrier",
    "Collectives",
    "Fabric",
    "Finished",
    "GroupInUse",
    "GroupOptions",
    "HostLeaf",
    "HostObjects",
    "Kind",
    "Launch",
    "Linear",
    "Models",
    "NoCarrier",
    "P",
    "ParallelState",
    "Pending",
    "Piece",
    "Placed",
    "PlainModels",
    "Programs",
    "Reshard",
    "StatePlan",
    "Topology",
    "World",
    "call",
    "check_axes",
    "dim_layouts",
    "global_shape",
    "gradient",
    "leaves",
    "local_shape",
    "mapped",
    "slices_of",
    "spec_tree",
    "timeout_s",
]
