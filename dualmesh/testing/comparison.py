"""One function in many places: the same inputs, the same values, gradients and shardings.

Two programs that only mean the same are in `ports`; where functions run is in `places`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dualmesh import programs
from dualmesh.arrays import distribute, to_numpy
from dualmesh.initialization import init_parallel_state
from dualmesh.lazy import array_api_compat, np
from dualmesh.partition_spec import P, slices_of
from dualmesh.paths import with_paths
from dualmesh.state import ParallelState
from dualmesh.testing.differences import Difference, Ranks, difference, refuse_differences
from dualmesh.testing.instruments import instruments_of
from dualmesh.testing.noise import noise_block
from dualmesh.testing.places import Place, place_named
from dualmesh.testing.pools import DEFAULT_TIMEOUT_S
from dualmesh.testing.sharded import misplaced
from dualmesh.testing.topologies import AnyTopology, resolved
from dualmesh.tree import leaves, mapped, spec_tree

EVERYWHERE = ("sim", "torch", "jax_x64")


def compare_places(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    in_specs: Any,
    out_specs: Any,
    topology: AnyTopology,
    *,
    places: Sequence[str | Place] = EVERYWHERE,
    wrt: Sequence[int] = (),
    expected: Any = None,
    world_size: int | None = None,
    rtol: float | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> dict[str, Any]:
    """Run one per-rank function, lifted by `dm.shard_map`, in several places, and fail where anything differs.

    Compared are: the value of every result; where every result really lies; with `wrt`, the gradient of those
    inputs of a weighted sum of all results (other weights at every element), and where each gradient lies. Every
    process of every place is compared with the first place, or with `expected`.

    Args:
        fn: Called as in `dm.shard_map`; it asks the ambient state and names no framework.
        inputs: Global numpy arrays, or nested containers of them, one per argument.
        in_specs: One spec per argument, or nested containers of them.
        out_specs: The same for the result.
        topology: A spec or a topology; `world_size` fills a size of -1.
        places: Names or places; see `run_on`.
        wrt: Positions of the inputs to differentiate.
        expected: The global result as numpy computes it, from which all places must not differ.
        world_size: Ranks; None: what the sizes of the topology multiply to.
        rtol: See `difference`.
        timeout_s: How long to wait for each place.

    Returns:
        {"values": {path: array}, "gradients": {path: array}} of the first place.

    Raises:
        DifferenceError: It names the array, the element, the ranks that hold it, both places and values, and ulps.

    >>> import dualmesh as dm
    >>> total = compare_places(lambda x: dm.ops.all_reduce(x, "tp"), [np.arange(4.0)], [dm.P("tp")], dm.P(),
    ...     dm.parallel_spec(tp_size=4), places=["sim"], expected=np.array([6.0]))
    >>> total["values"][""]
    array([6.])
    """
    chosen = resolved(topology, world_size)
    program = (fn, tuple(inputs), tuple(in_specs), out_specs, chosen.spec, tuple(wrt))
    reference: dict[str, dict[str, Any]] = {"values": {}, "gradients": {}, "specs": {}}
    sides: dict[str, str] = {}
    if expected is not None:
        reference["values"] = dict(with_paths(expected))
        sides["values"] = "expected"
    wrong: list[Difference] = []
    for place in map(place_named, places):
        results = place.run(_measured, *program, world_size=chosen.world_size, timeout_s=timeout_s)
        for result in results:
            wrong += result["misplaced"]
            for kind in ("values", "gradients"):
                if result[kind] and not reference[kind]:
                    reference[kind], sides[kind] = result[kind], place.backend
                wrong += _apart(kind, reference[kind], result, (sides.get(kind, ""), place.backend), chosen, rtol)
    refuse_differences("compare_places", wrong)
    return {kind: reference[kind] for kind in ("values", "gradients")}


def _apart(
    kind: str, wanted: dict[str, Any], result: Any, places: tuple[str, str], topology: Any, rtol: float | None
) -> list[Difference]:
    found = result[kind]
    if not found:
        return []
    if wanted.keys() != found.keys():
        said = f"{sorted(wanted)} ({places[0]}) and {sorted(found)} ({places[1]}) are not the same arrays"
        return [Difference(kind, places, said=said)]
    what = "" if kind == "values" else "gradient of "
    each = (
        difference(
            f"{what}{path or 'the result'}",
            wanted[path],
            found[path],
            places=places,
            rtol=rtol,
            ranks=holders(topology, result["specs"][kind][path], np.shape(found[path])),
        )
        for path in wanted
    )
    return [one for one in each if one is not None]


def holders(topology: Any, spec: P, shape: Sequence[int]) -> Ranks:
    """Return a function that says which ranks hold an element of an array. *Pure.*"""

    def ranks(element: tuple[int, ...]) -> list[int]:
        held = ((rank, slices_of(topology, P(*spec.entries), shape, rank)) for rank in topology.members)
        return [
            rank for rank, cuts in held if all(cut.start <= i < cut.stop for i, cut in zip(element, cuts, strict=True))
        ]

    return ranks


def _measured(
    fn: Callable[..., Any], inputs: tuple[Any, ...], in_specs: Any, out_specs: Any, spec: Any, wrt: tuple[int, ...]
) -> dict[str, Any]:
    """Run in a worker: values, gradients and what lies elsewhere than it should."""
    state = init_parallel_state(spec=spec)
    in_tree = spec_tree(in_specs, inputs, what="compare_places in_specs")
    args = mapped(distribute, inputs, in_tree)
    lifted = programs.shard_map(fn, in_specs, out_specs)
    result = lifted(*args)
    out_tree = spec_tree(out_specs, result, what="compare_places out_specs")
    found = {
        "values": {path: to_numpy(x) for path, x in with_paths(result)},
        "gradients": {},
        "misplaced": misplaced(result, mapped(_unsummed, out_tree), state),
        "specs": {"values": _by_path(result, out_tree), "gradients": {}},
    }
    if wrt and instruments_of(state.backend).differentiates:
        weights = _weights(result, out_tree)
        objective = _objective(lifted, mapped(_unsummed, out_tree))
        run = instruments_of(state.backend).compiled(programs.value_and_grad(objective, wrt))
        named = {f"input {n}": gradient for n, gradient in zip(wrt, run(*args, weights)[1], strict=True)}
        _note_gradients(found, named, {f"input {n}": in_tree[n] for n in wrt}, state)
    return found


def _note_gradients(found: dict[str, Any], named: dict[str, Any], specs: dict[str, Any], state: ParallelState) -> None:
    found["gradients"] = {path: to_numpy(x) for path, x in with_paths(named)}
    found["specs"]["gradients"] = _by_path(named, specs)
    found["misplaced"] += [replace(one, what=f"gradient of {one.what}") for one in misplaced(named, specs, state)]


def _objective(lifted: Callable[..., Any], out_tree: Any) -> Callable[..., Any]:
    def objective(*args: Any) -> Any:
        *inputs, weights = args
        results = zip(leaves(lifted(*inputs)), leaves(weights), leaves(out_tree), strict=True)
        total: Any = sum(
            programs.shard_map(_weighted, (spec, spec), P(partial=spec.axes))(x, weight) for x, weight, spec in results
        )
        return total

    return objective


def _weighted(x: Any, weight: Any) -> Any:
    return array_api_compat.array_namespace(x).sum(x * weight)


def _weights(result: Any, out_tree: Any) -> Any:
    """Return a weight for every element of the results: standard normal numbers of their positions."""
    numbers = iter(range(len(list(leaves(result)))))

    def weight(x: Any, spec: P) -> Any:
        whole = noise_block(next(numbers), [slice(0, size) for size in x.shape], x.shape)
        return distribute(whole.astype(to_numpy(x).dtype), _unsummed(spec))

    return mapped(weight, result, out_tree)


def _unsummed(spec: P) -> P:
    return P(*spec.entries)


def _by_path(tree: Any, specs: Any) -> dict[str, P]:
    return {path: spec for (path, _), spec in zip(with_paths(tree), leaves(specs), strict=True)}
