"""The mesh of all ranks that also knows the combined axes of its state: VeOmni's `device_mesh["dp_shard_sp"]`.

How meshes are made and cut is in `meshes`. torch has such names only through a private call, whose slices warn.
"""

from typing import TYPE_CHECKING

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from dualmesh_torch.state import TorchState


class NamedMesh(DeviceMesh):
    """A state's mesh whose slices, groups and ranks are asked for by any axis of the state, in any order.

    It equals the state's own mesh, and what is cut from it are the state's sub-meshes: nothing new is made.
    """

    def __init__(self, state: "TorchState", mesh: DeviceMesh) -> None:
        # Not super().__init__: that makes process groups. Everything a DeviceMesh is made of is in its attributes.
        self.__dict__.update(mesh.__dict__)
        self._state = state

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        """Return the state's sub-mesh of some axes. *Local.*"""
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else mesh_dim_names
        return self._state.submesh(*names)

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """Return the state's group of an axis, or of a dim by its number. *Local.*"""
        if isinstance(mesh_dim, str):
            group: ProcessGroup = self._state.group(mesh_dim)
            return group
        return super().get_group(mesh_dim)

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return this rank's index along an axis, or a dim by its number. *Local.*"""
        if isinstance(mesh_dim, str):
            index: int = self._state.index(mesh_dim)
            return index
        return super().get_local_rank(mesh_dim)
