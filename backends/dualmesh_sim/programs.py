"""Functions of global arrays, run once per simulated rank.

How the ranks' threads meet is in `rendezvous`; a simulated array's blocks are in `arrays`.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dualmesh._support.optional_imports import np
from dualmesh.backend.transforms import Programs
from dualmesh.errors import ArgumentError, ArrayTypeError, NotDifferentiableError, ShapeError, ShardingError, listed
from dualmesh.sharding.partition_spec import P, check_axes, dim_layouts, global_shape, slices_of
from dualmesh.sharding.tree import leaves, mapped, spec_tree
from dualmesh.topology.averaging import AveragingPlan
from dualmesh.topology.topology import Axis
from dualmesh_sim.arrays import SimArray, SimArrays
from dualmesh_sim.collectives import kind_of, reduce_blocks
from dualmesh_sim.federated import average
from dualmesh_sim.rendezvous import Run, place

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dualmesh_sim.state import SimState

NO_AUTODIFF = (
    "value_and_grad: the sim backend computes values only; numpy has no autodiff. Differentiate on 'torch' or 'jax'; "
    "the transpose of every collective is in dualmesh.backend.transpose_rules."
)
NESTED = (
    "shard_map: called inside a shard_map, where arrays are already this rank's blocks. Call the function itself, or "
    "lift the outer function only."
)


class SimPrograms(Programs):
    """Per-rank functions over the members of one state."""

    def __init__(self, state: "SimState", arrays: SimArrays, timeout_s: float) -> None:
        self._state = state
        self._arrays = arrays
        self._timeout_s = timeout_s

    def shard_map(
        self,
        fn: Callable[..., Any],
        in_specs: Any,
        out_specs: Any,
        axes: tuple[str, ...] | None,
        check_replicated: bool,
    ) -> Callable[..., Any]:
        for what, specs in (("in_specs", in_specs), ("out_specs", out_specs)):
            self._check_specs(f"shard_map {what}", specs, axes)

        def program(*args: Any) -> Any:
            if place() is not None:
                raise ArgumentError(NESTED)
            specs = spec_tree(in_specs, args, what="shard_map in_specs")
            inputs = mapped(lambda x, spec: self._arrays.placed("shard_map", x, spec), args, specs)

            def body(rank: int) -> Any:
                blocks = mapped(lambda x: np.array(x.block(rank), order="C"), inputs)
                return mapped(np.asarray, fn(*blocks))

            results = Run(self._state.members, self._timeout_s).of(body)
            return self._assembled(results, out_specs, check_replicated)

        return program

    def value_and_grad(self, fn: Callable[..., Any], argnums: tuple[int, ...]) -> Callable[..., tuple[Any, Any]]:
        raise NotDifferentiableError(NO_AUTODIFF)

    def remat(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return fn

    def sum_gradients(self, model: Any, **_: Any) -> None:
        """Nothing to do: numpy has no wrappers that reduce gradients."""

    def sync_gradients(self, params: Any, axis: Axis) -> Any:
        collectives = self._state.collectives

        def summed(gradient: Any) -> Any:
            collectives.admit("sync_gradients", gradient, axis)
            return collectives.all_reduce(gradient, axis, op="sum")

        return mapped(summed, params)

    def global_norm(self, tree: Any, order: float, axis: Axis | None) -> Any:
        whole = [np.ravel(self._whole(x)) for x in leaves(tree)]
        strange = [x for x in whole if x.dtype.kind not in "biufc"]
        if strange:
            raise ArrayTypeError(f"global_norm: {strange[0]!r} are no numbers. Give arrays.", found=strange[0].dtype)
        norm = np.linalg.norm(np.concatenate(whole), order) if whole else np.zeros(())
        if axis is None:
            return np.asarray(norm)
        if place() is None:
            raise ArgumentError(
                "global_norm: axis= is for per-rank blocks. Call it inside dm.shard_map, or leave it out."
            )
        op = "max" if order == np.inf else "sum"
        power = norm if order == np.inf else norm**order
        total = self._state.collectives.all_reduce(np.asarray(power), axis, op=op)
        return total if order == np.inf else total ** (1 / order)

    def federated_mean(self, tree: Any, plan: AveragingPlan) -> Any:
        return mapped(lambda x: average(self._state, x, plan), tree)

    def _whole(self, x: Any) -> Any:
        return self._arrays.to_numpy(x) if isinstance(x, SimArray) else np.asarray(x)

    def _check_specs(self, what: str, specs: Any, axes: tuple[str, ...] | None) -> None:
        if axes is not None:
            self._state.size(axes)
        for leaf in leaves(specs):
            spec = P.of(leaf)
            check_axes(self._state.topology, spec, what=what)
            outside = [name for name in spec.axes if axes is not None and name not in axes]
            if outside:
                raise ShardingError(
                    f"{what}: {spec!r} splits over {listed(outside)}, but axes={axes!r} leaves that to the framework. "
                    f"Name only these axes, or add it.",
                    spec=spec,
                    axes=axes,
                )

    def _assembled(self, results: list[Any], out_specs: Any, check_replicated: bool) -> Any:
        first, members = results[0], self._state.members
        for rank, result in zip(members, results, strict=True):
            if _structure(result) != _structure(first):
                raise ShapeError(
                    f"shard_map: rank {members[0]} returned {_structure(first)}, rank {rank} {_structure(result)}. "
                    f"Every rank must return the same containers, shapes and dtypes.",
                    rank=rank,
                )
        specs = spec_tree(out_specs, first, what="shard_map out_specs")
        return mapped(lambda spec, *blocks: self._joined(spec, blocks, check_replicated), specs, *results)

    def _joined(self, spec: P, blocks: "tuple[NDArray[Any], ...]", check_replicated: bool) -> SimArray:
        """Make one global array of what the ranks returned."""
        topology = self._state.topology
        kind_of("shard_map", blocks[0].dtype)
        shape = global_shape(topology, spec, blocks[0].shape, what="shard_map result")
        dim_layouts(topology, spec, shape, what="shard_map result")
        held = dict(zip(self._state.members, blocks, strict=True))
        if spec.partial and topology.size(spec.partial) > 1:
            held = {rank: self._summed(rank, spec, held) for rank in held}
        held = {rank: np.array(block, order="C") for rank, block in held.items()}
        for block in held.values():
            block.flags.writeable = False
        joined = SimArray(self._state, P(*spec.entries), held)
        if check_replicated:
            self._check_replicated(joined)
        return joined

    def _summed(self, rank: int, spec: P, held: "Mapping[int, NDArray[Any]]") -> "NDArray[Any]":
        if kind_of("shard_map", held[rank].dtype) == "bool":
            raise ArrayTypeError(f"shard_map: {spec!r} sums a bool result, which is not defined. Convert it first.")
        return reduce_blocks([held[member] for member in self._state.ranks(spec.partial, rank)], "sum")

    def _check_replicated(self, joined: SimArray) -> None:
        state = self._state
        first: dict[tuple[tuple[int, int], ...], int] = {}
        for rank in state.members:
            cut = slices_of(state.topology, joined.spec, joined.shape, state.grid_rank(rank))
            other = first.setdefault(tuple((part.start, part.stop) for part in cut), rank)
            if joined.block(rank).tobytes() != joined.block(other).tobytes():
                raise ShardingError(
                    f"shard_map: {joined.spec!r} declares the result equal on ranks {other} and {rank}, but it "
                    f"differs. Reduce it over the axes that out_specs leaves out, or name them there.",
                    ranks=(other, rank),
                    spec=joined.spec,
                )


def _structure(tree: Any) -> str:
    """Write containers, shapes and dtypes of a tree of arrays."""
    if isinstance(tree, Mapping):
        return "{" + ", ".join(f"{key!r}: {_structure(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, list | tuple):
        return f"{type(tree).__name__}({', '.join(_structure(item) for item in tree)})"
    return "None" if tree is None else f"{tree.dtype}{list(tree.shape)}"
