"""`GroupMember`: this rank's place in a process group, remembered by forward for backward.

`MeshMembers` stands for all ranks of a mesh, where torch itself picks the groups.
"""

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dualmesh.topology.topology import Axis

if TYPE_CHECKING:
    from dualmesh_torch.mesh.group_pool import GroupPool
    from dualmesh_torch.state import TorchState


class GroupMember:
    """A group, its name (a constant in compiled graphs), its size, this rank's index in it, and whose it is."""

    __slots__ = ("axis", "group", "index", "is_gloo", "name", "pool", "size", "state")

    def __init__(
        self,
        group: dist.ProcessGroup,
        size: int,
        index: int,
        pool: "GroupPool",
        state: "TorchState | None" = None,
        axis: Axis | None = None,
    ) -> None:
        self.group = group
        self.name: str = group.group_name
        self.is_gloo: bool = dist.get_backend(group) == "gloo"
        self.size = size
        self.index = index
        self.pool = pool
        self.state = state
        self.axis = axis

    def at(self, index: int, wrap: bool) -> int | None:
        """Return an index counted around the end, or None where there is none."""
        if wrap:
            return index % self.size
        return index if 0 <= index < self.size else None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the world in the group, in index order."""
        return tuple(dist.get_process_group_ranks(self.group))

    @property
    def words(self) -> str:
        """How messages call it."""
        label = "DistributedState" if self.state is None else self.state.common_label
        return label if self.axis is None else f"{label}, axis {self.axis!r}"


class MeshMembers:
    """All ranks of a device mesh that a state uses, where torch picks the groups."""

    __slots__ = ("axis", "mesh", "pool", "state")

    def __init__(self, state: "TorchState", pool: "GroupPool", mesh: DeviceMesh) -> None:
        self.state = state
        self.pool = pool
        self.mesh = mesh
        self.axis = "world"

    @property
    def size(self) -> int:
        """How many they are."""
        return self.mesh.size()

    @property
    def name(self) -> str:
        """What tells it apart from groups."""
        return f"everyone on {self.mesh.mesh_dim_names}"

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the world on the mesh, in its order."""
        return tuple(self.mesh.mesh.flatten().tolist())

    @property
    def words(self) -> str:
        """How messages call it."""
        return self.state.common_label
