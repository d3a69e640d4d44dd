"""dualmesh: named parallel topologies for PyTorch and JAX, scoped and never mixed up.

This face re-exports; each name is documented where it lives, and loaded from there when it is first asked for. A new
name is written three times, for readers of types, for the loader, and in `__all__`; a test holds them together.
"""

from typing import TYPE_CHECKING

from dualmesh._support.provided import provide
from dualmesh._support.public_names import load_on_demand

if TYPE_CHECKING:
    from dualmesh import errors as errors
    from dualmesh import initializers as initializers
    from dualmesh import interop as interop
    from dualmesh import ops as ops
    from dualmesh import presets as presets
    from dualmesh import sequence as sequence
    from dualmesh.arrays.checkpoint_metadata import describe, described
    from dualmesh.arrays.distribute import constrain, distribute, local_slices, shard_local, to_numpy
    from dualmesh.arrays.loss import clip_grad_norm_, global_norm, sum_gradients, sync_gradients, token_mean
    from dualmesh.arrays.models import init_sharded
    from dualmesh.arrays.plan import ShardingPlan
    from dualmesh.arrays.reshard import reshard
    from dualmesh.arrays.transforms import remat, shard_map, value_and_grad
    from dualmesh.backend.group_factory import create_device_mesh
    from dualmesh.backend.group_options import GroupInUse
    from dualmesh.backend.state import ParallelState
    from dualmesh.config import Configuration, StateConfig
    from dualmesh.config import flags as flags
    from dualmesh.errors import DualmeshError, StaleStateError
    from dualmesh.federated.distributed_state import DistributedState
    from dualmesh.federated.exchange import federated_mean
    from dualmesh.initializers import ProcessGroupInitializer
    from dualmesh.ops import host as host
    from dualmesh.pictures import draw
    from dualmesh.presets import importers as importers
    from dualmesh.runtime.ahead_of_time import aot
    from dualmesh.runtime.debug import debug
    from dualmesh.runtime.groups_in_use import groups_in_use
    from dualmesh.runtime.init import get_parallel_state_by_name, init_parallel_state, init_parallel_states
    from dualmesh.runtime.launch import init_distributed, session
    from dualmesh.runtime.nodes import nodes
    from dualmesh.runtime.registry import strict
    from dualmesh.runtime.rng import seed_for
    from dualmesh.runtime.scope import bind, get_parallel_state, scope_name, use_parallel_state
    from dualmesh.runtime.session import Session, clear_parallel_state
    from dualmesh.runtime.wrap_module import scoped
    from dualmesh.sharding.partition_spec import P
    from dualmesh.topology.federation import FederatedSpec
    from dualmesh.topology.group_topology import GroupSpec, GroupTopology
    from dualmesh.topology.nodes import Nodes
    from dualmesh.topology.parallel_modes import ParallelMode
    from dualmesh.topology.parallel_spec import parallel_spec
    from dualmesh.topology.rank_groups import RankGroups
    from dualmesh.topology.spec import TopologySpec, View
    from dualmesh.topology.topology import Topology
    from dualmesh.weights.connect import transfer_link
    from dualmesh.weights.endpoints import Fused
    from dualmesh.weights.group import TransferGroup, transfer_group
    from dualmesh.weights.link import TransferLink
    from dualmesh.weights.plan import TransferPlan, plan_transfer
    from dualmesh.weights.store import TransferStore
    from dualmesh.weights.transfer import transfer

__version__ = "0.1.0"

_MODULES = (
    "config.flags",
    "errors",
    "initializers",
    "interop",
    "ops",
    "ops.host",
    "presets",
    "presets.importers",
    "sequence",
)
_HOMES = {
    "arrays.checkpoint_metadata": "describe described",
    "arrays.distribute": "constrain distribute local_slices shard_local to_numpy",
    "arrays.loss": "clip_grad_norm_ global_norm sum_gradients sync_gradients token_mean",
    "arrays.models": "init_sharded",
    "arrays.plan": "ShardingPlan",
    "arrays.reshard": "reshard",
    "arrays.transforms": "remat shard_map value_and_grad",
    "backend.group_factory": "create_device_mesh",
    "backend.group_options": "GroupInUse",
    "backend.state": "ParallelState",
    "config": "Configuration StateConfig",
    "errors": "DualmeshError StaleStateError",
    "federated.distributed_state": "DistributedState",
    "federated.exchange": "federated_mean",
    "initializers": "ProcessGroupInitializer",
    "pictures": "draw",
    "runtime.ahead_of_time": "aot",
    "runtime.debug": "debug",
    "runtime.groups_in_use": "groups_in_use",
    "runtime.init": "get_parallel_state_by_name init_parallel_state init_parallel_states",
    "runtime.launch": "init_distributed session",
    "runtime.nodes": "nodes",
    "runtime.registry": "strict",
    "runtime.rng": "seed_for",
    "runtime.scope": "bind get_parallel_state scope_name use_parallel_state",
    "runtime.session": "Session clear_parallel_state",
    "runtime.wrap_module": "scoped",
    "sharding.partition_spec": "P",
    "topology.federation": "FederatedSpec",
    "topology.group_topology": "GroupSpec GroupTopology",
    "topology.nodes": "Nodes",
    "topology.parallel_modes": "ParallelMode",
    "topology.parallel_spec": "parallel_spec",
    "topology.rank_groups": "RankGroups",
    "topology.spec": "TopologySpec View",
    "topology.topology": "Topology",
    "weights.connect": "transfer_link",
    "weights.endpoints": "Fused",
    "weights.group": "TransferGroup transfer_group",
    "weights.link": "TransferLink",
    "weights.plan": "TransferPlan plan_transfer",
    "weights.store": "TransferStore",
    "weights.transfer": "transfer",
}
provide(
    pictures="dualmesh.pictures", notebooks="dualmesh.pictures.notebooks", counterpart="dualmesh.runtime.counterpart"
)
if not TYPE_CHECKING:
    __getattr__, __dir__ = load_on_demand(__name__, _MODULES, _HOMES)

__all__ = [
    "Configuration",
    "DistributedState",
    "DualmeshError",
    "FederatedSpec",
    "Fused",
    "GroupInUse",
    "GroupSpec",
    "GroupTopology",
    "Nodes",
    "P",
    "ParallelMode",
    "ParallelState",
    "ProcessGroupInitializer",
    "RankGroups",
    "Session",
    "ShardingPlan",
    "StaleStateError",
    "StateConfig",
    "Topology",
    "TopologySpec",
    "TransferGroup",
    "TransferLink",
    "TransferPlan",
    "TransferStore",
    "View",
    "aot",
    "bind",
    "clear_parallel_state",
    "clip_grad_norm_",
    "constrain",
    "create_device_mesh",
    "debug",
    "describe",
    "described",
    "distribute",
    "draw",
    "federated_mean",
    "flags",
    "get_parallel_state",
    "get_parallel_state_by_name",
    "global_norm",
    "groups_in_use",
    "host",
    "importers",
    "init_distributed",
    "init_parallel_state",
    "init_parallel_states",
    "init_sharded",
    "initializers",
    "interop",
    "local_slices",
    "nodes",
    "ops",
    "parallel_spec",
    "plan_transfer",
    "presets",
    "remat",
    "reshard",
    "scope_name",
    "scoped",
    "seed_for",
    "sequence",
    "session",
    "shard_local",
    "shard_map",
    "strict",
    "sum_gradients",
    "sync_gradients",
    "to_numpy",
    "token_mean",
    "transfer",
    "transfer_group",
    "transfer_link",
    "use_parallel_state",
    "value_and_grad",
]
