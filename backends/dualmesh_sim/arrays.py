"""`SimArray`: a global array as one numpy block per simulated rank, and how arrays are laid out and read back.

What functions of them do is in `programs`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dualmesh._support.optional_imports import np
from dualmesh.backend.arrays import Arrays
from dualmesh.backend.host_blocks import HostLeaf
from dualmesh.errors import ArgumentError, ArrayTypeError, ShardingError, listed
from dualmesh.sharding.partition_spec import P, global_shape, local_shape, slices_of
from dualmesh.sharding.redistribution import Reshard
from dualmesh_sim.collectives import kind_of
from dualmesh_sim.rendezvous import place

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dualmesh_sim.state import SimState

INSIDE = (
    "reshard: called inside shard_map, where arrays are this rank's blocks. Call it on simulated arrays, outside the "
    "function given to shard_map."
)


class SimArray:
    """A global array laid over the ranks of a state. Blocks are read-only.

    Attributes:
        shape: The global shape.
        dtype: The numpy dtype.
        spec: How it is split.
        state: The state whose ranks hold it.
    """

    __slots__ = ("_blocks", "dtype", "shape", "spec", "state")

    def __init__(self, state: "SimState", spec: P, blocks: "Mapping[int, NDArray[Any]]") -> None:
        first = blocks[state.members[0]]
        self.state = state
        self.spec = spec
        self.dtype = first.dtype
        self.shape = global_shape(state.topology, spec, first.shape)
        self._blocks = dict(blocks)

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    def block(self, rank: int) -> "NDArray[Any]":
        """Return what a session rank holds. *Local.*"""
        return self._blocks[rank]

    def value(self) -> "NDArray[Any]":
        """Return the global array, a copy; of ranks that hold the same slice, the first one's block counts. *Local.*"""
        whole = np.empty(self.shape, self.dtype)
        state = self.state
        for rank in reversed(state.members):
            cut = slices_of(state.topology, self.spec, self.shape, state.grid_rank(rank))
            whole[cut] = self._blocks[rank]
        return whole

    def __repr__(self) -> str:
        return f"SimArray({self.dtype}{list(self.shape)}, {self.spec!r}, {self.state.label})"


class SimArrays(Arrays):
    """Global arrays over the ranks of one state."""

    def __init__(self, state: "SimState") -> None:
        self._state = state

    def distribute(self, array: Any, spec: P) -> SimArray:
        return self._laid_out("distribute", np.array(array, order="C"), spec)

    def to_numpy(self, x: Any) -> Any:
        if isinstance(x, SimArray):
            return x.value()
        if isinstance(x, np.ndarray | np.generic):
            return np.array(x)
        raise ArrayTypeError(f"to_numpy: found a {type(x).__qualname__}. Give what dm.distribute or shard_map return.")

    def shard_local(self, block: Any, spec: P) -> SimArray:
        return self._laid_out("shard_local", np.array(block, order="C"), spec)

    def constrain(self, x: Any, spec: P) -> SimArray:
        return self.placed("constrain", x, spec)

    def reshard(self, x: Any, spec: P, source: Any, source_spec: P) -> SimArray:
        if place() is not None:
            raise ArgumentError(INSIDE)
        lies = source.arrays.placed("reshard", x, source_spec)
        plan = Reshard(lies.shape, source.placed(source_spec), self._state.placed(spec))
        blocks = {}
        for rank in self._state.members:
            block = np.empty(local_shape(self._state.topology, spec, lies.shape), lies.dtype)
            for part in plan.receives(rank):
                block[part.target_slices] = lies.block(part.sources[0])[part.source_slices]
            block.flags.writeable = False
            blocks[rank] = block
        return SimArray(self._state, spec, blocks)

    def to_host(self, path: str, x: Any, spec: P) -> HostLeaf:
        lies = self.placed(f"transfer_link, {path!r}", x, spec)
        blocks = {rank: HostLeaf.void(lies.block(rank)) for rank in self._state.members}
        return HostLeaf(lies.shape, lies.dtype.itemsize, str(lies.dtype), blocks)

    def from_host(self, path: str, x: Any, leaf: HostLeaf, spec: P) -> SimArray:
        blocks = {rank: HostLeaf.read(one, x.dtype) for rank, one in leaf.blocks.items()}
        for block in blocks.values():
            block.flags.writeable = False
        return SimArray(self._state, spec, blocks)

    def placed(self, where: str, x: Any, spec: P) -> SimArray:
        """Return `x`, a simulated array or a host array or number, laid out as `spec` says. *Local.*

        Raises:
            ShardingError: It lies on other ranks.
        """
        if not isinstance(x, SimArray):
            return self._laid_out(where, np.array(x, order="C"), spec)
        if x.state is self._state and x.spec == spec:
            return x
        if set(x.state.members) != set(self._state.members):
            raise ShardingError(
                f"{where}: the array lies on the ranks {listed(x.state.members)} of {x.state.label}, asked for "
                f"{listed(self._state.members)} of {self._state.label}. Read it with dm.to_numpy first.",
                found=x.state,
                asked=self._state,
            )
        return self._laid_out(where, x.value(), spec)

    def _laid_out(self, where: str, whole: "NDArray[Any]", spec: P) -> SimArray:
        """Cut a fresh global array into blocks."""
        kind_of(where, whole.dtype)
        if spec.partial:
            raise ShardingError(
                f"{where}: {spec!r} is partial over {listed(spec.partial)}. A value still to be summed comes only out "
                f"of shard_map (out_specs). Leave partial out.",
                spec=spec,
            )
        state = self._state
        whole.flags.writeable = False
        cuts = {rank: slices_of(state.topology, spec, whole.shape, state.grid_rank(rank)) for rank in state.members}
        return SimArray(state, spec, {rank: np.asarray(whole[cut]) for rank, cut in cuts.items()})
