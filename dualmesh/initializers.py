"""Process-group initializers: one class per way of grouping the ranks of a world.

Which ranks are together is in `parallel_modes`. They are thin faces over named states whose axes are rank groups;
trainers that start anew declare a `TopologySpec` and need none of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dualmesh.errors import ArgumentError, RankError, SpecError, did_you_mean, listed
from dualmesh.runtime.init import init_parallel_state
from dualmesh.runtime.registry import registry
from dualmesh.runtime.session import Session, session_for
from dualmesh.topology.group_topology import GroupSpec
from dualmesh.topology.parallel_modes import SIZE_NAMES, ParallelMode, listed_group, mode_groups
from dualmesh.topology.parallel_modes import CommMode as CommMode
from dualmesh.topology.resolve import positive, whole

GroupMaker = Callable[["ModeInitializer", str], Any]
"""Makes the native group of an initializer's rank, given the communication backend. Called on every rank."""

Initialized = tuple[int | None, int | None, Any, list[int] | None, Any]
"""(local_rank, group_world_size, process_group, ranks_in_group, mode); the first four are None for non-members."""

COMMUNICATION = ("nccl", "gloo")


class ProcessGroupInitializer(ABC):
    """Makes a process group for one rank. Abstract: subclasses say which ranks are together and make it.

    Args:
        rank: This rank.
        world_size: Ranks in the world.

    Attributes:
        local_rank: The place of the rank in its group's list; None before `init_dist_group` and for non-members, as
            are the next three.
        group_world_size: The number of ranks in its group.
        process_group: The native group, in which every rank's index is its place in the list.
        ranks_in_group: The ranks of its group, in the given order.
        mode: What the group is for: a `ParallelMode`, which equals its name; None until a subclass says.

    Raises:
        ArgumentError: The world size is no positive integer.
        RankError: The rank is not in the world.
    """

    mode: Any = None

    def __init__(self, rank: int, world_size: int) -> None:
        self.world_size = positive(type(self).__name__, "world_size", world_size)
        self.rank = self._in_world(rank)
        self.local_rank: int | None = None
        self.group_world_size: int | None = None
        self.process_group: Any = None
        self.ranks_in_group: list[int] | None = None

    @abstractmethod
    def init_dist_group(self, backend: str = "nccl", use_cpu: bool = False) -> Initialized:
        """Make the process group. *Collective: call on every rank of the world, in the same order.*

        Args:
            backend: "nccl" or "gloo"; where the world has no GPUs, and in JAX, its own is used.
            use_cpu: Use gloo whatever `backend` says.

        Returns:
            (local_rank, group_world_size, process_group, ranks_in_group, mode), the first four None for non-members.

        Raises:
            ArgumentError: There is no such communication backend.
        """

    def _new_and_update_group_info(self, ranks: Sequence[int], use_cpu: bool = False, backend: str = "nccl") -> None:
        """Make one group and, where this rank is in it, keep its place there. *Collective: call on every rank.*

        What subclasses of one's own call, once per group, in `init_dist_group`. The group is new, in the listed order,
        and the caller's to keep.

        Raises:
            SpecError: The ranks are none, repeated or outside the world.
            ArgumentError: There is no such communication backend.
            RankError: The running world has another size, or this process does not hold the rank.
        """
        where = f"{type(self).__name__}._new_and_update_group_info"
        check_communication(where, backend)
        (group,) = listed_group(where, self.world_size, ranks)
        with session_for(None) as current:
            _check_place(self, current.world_size, current.local_ranks)
            if self.rank not in group:
                return
            made = current.driver.fabric().make_group(group, "gloo" if use_cpu else backend, f"{self.mode or where}")
        self.local_rank, self.group_world_size = group.index(self.rank), len(group)
        self.process_group, self.ranks_in_group = made, list(group)

    def _in_world(self, rank: Any) -> int:
        number = whole(rank)
        if number is not None and 0 <= number < self.world_size:
            return number
        raise RankError(
            f"{type(self).__name__}: rank {rank!r} is not in the world. Ranks: 0..{self.world_size - 1}.",
            rank=rank,
            world_size=self.world_size,
        )


class ModeInitializer(ProcessGroupInitializer):
    """An initializer whose groups follow from its mode and one argument; base of those below.

    Args:
        extent: The size of the groups, or the ranks of the one group, as the mode wants it.
        make_group: What makes the native group; None: a named state (`state_group`).

    Attributes:
        groups: The groups of all ranks.

    Raises:
        SpecError: The size does not divide the world, or the ranks are none, repeated or outside it.
    """

    def __init__(
        self, rank: int, world_size: int, extent: int | Iterable[int], make_group: GroupMaker | None = None
    ) -> None:
        super().__init__(rank, world_size)
        self.groups = mode_groups(self.mode, self.world_size, extent)
        self._make_group = make_group or state_group

    @property
    def state_name(self) -> str:
        """The name under which the groups are registered as a state, with "@cpu" after it where gloo was asked for."""
        first, count = self.groups.groups[0], len(self.groups)
        shown = f"{count}x{len(first)}" if self.mode in SIZE_NAMES else "-".join(map(str, first))
        return f"{self.mode.axis}:{shown}"

    def init_dist_group(self, backend: str = "nccl", use_cpu: bool = False) -> Initialized:
        check_communication(f"{type(self).__name__}.init_dist_group", backend)
        group = self._make_group(self, "gloo" if use_cpu else backend)
        if self.groups.is_member(self.rank):
            self.process_group = group
            self.ranks_in_group = list(self.groups.ranks(self.rank))
            self.local_rank = self.groups.index(self.rank)
            self.group_world_size = len(self.ranks_in_group)
        return self.local_rank, self.group_world_size, self.process_group, self.ranks_in_group, self.mode


def check_communication(where: str, backend: Any) -> None:
    """Refuse what is no communication backend. *Pure.*

    Raises:
        ArgumentError: It is none.
    """
    if backend not in COMMUNICATION:
        raise ArgumentError(
            f"{where}: backend={backend!r}. Allowed: {listed(COMMUNICATION)}.{did_you_mean(backend, COMMUNICATION)}",
            backend=backend,
        )


def state_group(initializer: ModeInitializer, backend: str) -> Any:
    """Register the groups as a state and return the rank's native group. *Collective over the world.*

    Where a state has no native group for lists of ranks (JAX, sim), the backend's fabric makes it: in JAX a mesh of
    one axis, "group". The collectives of the state take the axis name either way.

    Raises:
        RankError: The running world has another size, or this process does not hold the rank.
    """
    with session_for(None) as current:
        _check_place(initializer, current.world_size, current.local_ranks)
        return _group_of(initializer, backend, current)


def _check_place(initializer: ProcessGroupInitializer, world_size: int, local_ranks: Sequence[int]) -> None:
    if world_size != initializer.world_size or initializer.rank not in local_ranks:
        raise RankError(
            f"{type(initializer).__name__}: made for rank {initializer.rank} of {initializer.world_size}, but this "
            f"process holds the ranks {listed(local_ranks)} of a world of {world_size}. Give the running world's "
            f"numbers.",
            rank=initializer.rank,
        )


def _group_of(initializer: ModeInitializer, backend: str, current: Session) -> Any:
    axis, rank = initializer.mode.axis, initializer.rank
    spec, on_cpu = GroupSpec({axis: initializer.groups}), backend == "gloo"
    wanted: object = spec
    name = f"{initializer.state_name}@cpu" if on_cpu else initializer.state_name
    known = registry.get(name) if name in registry.names() else None
    if known is not None and known.is_live and known.topology.spec == wanted:
        state = known
    else:
        state = init_parallel_state(
            name=name, spec=spec, backend=current.backend, device_type="cpu" if on_cpu else None
        )
    if not initializer.groups.is_member(rank):
        return None
    try:
        if len(current.local_ranks) == 1:
            return state.group(axis)
    except (RankError, SpecError):  # JAX, where only grids have a native name
        pass
    return current.driver.fabric().make_group(state.ranks(axis, rank), backend, name)


class TrainDPGroupInitializer(ModeInitializer):
    """One group of the ranks that train together, in the given order."""

    mode: ParallelMode = ParallelMode.TRAIN_DATA_PARALLEL

    def __init__(
        self, rank: int, world_size: int, ranks: Iterable[int], *, make_group: GroupMaker | None = None
    ) -> None:
        super().__init__(rank, world_size, ranks, make_group)
        self.ranks = list(self.groups.groups[0])


class IntraNodeGroupInitializer(ModeInitializer):
    """One group of the ranks of a node, in the given order; every rank of the world makes it for every node."""

    mode: ParallelMode = ParallelMode.INTRA_NODE

    def __init__(
        self, rank: int, world_size: int, ranks: Iterable[int], *, make_group: GroupMaker | None = None
    ) -> None:
        super().__init__(rank, world_size, ranks, make_group)
        self.ranks = list(self.groups.groups[0])


class WeightTransferGroupInitializer(ModeInitializer):
    """One group of a sender and its receivers, in the given order: the first is the source."""

    mode: ParallelMode = ParallelMode.WEIGHT_TRANSFER

    def __init__(
        self, rank: int, world_size: int, ranks: Iterable[int], *, make_group: GroupMaker | None = None
    ) -> None:
        super().__init__(rank, world_size, ranks, make_group)
        self.ranks = list(self.groups.groups[0])


class DPGroupInitializer(ModeInitializer):
    """Groups of `data_parallel_size` ranks, world_size / data_parallel_size apart.

    >>> maker = lambda initializer, backend: backend
    >>> DPGroupInitializer(5, 8, 2, make_group=maker).init_dist_group("gloo")
    (1, 2, 'gloo', [1, 5], <ParallelMode.DATA_PARALLEL: 'DATA_PARALLEL'>)
    """

    mode: ParallelMode = ParallelMode.DATA_PARALLEL

    def __init__(
        self, rank: int, world_size: int, data_parallel_size: int, *, make_group: GroupMaker | None = None
    ) -> None:
        super().__init__(rank, world_size, data_parallel_size, make_group)
        self.data_parallel_size = data_parallel_size
        self.process_num_between_dp_rank = len(self.groups)


class TPGroupInitializer(ModeInitializer):
    """Groups of `tensor_parallel_size` consecutive ranks."""

    mode: ParallelMode = ParallelMode.TENSOR_PARALLEL

    def __init__(
        self, rank: int, world_size: int, tensor_parallel_size: int, *, make_group: GroupMaker | None = None
    ) -> None:
        super().__init__(rank, world_size, tensor_parallel_size, make_group)
        self.tensor_parallel_size = tensor_parallel_size
        self.tensor_parallel_group_num = len(self.groups)


class SPGroupInitializer(ModeInitializer):
    """Groups of `sequence_parallel_size` consecutive ranks."""

    mode: ParallelMode = ParallelMode.SEQUENCE_PARALLEL

    def __init__(
        self, rank: int, world_size: int, sequence_parallel_size: int, *, make_group: GroupMaker | None = None
    ) -> None:
        super().__init__(rank, world_size, sequence_parallel_size, make_group)
        self.sequence_parallel_size = sequence_parallel_size
        self.sequence_parallel_group_num = len(self.groups)


class InterNodeGroupInitializer(ModeInitializer):
    """Groups of the ranks with the same place on every node, on nodes of `local_world_size` consecutive ranks.

    Nodes of other shapes: `Nodes.inter_node`.
    """

    mode: ParallelMode = ParallelMode.INTER_NODE

    def __init__(
        self, rank: int, world_size: int, local_world_size: int, *, make_group: GroupMaker | None = None
    ) -> None:
        super().__init__(rank, world_size, local_world_size, make_group)
        self.local_world_size = local_world_size
        self.node_count = self.groups.size()
