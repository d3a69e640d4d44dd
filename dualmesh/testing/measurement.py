"""What a worker measures of a per-rank function: values, gradients, where they lie, whether copies agree.

What is compared with what is decided in `comparison`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from dualmesh._support.optional_imports import array_api_compat, np
from dualmesh.arrays import transforms
from dualmesh.arrays.distribute import distribute, to_numpy
from dualmesh.backend.state import ParallelState
from dualmesh.errors import ArgumentError
from dualmesh.runtime.init import init_parallel_state
from dualmesh.sharding.param_paths import with_paths
from dualmesh.sharding.partition_spec import P, slices_of
from dualmesh.sharding.tree import leaves, mapped, spec_tree
from dualmesh.testing.differences import Difference
from dualmesh.testing.instruments import instruments_of
from dualmesh.testing.noise import noise_block
from dualmesh.testing.sharded import diverged, misplaced


class Program(NamedTuple):
    """What is run: a function as `dm.shard_map` takes it, its inputs, and which of them are differentiated."""

    fn: Callable[..., Any]
    inputs: tuple[Any, ...]
    in_specs: Any
    out_specs: Any
    wrt: tuple[int, ...]
    rtol: float | None


@dataclass
class Measured:
    """What one process found."""

    differentiates: bool
    arrays: dict[str, dict[str, Any]] = field(default_factory=lambda: {"values": {}, "gradients": {}})
    """numpy arrays by kind and path."""
    held: dict[str, dict[str, dict[int, Sequence[slice]]]] = field(default_factory=dict)
    """What each rank holds of them."""
    misplaced: list[Difference] = field(default_factory=list)
    diverged: list[Difference] = field(default_factory=list)

    def note(self, kind: str, tree: Any, specs: Any, state: ParallelState, rtol: float | None) -> None:
        """Keep a tree of global arrays that should lie as a tree of specs says. *Collective over the state.*"""
        what = "gradient of " if kind == "gradients" else ""
        paths = [path for path, _ in with_paths(tree)]
        arrays = self.arrays[kind] = {path: to_numpy(x) for path, x in with_paths(tree)}
        laid = {
            path: (spec, np.shape(array)) for spec, (path, array) in zip(leaves(specs), arrays.items(), strict=True)
        }
        self.held[kind] = {path: _slices(state, *laid[path]) for path in paths}
        self.misplaced += _about(what, misplaced(tree, specs, state))
        self.diverged += _about(what, diverged(tree, state, rtol))


def measure(program: Program, spec: Any, ranks: Sequence[int] | None) -> Measured | None:
    """Run a program over a state of its own; None where this process has no rank of it. *Collective over the state.*"""
    state = init_parallel_state(spec=spec, ranks=ranks)
    if not state.is_member:
        return None
    fn, inputs, in_specs, out_specs, wrt, rtol = program
    in_tree = spec_tree(in_specs, inputs, what="compare_places in_specs")
    args = mapped(distribute, inputs, in_tree)
    lifted = transforms.shard_map(fn, in_specs, out_specs)
    result = lifted(*args)
    out_tree = spec_tree(out_specs, result, what="compare_places out_specs")
    if not list(leaves(result)):
        raise ArgumentError(f"compare_places: fn returned {result!r}, no array. Return what should be compared.")
    found = Measured(bool(wrt) and instruments_of(state.backend).differentiates)
    found.note("values", result, mapped(_unsummed, out_tree), state, rtol)
    if found.differentiates:
        weights = mapped(
            lambda weight, spec: distribute(weight, _unsummed(spec)), weights_of(result, to_numpy), out_tree
        )
        run = instruments_of(state.backend).compiled(transforms.value_and_grad(_objective(lifted, out_tree), wrt))
        named = {f"input {number}": x for number, x in zip(wrt, run(*args, weights)[1], strict=True)}
        found.note("gradients", named, {f"input {number}": in_tree[number] for number in wrt}, state, rtol)
    return found


def weights_of(result: Any, read: Callable[[Any], Any]) -> Any:
    """Return a weight for every element of the results: standard normal numbers of their positions. *Local.*

    Args:
        result: Nested containers of arrays.
        read: Makes a numpy array of one.
    """
    numbers = iter(range(len(list(leaves(result)))))

    def weight(x: Any) -> Any:
        array = read(x)
        return noise_block(next(numbers), [slice(0, size) for size in array.shape], array.shape).astype(array.dtype)

    return mapped(weight, result)


def _objective(lifted: Callable[..., Any], out_tree: Any) -> Callable[..., Any]:
    """Return a function of the inputs and the weights: the weighted sum of all floating-point results."""
    specs = [_unsummed(spec) for spec in leaves(out_tree)]

    def weighted(results: Sequence[Any], weights: Sequence[Any]) -> tuple[Any, ...]:
        pairs = zip(results, weights, strict=True)
        return tuple(array_api_compat.array_namespace(x).sum(x * weight) for x, weight in pairs)

    def objective(*args: Any) -> Any:
        *inputs, weights = args
        every = zip(leaves(lifted(*inputs)), leaves(weights), specs, strict=True)
        kept = [one for one in every if _is_real(one[0].dtype)]
        if not kept:
            raise ArgumentError("compare_places: wrt asks for gradients, but no result is real floating-point.")
        results, factors, split = zip(*kept, strict=True)
        sums = tuple(P(partial=spec.axes) for spec in split)
        total: Any = sum(transforms.shard_map(weighted, (split, split), sums)(results, factors))
        return total

    return objective


def _is_real(dtype: Any) -> bool:
    """Tell whether a dtype of any framework has a gradient; complex results are no real objective."""
    if "complex" in str(dtype):
        raise ArgumentError(f"compare_places: a result is {dtype}, and wrt needs real ones. Return real and imaginary.")
    return "float" in str(dtype)


def _slices(state: ParallelState, spec: P, shape: Sequence[int]) -> dict[int, Sequence[slice]]:
    return {rank: slices_of(state.topology, spec, shape, state.grid_rank(rank)) for rank in state.members}


def _about(what: str, found: Iterable[Difference]) -> list[Difference]:
    return [replace(one, what=f"{what}{one.what}") for one in found]


def _unsummed(spec: P) -> P:
    return P(*spec.entries)
