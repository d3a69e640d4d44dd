"""`ParallelMode` and the rank groups of each mode, in integers.

Making process groups from them is in `initializers`; axes of one grid are better declared as a `TopologySpec`.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from dualmesh.errors import ArgumentError, SpecError, counted, listed
from dualmesh.topology.layout import divisors
from dualmesh.topology.rank_groups import RankGroups
from dualmesh.topology.resolve import positive, whole


class ParallelMode(StrEnum):
    """What the ranks of a group do together: strings, so that a mode equals its name.

    >>> ParallelMode.DATA_PARALLEL == "DATA_PARALLEL", ParallelMode.DATA_PARALLEL.axis
    (True, 'data_parallel')
    """

    GLOBAL = "GLOBAL"
    INTRA_NODE = "INTRA_NODE"
    INTER_NODE = "INTER_NODE"
    TRAIN_DATA_PARALLEL = "TRAIN_DATA_PARALLEL"
    DATA_PARALLEL = "DATA_PARALLEL"
    TENSOR_PARALLEL = "TENSOR_PARALLEL"
    SEQUENCE_PARALLEL = "SEQUENCE_PARALLEL"
    WEIGHT_TRANSFER = "WEIGHT_TRANSFER"

    @property
    def axis(self) -> str:
        """The name of its axis in a named state."""
        return self.value.lower()


class CommMode:
    """The modes that say how far a group reaches, apart from what it does."""

    GLOBAL = ParallelMode.GLOBAL
    INTRA_NODE = ParallelMode.INTRA_NODE
    INTER_NODE = ParallelMode.INTER_NODE


SIZE_NAMES: Mapping[ParallelMode, str] = {
    ParallelMode.DATA_PARALLEL: "data_parallel_size",
    ParallelMode.TENSOR_PARALLEL: "tensor_parallel_size",
    ParallelMode.SEQUENCE_PARALLEL: "sequence_parallel_size",
    ParallelMode.INTER_NODE: "local_world_size",
}
"""Modes that cut the world by a size, and what it is called. The other modes list their ranks, but for GLOBAL."""


def mode_groups(mode: ParallelMode, world_size: int, extent: int | Iterable[int] | None = None) -> RankGroups:
    """Return the groups of a mode. *Pure*, O(world).

    With W = world size, n = the size:

    - DATA_PARALLEL: group j = {j + i * (W / n) for i < n}, the outermost axis of (n, W / n);
    - TENSOR_PARALLEL, SEQUENCE_PARALLEL: group j = {j * n + i for i < n}, the innermost axis of (W / n, n);
    - INTER_NODE: group i = {i + j * n for j < W / n}, the outermost axis of (W / n, n), n ranks on each node;
    - INTRA_NODE, TRAIN_DATA_PARALLEL, WEIGHT_TRANSFER: one group, the ranks listed, in that order;
    - GLOBAL: one group, all ranks.

    Args:
        extent: The size, or the ranks; None for GLOBAL.

    Raises:
        ArgumentError: The world size is no positive integer, or GLOBAL is given an extent.
        SpecError: The size does not divide the world, or the ranks are none, repeated or outside it.

    >>> mode_groups(ParallelMode.DATA_PARALLEL, 8, 2).groups
    ((0, 4), (1, 5), (2, 6), (3, 7))
    >>> mode_groups(ParallelMode.TENSOR_PARALLEL, 8, 4).groups
    ((0, 1, 2, 3), (4, 5, 6, 7))
    """
    world_size = positive("mode_groups", "world_size", world_size)
    if mode in SIZE_NAMES:
        size = _dividing(mode, world_size, extent)
        if mode is ParallelMode.DATA_PARALLEL:
            return _strided_groups(world_size, world_size // size)
        if mode is ParallelMode.INTER_NODE:
            return _strided_groups(world_size, size)
        return RankGroups(range(first, first + size) for first in range(0, world_size, size))
    if mode is not ParallelMode.GLOBAL:
        return listed_group(f"ParallelMode.{mode.name}", world_size, extent)
    if extent is not None:
        raise ArgumentError(f"ParallelMode.GLOBAL: {extent!r} was given, but the group is all ranks. Leave it out.")
    return RankGroups([range(world_size)])


def _strided_groups(world_size: int, stride: int) -> RankGroups:
    return RankGroups(range(first, world_size, stride) for first in range(stride))


def _dividing(mode: ParallelMode, world_size: int, size: Any) -> int:
    number = whole(size)
    if number is None or number < 1 or world_size % number:
        name = SIZE_NAMES[mode]
        raise SpecError(
            f"ParallelMode.{mode.name}: {name}={size!r} does not divide the world of {counted(world_size, 'rank')}, so "
            f"some ranks would be in no group. What would fit: {listed(divisors(world_size))}.",
            world_size=world_size,
            **{name: size},
        )
    return number


def listed_group(where: str, world_size: int, ranks: Any) -> RankGroups:
    """Return one group of ranks of a world, in the listed order. *Pure.*

    Raises:
        SpecError: The ranks are none, repeated or outside the world.
    """
    if not isinstance(ranks, Iterable) or isinstance(ranks, str):
        raise SpecError(f"{where}: ranks is {ranks!r}. Give a list of ranks.", ranks=ranks)
    groups = RankGroups([ranks])
    beyond = [rank for rank in groups.members if rank >= world_size]
    if beyond:
        raise SpecError(
            f"{where}: ranks {listed(groups.groups[0])} has {listed(beyond)}, outside the world of "
            f"{counted(world_size, 'rank')}. Ranks: 0..{world_size - 1}.",
            ranks=groups.groups[0],
            world_size=world_size,
        )
    return groups
