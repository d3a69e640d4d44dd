"""Which communicators a rank needs: lists of ranks, each in the lane of the work that uses it.

Making them is in the backends; which ranks an axis joins is in `topology`. Collectives that wrappers issue from hooks
(lane "param") and those that code issues in program order (lane "data") never share a communicator: on one, hooks
that fire at other places on other ranks would meet the wrong partner and hang.
"""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from dualmesh.topology.layout import Layout
from dualmesh.topology.roles import expand_axes, view_param_axes
from dualmesh.topology.topology import Axis, Topology

Lane = Literal["data", "param"]

_WHOLE_ROLES = ("data", "params", "replicate", "loss")
_MEMBER_ROLES = ("data", "replicate")


class RankList(tuple[int, ...]):
    """Ranks in index order, hashed and named once: a list may be as long as the world, and groups are found by it."""

    _hash: int | None = None

    @cached_property
    def digest(self) -> str:
        """A short name, equal in all processes."""
        # As a plain tuple: an array is filled six times slower from a subclass.
        return hashlib.sha256(array("q", tuple(self))).hexdigest()[:16]

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash


class Membership(NamedTuple):
    """A list of session ranks in index order, and the lane that it works in."""

    ranks: RankList
    lane: Lane


def lane_of(topology: Topology, axis: Axis) -> Lane:
    """Return the lane of the group that stands for an axis (`state.group`). *Pure.*

    >>> import dualmesh as dm
    >>> topology = dm.parallel_spec(dp_shard_size=2, ulysses_size=2, ep_size=2).resolve(4)
    >>> [lane_of(topology, axis) for axis in ("dp_shard_sp", "ep_fsdp", "sp", "ep")]
    ['param', 'param', 'data', 'data']
    """
    names = (axis,) if isinstance(axis, str) else axis
    if len(names) == 1 and names[0] in view_param_axes(topology):
        return "param"
    return "param" if expand_axes(topology, names) in _reduced(topology) else "data"


def membership(
    topology: Topology, axis: Axis, lane: Lane, grid_rank: int, places: Sequence[int] | None = None
) -> Membership:
    """Return the ranks of a rank's group along an axis, with its lane; a group of one has lane "data". *Pure.*

    Args:
        axis: A name or a tuple of names.
        lane: The lane asked for.
        grid_rank: A rank of the topology.
        places: Session ranks in grid order; None: the topology's own ranks.
    """
    ranks = _session_ranks(topology, axis, grid_rank, places)
    return Membership(ranks, lane if len(ranks) > 1 else "data")


def _session_ranks(topology: Topology, axis: Axis, grid_rank: int, places: Sequence[int] | None) -> RankList:
    ranks = topology.ranks(axis, grid_rank)
    return RankList(ranks if places is None else [places[rank - topology.rank_offset] for rank in ranks])


def memberships(
    topology: Topology,
    grid_rank: int,
    places: Sequence[int] | None = None,
    known: dict[Layout, RankList] | None = None,
) -> dict[Axis, Membership]:
    """Return what a rank needs from the start: each axis in its lane. *Pure*, O(answer).

    Args:
        topology: Whose axes are meant.
        grid_rank: A rank of the topology.
        places: Session ranks in grid order; None: the topology's own ranks.
        known: Lists that were written before, of this rank and these members, by layout; takes those written now.

    >>> import dualmesh as dm
    >>> topology = dm.parallel_spec(dp_shard_size=2, ulysses_size=2).resolve(4)
    >>> memberships(topology, 0)["dp_shard_sp"]
    Membership(ranks=(0, 1, 2, 3), lane='param')
    """
    found: dict[Axis, Membership] = {}
    known = {} if known is None else known
    for axis in topology.axis_names:
        if topology.is_member(axis, grid_rank):
            layout = topology.layouts.get(axis)
            ranks = known.get(layout) if layout is not None else None
            if ranks is None:
                ranks = _session_ranks(topology, axis, grid_rank, places)
            if layout is not None:
                known[layout] = ranks  # many axes are one list: dp, dp_shard and world, where nothing else splits
            found[axis] = Membership(ranks, lane_of(topology, axis) if len(ranks) > 1 else "data")
    return found


def loss_membership(
    topology: Topology,
    grid_rank: int,
    places: Sequence[int] | None = None,
    known: Mapping[Axis, Membership] | None = None,
) -> Membership | None:
    """Return the group over which `token_mean` reduces, in lane "data", or None where nothing is. *Pure.*"""
    if "loss" not in topology.spec.roles or not topology.is_member(topology.role("loss"), grid_rank):
        return None
    axes = topology.role("loss")
    twin = _equal(topology, axes, known or {})
    return membership(topology, axes, "data", grid_rank, places) if twin is None else twin._replace(lane="data")


def _equal(topology: Topology, axes: tuple[str, ...], known: Mapping[Axis, Membership]) -> Membership | None:
    """Return what is known of the same ranks under another name, so that a long list is written once."""
    if len(axes) == 1:
        return known.get(axes[0])
    layout = topology.layout(axes)
    return next((known[name] for name, one in topology.layouts.items() if one == layout and name in known), None)


def distinct(
    topology: Topology,
    grid_rank: int,
    places: Sequence[int] | None = None,
    known: Mapping[Axis, Membership] | None = None,
) -> tuple[Membership, ...]:
    """Return the distinct groups that a rank needs from the start, in the order in which all ranks make them. *Pure.*

    Every rank makes its groups in one common order, so no two wait for each other.

    Args:
        topology: Whose axes are meant.
        grid_rank: A rank of the topology.
        places: Session ranks in grid order; None: the topology's own ranks.
        known: What `memberships` says, where it was asked before.

    >>> import dualmesh as dm
    >>> topology = dm.TopologySpec({"dp": 2, "tp": 2}, roles={"data": "dp", "loss": "dp"}).resolve(4)
    >>> [tuple(group) for group in distinct(topology, 1)]
    [((0, 1), 'data'), ((0, 1, 2, 3), 'data'), ((1, 3), 'data'), ((1, 3), 'param')]
    """
    known = memberships(topology, grid_rank, places) if known is None else known
    loss = loss_membership(topology, grid_rank, places, known)
    return tuple(sorted({*known.values(), *([loss] if loss else [])}))


def memberships_of_all(topology: Topology, places: Sequence[int] | None = None) -> tuple[Membership, ...]:
    """Return the distinct groups of all ranks together, in one order. *Pure*, O(world): for a fallback only."""
    wanted: dict[Axis, set[Lane]] = {axis: {lane_of(topology, axis)} for axis in topology.axis_names}
    if "loss" in topology.spec.roles:
        wanted.setdefault(topology.role("loss"), set()).add("data")
    firsts = {axis: [int(row[0]) for row in topology.partition(axis)] for axis in wanted}
    return tuple(
        sorted(
            {
                membership(topology, axis, lane, first, places)
                for axis, lanes in wanted.items()
                for lane in lanes
                for first in firsts[axis]
            }
        )
    )


@lru_cache(maxsize=128)
def _reduced(topology: Topology) -> frozenset[tuple[str, ...]]:
    """The expanded axes over which wrappers reduce gradients or gather parameters."""
    roles = topology.spec.roles
    found = {expand_axes(topology, roles[part]) for part in _WHOLE_ROLES if part in roles}
    for part in _MEMBER_ROLES:
        found |= {(name,) for name in expand_axes(topology, roles.get(part, ()))}
    ordered = expand_axes(topology, roles.get("sequence", ()))
    return frozenset(found - {(), ordered, *((name,) for name in ordered)})
