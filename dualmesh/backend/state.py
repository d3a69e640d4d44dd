"""`ParallelState`: a topology bound to a backend under a session, and what every backend answers alike.

How states are registered is in `registry` and `init`, how one becomes ambient in `scope`. Longer than other
modules, since it is the whole contract that every backend's state fills; VeOmni's attributes are in
`veomni_attributes`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from typing import Any, ClassVar, Self

from dualmesh._support.provided import provided
from dualmesh._support.waits import check_timeout
from dualmesh.backend import pickling
from dualmesh.backend.arrays import Arrays
from dualmesh.backend.collectives import Collectives
from dualmesh.backend.host import HostObjects
from dualmesh.backend.models import Models
from dualmesh.backend.state_plan import StatePlan, World
from dualmesh.backend.transforms import Programs
from dualmesh.backend.veomni_attributes import VeOmniAttributes
from dualmesh.errors import (
    ArgumentError,
    MembershipError,
    RankError,
    StaleStateError,
    UnknownAxisError,
    did_you_mean,
    listed,
)
from dualmesh.sharding.partition_spec import P
from dualmesh.sharding.redistribution import Placed
from dualmesh.topology.resolve import whole
from dualmesh.topology.spec import TopologySpec
from dualmesh.topology.topology import Axis, Topology


class AxisTable(dict[Axis, Any]):
    """What a state holds per axis, made at first use; emptied when the state is released."""

    def __init__(self, make: Callable[[Axis], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, axis: Axis) -> Any:
        value = self[axis] = self._make(axis)
        return value


class ParallelState(VeOmniAttributes, ABC):
    """A named topology in use: sizes, ranks, groups, meshes and shardings.

    Ranks are session ranks. `rank=None` means this process' rank. Sizes and ranks are answered without
    communication and for ever; groups, meshes and collectives only while the session lives.

    Attributes:
        group: `group(axis)` returns the native group of an axis for this rank, never None. Local.
        names: The names under which the state is registered, first one first.
        regular_sizes: {name: size} of the named axes whose groups are all of one size. Tuples of names are not in it.
    """

    backend: ClassVar[str]
    collectives: Collectives
    arrays: Arrays
    programs: Programs
    models: Models
    host: HostObjects
    group: Callable[[Axis], Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse `ParallelState(...)`: only backends make states, when one is registered."""
        if cls is ParallelState:
            raise ArgumentError(
                "ParallelState(...): a state is made where it is registered. Call init_parallel_state(...) with its "
                "sizes and a name, and ask for it by get_parallel_state() or get_parallel_state_by_name(name)."
            )
        return super().__new__(cls)

    def __init__(self, plan: StatePlan, world: World) -> None:
        self.plan = plan
        self.world = world
        self.topology: Topology = plan.topology
        self.world_size: int = plan.topology.size("world")
        self.axis_names: tuple[str, ...] = plan.topology.axis_names
        self.regular_sizes = {name: layout.size for name, layout in plan.topology.layouts.items()}
        self.names: list[str] = []
        self._positions = None if plan.ranks is None else {rank: place for place, rank in enumerate(plan.ranks)}
        self._groups = AxisTable(self._group_for)
        self.group = self._groups.__getitem__
        self._released = False
        self._pickling_number = pickling.number_state(self)

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def meaning(self) -> Hashable:
        """What code that was compiled for the state depends on: states that mean the same may take each other's."""
        return self.plan

    @property
    def spec(self) -> TopologySpec:
        """The resolved spec."""
        return self.topology.spec

    @property
    def device_type(self) -> str:
        """The kind of device, for example "cpu" or "cuda"."""
        return self.plan.device_type

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The session ranks of this state that this process holds."""
        return tuple(rank for rank in self.held_ranks if self.has_rank(rank))

    @property
    def held_ranks(self) -> tuple[int, ...]:
        """The session ranks that this code speaks for, members or not: the process'."""
        return self.world.local_ranks

    @property
    def is_member(self) -> bool:
        """Whether this process holds a rank of the state."""
        return bool(self.local_ranks)

    def has_rank(self, rank: int) -> bool:
        """Tell whether a session rank is in the state. *Pure.*"""
        if self._positions is None:
            return self.topology.has_rank(rank)
        place = self._positions.get(rank)
        return place is not None and self.topology.has_rank(place + self.topology.rank_offset)

    @property
    def members(self) -> tuple[int, ...]:
        """The session ranks of the state, in grid order. *Pure*, O(world)."""
        return tuple(map(self.session_rank, self.topology.members))

    def placed(self, spec: P) -> Placed:
        """Return a spec over the ranks of the state, for plans of what moves. *Pure.*"""
        ranks = self.plan.ranks
        if self.topology.size("world") != self.topology.world_size:  # rank groups that leave ranks out
            ranks = self.members
        return Placed(self.topology, spec, ranks)

    def on(self, backend: str) -> "ParallelState":
        """Return the same topology in another framework's world. *Collective at first use, over the state's ranks.*

        It answers to the same names and lives until either world ends; `dm.init_distributed(backend=("torch", "jax"))`
        starts both.

        Raises:
            SessionError: The other framework has no world here, or its ranks lie in other processes.
        """
        found: ParallelState = provided("counterpart").counterpart_of(self, backend)
        return found

    # -- sizes and ranks -------------------------------------------------------------------------------------------

    def size(self, axis: Axis, rank: int | None = None) -> int:
        """Return the number of positions along an axis: of a rank's group, where rank groups differ in size. *Pure.*

        Raises:
            RankError: Groups differ in size and `rank` is left out where this process holds several.
        """
        sizes = self.group_sizes(axis)
        if rank is not None:
            return self.topology.size(axis, self.grid_rank(rank))
        return sizes[0] if len(sizes) == 1 else self._own_size(axis)

    def group_sizes(self, axis: Axis) -> tuple[int, ...]:
        """Return the different sizes that groups of an axis have, rising: one, unless they are rank groups. *Pure.*"""
        try:
            return self.topology.group_sizes(axis)
        except UnknownAxisError:
            raise self.unknown_axis(axis) from None

    def sizes_here(self, axis: Axis) -> tuple[int, ...]:
        """Return the different sizes of the groups of the ranks that this code runs as, rising. *Pure.*

        Raises:
            MembershipError: One of them is in no group of the axis.
        """
        return self.topology.group_sizes(axis, map(self.grid_rank, self.local_ranks))

    def enabled(self, axis: Axis) -> bool:
        """Tell whether an axis has more than one position. *Pure.*"""
        return self.size(axis) > 1

    def index(self, axis: Axis, rank: int | None = None) -> Any:
        """Return the position of a rank along an axis; traced inside a JAX `shard_map`. *Pure.*

        Raises:
            RankError: `rank` is left out where this process holds several with different indices, or is no rank of
                the state.
        """
        self.group_sizes(axis)
        if rank is None:
            return self._own_index(axis)
        return self.topology.index(axis, self.grid_rank(rank))

    def ranks(self, axis: Axis, rank: int | None = None) -> tuple[int, ...]:
        """Return the session ranks of a rank's group along an axis, in index order. *Pure.*

        Raises:
            RankError: `rank` is left out where this process holds several ranks in different groups.
        """
        self.group_sizes(axis)
        if rank is None:
            found: tuple[int, ...] = self._own_answer(lambda own: self.ranks(axis, own))
            return found
        grid_ranks = self.topology.ranks(axis, self.grid_rank(rank))
        return tuple(self.session_rank(grid_rank) for grid_rank in grid_ranks)

    def grid_rank(self, rank: int) -> int:
        """Return the topology's rank for a session rank. *Pure.*"""
        if whole(rank) is None or not self.has_rank(rank):
            raise RankError(f"{self.label} has no rank {rank!r}. Its ranks: {self._rank_list}.", rank=rank)
        return rank if self._positions is None else self._positions[rank] + self.topology.rank_offset

    def session_rank(self, grid_rank: int) -> int:
        """Return the session rank for the topology's rank. *Pure.*"""
        ranks = self.plan.ranks
        return grid_rank if ranks is None else ranks[grid_rank - self.topology.rank_offset]

    def own_rank(self) -> int:
        """Return the one session rank that this code runs as. *Local.*

        Raises:
            RankError: This process holds several ranks of the state.
            MembershipError: It holds none.
        """
        mine = self.local_ranks
        if len(mine) == 1:
            return mine[0]
        if not mine:
            raise self._not_member("own_rank")
        raise RankError(
            f"{self.label}: this process holds the ranks {listed(mine)}. Name one (rank=...), or ask inside "
            f"dm.shard_map.",
            ranks=mine,
        )

    def _own_size(self, axis: Axis) -> Any:
        return self._own_answer(lambda own: self.topology.size(axis, self.grid_rank(own)))

    def _own_index(self, axis: Axis) -> Any:
        return self._own_answer(lambda own: self.topology.index(axis, self.grid_rank(own)))

    def _own_answer(self, answer: Callable[[int], Any]) -> Any:
        """Return what all ranks of this process answer alike; where they differ, code must be one of them."""
        mine = self.local_ranks
        found = {answer(rank) for rank in mine} if len(mine) > 1 else set()
        return found.pop() if len(found) == 1 else answer(self.own_rank())

    # -- roles -----------------------------------------------------------------------------------------------------

    @property
    def data_index(self) -> Any:
        """This rank's index over the axes that load different data."""
        return self.index(self.topology.role("data"))

    @property
    def data_size(self) -> int:
        """The number of ranks that load different data."""
        return self.size(self.topology.role("data"))

    def is_writer(self, axes: Axis | None = None) -> Any:
        """Tell whether this rank has index 0 along the axes (default: all ranks of the state). *Pure.*

        A process that holds several ranks writes where one of them does; inside `dm.shard_map` each rank answers.
        """
        axis = "world" if axes is None else axes
        try:
            return self.index(axis) == 0
        except RankError:
            return any(self.index(axis, rank) == 0 for rank in self.local_ranks)

    # -- what the backend holds ------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def mesh(self) -> Any:
        """The native mesh of the state (DeviceMesh, jax Mesh)."""

    @property
    @abstractmethod
    def fsdp_mesh(self) -> Any:
        """The native mesh that shards parameters: 1-D, or 2-D (replicate, shard) where replicas exist."""

    @abstractmethod
    def submesh(self, *axes: str) -> Any:
        """Return the native mesh of some axes, in the order given. Local; cached."""

    @abstractmethod
    def axes(self, axis: Axis) -> tuple[str, ...]:
        """Return the native names of an axis, slowest first; empty for size 1. Local."""

    @abstractmethod
    def pspec(self, *entries: Any, partial: str | Iterable[str] = ()) -> Any:
        """Return the native form of a partition spec (jax PartitionSpec, DTensor placements). Local."""

    @abstractmethod
    def sharding(self, spec: P) -> Any:
        """Return the native sharding of a spec (NamedSharding; (DeviceMesh, placements)). Local."""

    def warm_up(self, *axes: Axis) -> None:
        """Make every communicator of the state work once, before memory is full. *Collective over the state's ranks.*

        Where the framework makes communicators itself (JAX, sim) there is nothing to do.

        Args:
            axes: Axes whose collectives compiled code will use: their groups are made too, which else their first
                collective makes. Names, or tuples of names.
        """
        for axis in axes:
            self.group_sizes(axis)
        self.require_ready("warm_up")

    def set_timeout(self, timeout_s: float) -> None:
        """Set how long collectives on the state's groups wait, from here on. *Collective over the state's ranks.*

        States that share a group share its timeout. Where the framework has no timeouts (JAX, sim) nothing changes.
        """
        check_timeout("set_timeout", timeout_s)
        self.require_ready("set_timeout")

    @abstractmethod
    def _group_for(self, axis: Axis) -> Any:
        """Make or find the native group of an axis; called once per axis."""

    # -- life ------------------------------------------------------------------------------------------------------

    @property
    def is_live(self) -> bool:
        """Whether the state's session still runs and the state is still registered."""
        return not self._released and self.world.is_live()

    def require_live(self, where: str) -> None:
        """Refuse use after the session ended. *Local.*

        Raises:
            StaleStateError: The state was cleared, or its world destroyed.
        """
        if self.is_live:
            return
        what = "was cleared" if self._released else self._ending
        raise StaleStateError(
            f"{where}: {self.label} {what}. Initialize the state again and ask for it by name.",
            state=self,
        )

    def require_ready(self, where: str) -> None:
        """Refuse communication that cannot be right: stale state, or not a member. *Local.*"""
        self.require_live(where)
        if not self.is_member:
            raise self._not_member(where)

    @property
    def _ending(self) -> str:
        return f"lost its world: the {self.backend} session it was built in ended"

    def release(self) -> None:
        """Let go of groups and meshes; from here on the state only answers sizes and ranks. *Local.*"""
        self._released = True
        self._groups.clear()

    def _not_member(self, where: str) -> MembershipError:
        mine = listed(self.held_ranks)
        return MembershipError(
            f"{where}: this process (rank {mine}) is no member of {self.label}. Its ranks: "
            f"{self._rank_list}. "
            f"Ask state.is_member first.",
            state=self,
            ranks=self.held_ranks,
        )

    @property
    def _rank_list(self) -> str:
        ranks = self.topology.members if self.plan.ranks is None else self.members
        return f"{ranks[0]}..{ranks[-1]}" if isinstance(ranks, range) else listed(ranks)

    # -- words -----------------------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """How messages call the state: its first name, or its topology."""
        return f"State {self.names[0]!r}" if self.names else f"State {self.topology!r}"

    @property
    def common_label(self) -> str:
        """`label` with the name that comes first among its names, whatever the order in which they were given."""
        return f"State {min(self.names)!r}" if self.names else f"State {self.topology!r}"

    def unknown_axis(self, axis: object) -> UnknownAxisError:
        """Return the error for an axis that the state does not have."""
        names = self.axis_names
        return UnknownAxisError(
            f"{self.label} has no axis {axis!r}. Axes: {listed(names)}.{did_you_mean(axis, names)}",
            axis=axis,
            axes=names,
            state=self,
        )

    def __repr__(self) -> str:
        name = f"{self.names[0]!r}, " if self.names else ""
        return f"<{type(self).__name__} {name}{self.topology!r}>"

    def _repr_html_(self) -> str:
        html: str = provided("notebooks").state_html(self)
        return html

    @property
    def session_label(self) -> str:
        """How messages call the session, wherever the state is pickled to."""
        ranks = listed(self.world.local_ranks, limit=4)
        return f"{self.backend}, {self.world.size} ranks, this process rank {ranks}"

    def __reduce__(self) -> tuple[Any, ...]:
        return pickling.pack_state(self, self._pickling_number)

    def __copy__(self) -> "ParallelState":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "ParallelState":
        return self
