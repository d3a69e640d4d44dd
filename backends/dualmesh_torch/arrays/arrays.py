"""Global arrays as DTensors on the state's array mesh: laid out, read back, built from blocks, laid out anew.

Which mesh and placements a spec means is in `meshes`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement, Replicate

from dualmesh.backend.arrays import Arrays
from dualmesh.backend.host_blocks import HostLeaf
from dualmesh.errors import ArrayTypeError, ShardingError, listed
from dualmesh.sharding.partition_spec import P, global_shape, local_shape, slices_of
from dualmesh.weights.transfer import TransferJob
from dualmesh_torch.arrays import reshard as resharding
from dualmesh_torch.arrays.assembly import assemble
from dualmesh_torch.collectives.dtypes import WIDENED, from_carried, resolve_memory, to_carried
from dualmesh_torch.collectives.exchanges import exchange
from dualmesh_torch.transforms.gradients import refuse_cut
from dualmesh_torch.weights import transfer as transferring

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from dualmesh_torch.state import TorchState

_NUMPY_FLOATS = (torch.float16, torch.float32, torch.float64)

COMPILED = (
    "dm.reshard from state to state asks the ranks of both ends what arrives, which compiled code cannot: it runs "
    "between two compiled pieces. With fullgraph=True, compile what comes before and what comes after."
)


class TorchArrays(Arrays):
    """Global arrays over the ranks of one state.

    numpy has no bfloat16 or float8: `to_numpy` gives their exact values in float32. `distribute` takes the bfloat16
    arrays of ml_dtypes.
    """

    def __init__(self, state: "TorchState") -> None:
        self._state = state

    def distribute(self, array: Any, spec: P) -> DTensor:
        _refuse_partial("distribute", spec)
        state = self._state
        whole = self.checked(array)
        mesh, placements = state.sharding(spec)
        cut = slices_of(state.topology, spec, whole.shape, state.grid_rank(state.own_rank()))
        block = whole[cut].to(state.device_type, copy=True, memory_format=torch.contiguous_format)
        return assemble(block, mesh, placements, whole.shape)

    def grown(self, array: Any, shape: tuple[int, ...]) -> torch.Tensor:
        whole = self.checked(array)
        found = whole.new_zeros(shape)
        found[tuple(slice(size) for size in whole.shape)] = whole
        return found

    def checked(self, array: Any) -> torch.Tensor:
        if isinstance(array, DTensor):
            raise ArrayTypeError(
                f"distribute: found a DTensor of shape {tuple(array.shape)}, which is laid out already. Use "
                f"dm.constrain to lay it out anew.",
                found=type(array),
            )
        refuse_cut("distribute", array)
        return tensor_of("distribute", array).detach()

    def handed_out(self, array: Any, spec: P, src: int) -> DTensor:
        _refuse_partial("distribute", spec)
        state = self._state
        member = state.member("world")
        known = (array.dtype, tuple(array.shape)) if member.index == src else None
        dtype, shape = state.host.broadcast(known, "world", src=src)
        mesh, placements = state.sharding(spec)
        given = _blocks_for(state, array, spec) if member.index == src else None
        own = torch.empty(local_shape(state.topology, spec, shape), dtype=dtype, device=state.device_type)
        moved = to_carried(own.reshape(-1))
        with exchange("distribute", member, src=src):
            dist.scatter(moved, given, group=member.group, group_src=src)
        return assemble(from_carried(moved, dtype).view(own.shape), mesh, placements, shape)

    def to_numpy(self, x: Any) -> Any:
        if isinstance(x, DTensor):
            x = self._gathered("to_numpy", x)
        if isinstance(x, torch.Tensor):
            x = x.detach().cpu().resolve_conj().resolve_neg()
            is_foreign = x.dtype.is_floating_point and x.dtype not in _NUMPY_FLOATS
            return np.array((x.float() if is_foreign else x).numpy())
        if isinstance(x, np.ndarray | np.generic):
            return np.array(x)
        raise ArrayTypeError(f"to_numpy: found a {type(x).__qualname__}. Give a tensor or a DTensor.", found=type(x))

    def shard_local(self, block: Any, spec: P) -> DTensor:
        refuse_cut("shard_local", block)
        state = self._state
        mesh, placements = state.sharding(spec)
        own = tensor_of("shard_local", block).detach()
        own = own.to(state.device_type, copy=True, memory_format=torch.contiguous_format)
        return assemble(own, mesh, placements, global_shape(state.topology, spec, own.shape))

    def constrain(self, x: Any, spec: P) -> DTensor:
        return self.placed("constrain", x, spec)

    @torch.compiler.disable(reason=COMPILED)  # type: ignore[untyped-decorator, no-untyped-call]
    def reshard(self, x: Any, spec: P, source: Any, source_spec: P) -> Any:
        return resharding.reshard(x, source, source_spec, self._state, spec)

    def to_host(self, path: str, x: Any, spec: P) -> HostLeaf:
        if not isinstance(x, torch.Tensor):
            raise ArrayTypeError(f"transfer_link: {path!r} is a {type(x).__qualname__}. Give tensors.", path=path)
        if isinstance(x, DTensor):
            shape, block = tuple(x.shape), resharding.as_said(x, self._state, spec).to_local()
        else:
            shape = global_shape(self._state.topology, spec, x.shape, what=f"transfer_link: block {path!r}")
            block = x
        host = block.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        kept = host.copy().view(f"V{x.dtype.itemsize}").reshape(tuple(block.shape))
        return HostLeaf(shape, x.dtype.itemsize, self.host_dtype(x), {self._state.own_rank(): kept})

    def host_dtype(self, x: Any) -> str:
        return str(x.dtype).removeprefix("torch.")

    def from_host(self, path: str, x: Any, leaf: HostLeaf, spec: P) -> Any:
        block = leaf.blocks[self._state.own_rank()]
        if isinstance(x, DTensor) and (x.device_mesh, tuple(x.placements)) != self._placed_as(spec):
            raise ShardingError(
                f"transfer_link: {path!r} lies as {x.placements} on {x.device_mesh}, but the specs say {spec!r}. Say "
                f"how it lies.",
                path=path,
            )
        held: Any = x.detach()
        room = held.to_local() if isinstance(held, DTensor) else held
        if tuple(room.shape) != block.shape:
            raise ShardingError(
                f"transfer_link: {path!r} has the block shape {tuple(room.shape)} here, and {block.shape} arrived.",
                path=path,
            )
        found = torch.from_numpy(block.reshape(-1).view(np.uint8)).view(x.dtype).view(room.shape)
        room.copy_(found)
        return x

    def _placed_as(self, spec: P) -> tuple[Any, tuple[Placement, ...]]:
        mesh, placements = self._state.sharding(spec)
        return mesh, tuple(placements)

    def transfer(self, tree: Any, job: TransferJob) -> Any:
        return transferring.transfer(tree, job)

    def placed(self, where: str, x: Any, spec: P) -> DTensor:
        """Return `x`, a DTensor or a global array that every rank holds, laid out as `spec` says. *Collective.*"""
        if spec.partial:
            raise ShardingError(
                f"{where}: {spec!r} is partial over {listed(spec.partial)}, but the array is a whole value. Leave "
                f"partial out.",
                spec=spec,
            )
        mesh, placements = self._state.sharding(spec)
        if not isinstance(x, DTensor):
            slices_of(self._state.topology, spec, np.shape(x), self._state.grid_rank(self._state.own_rank()))
            if not (isinstance(x, torch.Tensor) and x.requires_grad):
                return self.distribute(x, spec)
            x = assemble(x, mesh, [Replicate()] * mesh.ndim, x.shape)
        elif x.device_mesh != mesh:
            whole = self._gathered(where, x)
            x = assemble(whole, mesh, [Replicate()] * mesh.ndim, whole.shape)
        slices_of(self._state.topology, spec, x.shape, self._state.grid_rank(self._state.own_rank()))
        return self._laid_out(where, x, mesh, placements)

    def _gathered(self, where: str, x: DTensor) -> torch.Tensor:
        whole: torch.Tensor = self._laid_out(where, x, x.device_mesh, [Replicate()] * x.device_mesh.ndim).to_local()
        return whole

    def _laid_out(self, where: str, x: DTensor, mesh: "DeviceMesh", placements: Sequence[Placement]) -> DTensor:
        """Redistribute, in a dtype that travels. *Collective over the mesh.*"""
        if torch.compiler.is_compiling() or tuple(placements) == x.placements:
            return _redistribute(x, mesh, placements)
        with exchange(where, self._state.mesh_members(mesh), x, placements=tuple(placements)):
            return _redistribute(x, mesh, placements)


def _refuse_partial(where: str, spec: P) -> None:
    if spec.partial:
        raise ShardingError(
            f"{where}: {spec!r} is partial over {listed(spec.partial)}. A value still to be summed comes from "
            f"dm.shard_local or shard_map. Leave partial out.",
            spec=spec,
        )


def _blocks_for(state: "TorchState", whole: torch.Tensor, spec: P) -> list[torch.Tensor]:
    """Return every rank's block as it travels, in the order of the state's ranks; copies of a block are one tensor."""
    kept: dict[Any, torch.Tensor] = {}
    blocks = []
    for rank in state.members:
        cut = slices_of(state.topology, spec, whole.shape, state.grid_rank(rank))
        key = tuple((part.start, part.stop) for part in cut)
        if key not in kept:
            kept[key] = to_carried(resolve_memory(whole[cut].to(state.device_type)).reshape(-1).contiguous())
        blocks.append(kept[key])
    return blocks


def _redistribute(x: DTensor, mesh: "DeviceMesh", placements: Sequence[Placement]) -> DTensor:
    wide = WIDENED.get(x.dtype)
    moved: Any = x if wide is None else x.to(wide)
    found: DTensor = moved.redistribute(mesh, placements)
    return found if wide is None else cast("DTensor", found.to(x.dtype))


def tensor_of(where: str, array: Any) -> torch.Tensor:
    """Return a tensor for a tensor, a numpy array, a number or anything that numpy takes. *Local.*

    Raises:
        ArrayTypeError: Torch has no such dtype.
    """
    if isinstance(array, torch.Tensor):
        return array
    found = np.asarray(array)
    if found.dtype.name == "bfloat16":
        return torch.from_numpy(found.view(np.uint16).copy()).view(torch.bfloat16)
    try:
        return torch.from_numpy(np.array(found, order="C"))
    except TypeError as error:
        raise ArrayTypeError(f"{where}: {error} Convert the array first.", found=found.dtype) from error
