"""Whether arrays really lie where a plan says: right values with lost shards are a failure.

What a plan says is in `dualmesh.arrays.plan`; how a backend shows its shards, in `instruments`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dualmesh._support.optional_imports import np
from dualmesh.arrays.plan import ShardingPlan
from dualmesh.backend.state import ParallelState
from dualmesh.errors import ArgumentError, ShardingError
from dualmesh.runtime.scope import get_parallel_state
from dualmesh.sharding.param_paths import leaves_by_path, with_paths
from dualmesh.sharding.partition_spec import P, is_spec, slices_of
from dualmesh.sharding.tree import leaves, spec_tree
from dualmesh.testing.differences import Difference, Ranks, difference, largest, refuse_differences
from dualmesh.testing.instruments import Held, instruments_of
from dualmesh.topology.topology import Topology

if TYPE_CHECKING:
    from numpy.typing import NDArray


def assert_sharded_as(
    tree: Any,
    plan: Any,
    topology: Topology | None = None,
    *,
    values: Any = None,
    state: ParallelState | None = None,
    rtol: float | None = None,
) -> None:
    """Fail where a rank of this process holds other elements than a plan says. *Collective over the state.*

    What is compared is what lies in each rank's memory (the DTensor's local part, the device's buffer), not what the
    array claims. Each process checks its own ranks; one outside of the state has nothing to check.

    Args:
        tree: Global arrays in nested dicts, lists, tuples.
        plan: A `dm.ShardingPlan`, or a spec, or nested containers of specs (a prefix of the tree).
        topology: The topology that the state must have; None: whichever it has.
        values: The global arrays as numpy has them, in the containers of the tree: every rank's block is held to its
            part of them. None: only where the elements lie is compared.
        state: The state that the arrays are over; None: the ambient one.
        rtol: How far apart values may be; see `difference`.

    Raises:
        DifferenceError: It names array, rank, dim, and the positions that were wanted and found; or element and values.
        ArgumentError: The tree holds no array, so that nothing would be compared.
    """
    owner = get_parallel_state() if state is None else state
    if topology is not None and owner.topology != topology:
        raise ArgumentError(
            f"assert_sharded_as: {owner.label} is {owner.topology!r}, asked for {topology!r}. Give its own topology, "
            f"or the state that has the other one (state=...).",
            found=owner.topology,
            asked=topology,
        )
    if not owner.is_member:
        return
    if not list(leaves(tree)):
        raise ArgumentError(f"assert_sharded_as: {tree!r} holds no array. Give what should be compared.", found=tree)
    refuse_differences(f"assert_sharded_as on {owner.backend}", misplaced(tree, plan, owner, values, rtol))


def misplaced(
    tree: Any, plan: Any, state: ParallelState, values: Any = None, rtol: float | None = None
) -> list[Difference]:
    """Return what lies elsewhere than a plan says, or is not part of `values`, in the order of the tree.

    *Collective over the state.*
    """
    arrays, wholes = (leaves_by_path("assert_sharded_as", one) for one in (tree, values))
    if values is not None and arrays.keys() != wholes.keys():
        said = f"{sorted(wholes)} (expected) and {sorted(arrays)} ({state.backend}) are not the same arrays"
        return [Difference("values", ("expected", state.backend), said=said)]
    specs = plan.specs(tree, state.topology) if isinstance(plan, ShardingPlan) else _specs(plan, tree)
    pairs = zip(arrays.items(), leaves(specs), strict=True)
    return [one for (path, x), spec in pairs for one in _misplaced(path, x, spec, state, wholes.get(path), rtol)]


def diverged(tree: Any, state: ParallelState, rtol: float | None = None) -> list[Difference]:
    """Return where ranks of this process hold other values for the same elements. *Collective over the state.*"""
    if len(state.local_ranks) < 2:
        return []
    instruments = instruments_of(state.backend)
    return [one for path, x in with_paths(tree) for one in _diverged(path, instruments.held(state, x), rtol)]


def _diverged(path: str, held: list[Held], rtol: float | None) -> Iterator[Difference]:
    first: dict[tuple[tuple[int, ...], ...], Held] = {}
    for one in sorted(held, key=lambda one: one.rank):
        other = first.setdefault(one.positions, one)
        if one is other or one.block is None:
            continue
        found = difference(
            path or "the result",
            other.block,
            one.block,
            places=(f"rank {other.rank}", f"rank {one.rank}"),
            rtol=rtol,
            offset=[positions[0] if positions else 0 for positions in one.positions],
        )
        if found is not None:
            yield replace(found, said="both ranks hold this element")
            return


def _specs(plan: Any, tree: Any) -> Any:
    return spec_tree(plan if not is_spec(plan) else P.of(plan), tree, what="assert_sharded_as plan")


def _misplaced(
    path: str, x: Any, spec: P, state: ParallelState, whole: Any, rtol: float | None
) -> Iterator[Difference]:
    what, places, shape = path or "the array", (repr(spec), state.backend), tuple(getattr(x, "shape", ()))
    if whole is not None and np.shape(whole) != shape:
        said = f"shape {np.shape(whole)} (expected) and {shape} ({state.backend}) differ"
        yield Difference(what, ("expected", state.backend), said=said)
        return
    if 0 in shape:
        return
    try:
        held = {one.rank: one for one in instruments_of(state.backend).held(state, x)}
    except ShardingError as error:
        yield Difference(what, places, said=f"{spec!r} was wanted, {error}")
        return
    for rank in state.local_ranks:
        cuts = slices_of(state.topology, spec, shape, state.grid_rank(rank))
        wanted = tuple(tuple(range(cut.start, cut.stop)) for cut in cuts)
        said = _said(wanted, held.get(rank), shape)
        if said:
            yield Difference(what, places, ranks=(rank,), said=f"{spec!r} puts {said.format(rank=rank)}")
            return
    if whole is not None:
        yield from _unequal(what, np.asarray(whole), held, state.backend, rtol)


def _unequal(
    what: str, whole: "NDArray[Any]", held: Mapping[int, Held], backend: str, rtol: float | None
) -> Iterator[Difference]:
    """Yield the first rank's block that is not its part of a global array."""
    scale = largest(whole)
    for rank, one in sorted(held.items()):
        found = difference(
            *(what, whole[np.ix_(*one.positions)], one.block),
            places=("expected", backend),
            rtol=rtol,
            ranks=_only(rank),
            offset=[positions[0] for positions in one.positions],
            scale=scale,
        )
        if found is not None:
            yield found
            return


def _only(rank: int) -> Ranks:
    return lambda _element: (rank,)


def _said(wanted: tuple[tuple[int, ...], ...], held: Held | None, shape: tuple[int, ...]) -> str:
    if held is None:
        return "a block on rank {rank}, which holds nothing of it"
    for dim, (right, found) in enumerate(zip(wanted, held.positions, strict=True)):
        if right != found:
            return f"{_range(right)} of dim {dim} of shape {shape} on rank {{rank}}, which holds {_range(found)}"
    shape_held = tuple(map(len, held.positions))
    if held.block is not None and tuple(held.block.shape) != shape_held:
        return f"a block of shape {shape_held} on rank {{rank}}, which holds one of shape {tuple(held.block.shape)}"
    return ""


def _range(positions: tuple[int, ...]) -> str:
    if positions and positions == tuple(range(positions[0], positions[-1] + 1)):
        return f"{positions[0]}..{positions[-1]}"
    return str(positions) if positions else "nothing"
