"""One function in many places: the same inputs, the same values, gradients and shardings.

What a worker measures is in `measurement`; two programs that only mean the same are in `ports`; where functions run is
in `places`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dualmesh._support.checks import check_items
from dualmesh._support.optional_imports import np
from dualmesh.errors import ArgumentError, listed
from dualmesh.sharding.param_paths import leaves_by_path
from dualmesh.sharding.partition_spec import is_spec
from dualmesh.sharding.tree import leaves
from dualmesh.testing.differences import Difference, Ranks, differing, refuse_differences
from dualmesh.testing.measurement import Measured, Program, measure, weights_of
from dualmesh.testing.places import Place, place_named
from dualmesh.testing.pools import DEFAULT_TIMEOUT_S
from dualmesh.testing.topologies import AnyTopology, in_world
from dualmesh.topology.resolve import whole

EVERYWHERE = ("sim", "torch", "jax_x64")
NOTHING_TO_COMPARE = (
    "compare_places: {count} to compare values with. Give two places or more, or one and what numpy computes "
    "(expected=)."
)
NO_GRADIENTS = (
    "compare_places: wrt={wrt} asks for gradients, and only {sides} computes any; nothing would be compared. Give two "
    "places that differentiate, or one and pullback=, how numpy computes the gradients."
)


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
    pullback: Callable[[Any], Sequence[Any]] | None = None,
    ranks: Sequence[int] | None = None,
    world_size: int | None = None,
    rtol: float | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> dict[str, Any]:
    """Run one per-rank function, lifted by `dm.shard_map`, in several places, and fail where anything differs.

    Compared are: the value of every result; where every result really lies; whether ranks that hold the same elements
    hold the same values; with `wrt`, the gradient of those inputs of a weighted sum of all floating-point results
    (other weights at every element), where each gradient lies, and its copies. Every process of every place is
    compared with the first place, or with what numpy computes.

    Args:
        fn: Called as in `dm.shard_map`; it asks the ambient state and names no framework.
        inputs: Global numpy arrays, or nested containers of them, one per argument.
        in_specs: One spec per argument, or nested containers of them; one `dm.P` is for all.
        out_specs: The same for the result.
        topology: A spec, rank groups or a topology; `world_size` fills a size of -1.
        places: Names or places; see `run_on`.
        wrt: Positions of the inputs to differentiate.
        expected: The global result as numpy computes it, from which all places must not differ.
        pullback: From a weight for every element of the results (nested as `expected`), the gradients of the inputs in
            `wrt`, in that order, as numpy computes them.
        ranks: The ranks of the world that the topology is over, in grid order; None: the first ones.
        world_size: Ranks in the world; None: as many as the topology needs.
        rtol: See `difference`.
        timeout_s: How long to wait for each place.

    Returns:
        {"values": {path: array}, "gradients": {path: array}} of the first place, or of numpy.

    Raises:
        DifferenceError: It names the array, the element, the ranks that hold it, both places and values, and ulps.
        ArgumentError: There is nothing to compare: too few places, or too few that have gradients.

    >>> import dualmesh as dm
    >>> total = compare_places(lambda x: dm.ops.all_reduce(x, "tp"), [np.arange(4.0)], [dm.P("tp")], dm.P(),
    ...     dm.parallel_spec(tp_size=4), places=["sim"], expected=np.array([6.0]))
    >>> total["values"][""]
    array([6.])
    """
    spec, size = in_world("compare_places", topology, world_size, ranks)
    arrays = check_items("compare_places", "inputs", inputs)
    numbers = _differentiated(wrt, arrays)
    program = Program(fn, arrays, in_specs if is_spec(in_specs) else tuple(in_specs), out_specs, numbers, rtol)
    reference = _expected(expected, pullback, numbers)
    chosen = [place_named(place) for place in check_items("compare_places", "places", places)]
    if len(chosen) + (expected is not None) < 2:
        raise ArgumentError(NOTHING_TO_COMPARE.format(count="one place and nothing" if chosen else "no place"))
    wrong: list[Difference] = []
    differentiating = ["numpy"] if pullback is not None else []
    for place in chosen:
        found = place.run(measure, program, spec, ranks, world_size=size, timeout_s=timeout_s)
        results = [result for result in found if result is not None]
        differentiating += [place.backend] if results[0].differentiates else []
        for result in results:
            wrong += [*result.misplaced, *result.diverged]
            for kind in ("values", "gradients"):
                if kind == "gradients" and not result.differentiates:
                    continue
                side, wanted = reference.setdefault(kind, (place.backend, result.arrays[kind]))
                wrong += _apart(kind, wanted, result, (side, place.backend), rtol)
    if numbers and len(differentiating) < 2:
        sides = listed(differentiating) if differentiating else "no place"
        raise ArgumentError(NO_GRADIENTS.format(wrt=numbers, sides=sides), wrt=numbers)
    refuse_differences("compare_places", wrong)
    return {kind: reference.get(kind, ("", {}))[1] for kind in ("values", "gradients")}


def _differentiated(wrt: Sequence[int], arrays: Sequence[Any]) -> tuple[int, ...]:
    """Return the positions of inputs to differentiate, checked."""
    numbers = check_items("compare_places", "wrt", wrt)
    for number in numbers:
        if whole(number) not in range(len(arrays)) or numbers.count(number) > 1:
            raise ArgumentError(
                f"compare_places: wrt={wrt!r}. Give different positions of inputs, 0..{len(arrays) - 1}.", wrt=wrt
            )
        plain = [x for x in leaves(arrays[number]) if np.asarray(x).dtype.kind not in "fV"]
        if plain:
            raise ArgumentError(
                f"compare_places: wrt has {number}, and input {number} holds {np.asarray(plain[0]).dtype}, which has "
                f"no gradient. Give floating-point arrays there, or leave it out.",
                wrt=wrt,
            )
    return numbers


def _expected(
    expected: Any, pullback: Callable[[Any], Sequence[Any]] | None, numbers: tuple[int, ...]
) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return {kind: ("expected", arrays by path)} of what numpy computes."""
    reference: dict[str, tuple[str, dict[str, Any]]] = {}
    if expected is not None:
        reference["values"] = "expected", leaves_by_path("expected", expected)
    if pullback is None:
        return reference
    if expected is None or not numbers:
        raise ArgumentError("compare_places: pullback= needs expected= and wrt=. Give them, or leave it out.")
    gradients = check_items("compare_places", "what pullback returned", pullback(weights_of(expected, np.asarray)))
    if len(gradients) != len(numbers):
        raise ArgumentError(
            f"compare_places: pullback returned {len(gradients)} gradients for wrt={numbers}. Return one per input."
        )
    named = {f"input {number}": gradient for number, gradient in zip(numbers, gradients, strict=True)}
    reference["gradients"] = "expected", leaves_by_path("gradients", named)
    return reference


def _apart(
    kind: str, wanted: Mapping[str, Any], result: Measured, places: tuple[str, str], rtol: float | None
) -> Iterator[Difference]:
    what = "" if kind == "values" else "gradient of "
    return differing(
        *(kind, wanted, result.arrays[kind], lambda path: f"{what}{path or 'the result'}"),
        places=places,
        rtol=rtol,
        ranks=lambda path: _holders(result.held[kind][path]),
    )


def _holders(held: Mapping[int, Sequence[slice]]) -> Ranks:
    """Return a function that says which ranks hold an element of an array."""

    def ranks(element: tuple[int, ...]) -> list[int]:
        return [
            rank
            for rank, cuts in held.items()
            if all(cut.start <= i < cut.stop for i, cut in zip(element, cuts, strict=True))
        ]

    return ranks
