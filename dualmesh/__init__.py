"""dualmesh: named parallel topologies for PyTorch and JAX, scoped and never mixed up.

This face re-exports; each name is documented where it lives, and loaded from there when it is first asked for. A new
name is written three times, for readers of types, for the loader, and in `__all__`; a test holds them together.
"""

from typing import TYPE_CHECKING

from dualmesh.face import face

if TYPE_CHECKING:
    from dualmesh import errors as errors
    from dualmesh import flags as flags
    from dualmesh import host as host
    from dualmesh import importers as importers
    from dualmesh import initializers as initializers
    from dualmesh import interop as interop
    from dualmesh import ops as ops
    from dualmesh import presets as presets
    from dualmesh import sequence as sequence
    from dualmesh.ahead_of_time import aot
    from dualmesh.arrays import constrain, distribute, local_slices, shard_local, to_numpy
    from dualmesh.configuration import Configuration, StateConfig
    from dualmesh.debugging import debug
    from dualmesh.description import describe, described
    from dualmesh.distributed_state import DistributedState
    from dualmesh.errors import DualmeshError, StaleStateError
    from dualmesh.fabric import create_device_mesh
    from dualmesh.federated_exchange import federated_mean
    from dualmesh.federation import FederatedSpec
    from dualmesh.group_topology import GroupSpec, GroupTopology
    from dualmesh.groups_in_use import GroupInUse, groups_in_use
    from dualmesh.initialization import get_parallel_state_by_name, init_parallel_state, init_parallel_states
    from dualmesh.initializers import ProcessGroupInitializer
    from dualmesh.loss import clip_grad_norm_, global_norm, sum_gradients, sync_gradients, token_mean
    from dualmesh.node_discovery import nodes
    from dualmesh.nodes import Nodes
    from dualmesh.parallel_modes import ParallelMode
    from dualmesh.partition_spec import P
    from dualmesh.pictures import draw
    from dualmesh.plan import ShardingPlan
    from dualmesh.plan_models import init_sharded
    from dualmesh.programs import remat, shard_map, value_and_grad
    from dualmesh.rank_groups import RankGroups
    from dualmesh.registry import strict
    from dualmesh.resharding import reshard
    from dualmesh.scope import bind, get_parallel_state, scope_name, use_parallel_state
    from dualmesh.scoped import scoped
    from dualmesh.seeds import seed_for
    from dualmesh.session import Session, clear_parallel_state
    from dualmesh.spec import TopologySpec, View
    from dualmesh.starting import init_distributed, session
    from dualmesh.state import ParallelState
    from dualmesh.topology import Topology
    from dualmesh.transfer_ends import Fused
    from dualmesh.transfer_groups import TransferGroup, transfer_group
    from dualmesh.transfer_linking import transfer_link
    from dualmesh.transfer_links import TransferLink
    from dualmesh.transfer_plan import TransferPlan, plan_transfer
    from dualmesh.transfer_store import TransferStore
    from dualmesh.transferring import transfer
    from dualmesh.usual import parallel_spec

__version__ = "0.1.0"

_MODULES = ("errors", "flags", "host", "importers", "initializers", "interop", "ops", "presets", "sequence")
_HOMES = {
    "ahead_of_time": "aot",
    "arrays": "constrain distribute local_slices shard_local to_numpy",
    "configuration": "Configuration StateConfig",
    "debugging": "debug",
    "description": "describe described",
    "distributed_state": "DistributedState",
    "errors": "DualmeshError StaleStateError",
    "fabric": "create_device_mesh",
    "federated_exchange": "federated_mean",
    "federation": "FederatedSpec",
    "group_topology": "GroupSpec GroupTopology",
    "groups_in_use": "GroupInUse groups_in_use",
    "initialization": "get_parallel_state_by_name init_parallel_state init_parallel_states",
    "initializers": "ProcessGroupInitializer",
    "loss": "clip_grad_norm_ global_norm sum_gradients sync_gradients token_mean",
    "node_discovery": "nodes",
    "nodes": "Nodes",
    "parallel_modes": "ParallelMode",
    "partition_spec": "P",
    "pictures": "draw",
    "plan": "ShardingPlan",
    "plan_models": "init_sharded",
    "programs": "remat shard_map value_and_grad",
    "rank_groups": "RankGroups",
    "registry": "strict",
    "resharding": "reshard",
    "scope": "bind get_parallel_state scope_name use_parallel_state",
    "scoped": "scoped",
    "seeds": "seed_for",
    "session": "Session clear_parallel_state",
    "spec": "TopologySpec View",
    "starting": "init_distributed session",
    "state": "ParallelState",
    "topology": "Topology",
    "transfer_ends": "Fused",
    "transfer_groups": "TransferGroup transfer_group",
    "transfer_linking": "transfer_link",
    "transfer_links": "TransferLink",
    "transfer_plan": "TransferPlan plan_transfer",
    "transfer_store": "TransferStore",
    "transferring": "transfer",
    "usual": "parallel_spec",
}
if not TYPE_CHECKING:
    __getattr__, __dir__ = face(__name__, _MODULES, _HOMES)

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
