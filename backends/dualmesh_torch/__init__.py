"""The torch backend: process groups, device meshes and DTensors behind dualmesh's states."""

from dualmesh_torch import supported as supported  # first: it refuses a torch that is too old
from dualmesh_torch.backend import TorchBackend
from dualmesh_torch.scope import checkpoint_context_fn
from dualmesh_torch.state import TorchState

__all__ = ["TorchBackend", "TorchState", "checkpoint_context_fn"]
