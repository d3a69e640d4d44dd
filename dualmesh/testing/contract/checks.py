"""The checks: each runs one part of the contract in a place and fails with all that is wrong.

What workers run is in `runs` and `laid_out`; what is right, in `oracle`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dualmesh._support.optional_imports import np
from dualmesh.errors import DifferenceError
from dualmesh.sharding.partition_spec import P
from dualmesh.testing.contract import cases, laid_out, oracle, runs
from dualmesh.testing.contract.cases import Case
from dualmesh.testing.places import Place, run_on

WORLDS = tuple(oracle.TOPOLOGIES)
"""Sizes of worlds that the suite knows."""

SPECS: dict[int, list[P]] = {
    1: [P(), P("a"), P("world", "b")],
    2: [P(), P("a"), P(None, "a"), P("b", "a")],
    4: [P(), P("a"), P("b", "a"), P("a", "b"), P(("a", "b")), P(("b", "a")), P(None, ("b", "a")), P("world")],
    6: [P("a"), P(("b", "a")), P("b", "a"), P(None, ("a", "b"))],
    8: [
        *(P("a", "b", "c"), P("c", "b", "a"), P(("a", "c"), "b"), P(("c", "a"), None, "b"), P(("b", "a"), "c")),
        *(P(("c", "b", "a")), P("ca", "b"), P("bc", "a"), P(None, "world"), P(None, "bc"), P("b"), P("ca")),
        *(P("wide", "narrow"), P(("narrow", "wide")), P("narrow", None, "wide"), P("narrow")),
    ],
}
Run = Callable[..., list[Any]]


def check_collectives(place: str | Place | Run, world_size: int, *, timeout_s: float = 240.0) -> None:
    """Fail where a collective over any kind of axis is not what its definition says.

    Args:
        place: Where: a name, a `Place`, or a function like `run_on` without its first argument.
        world_size: One of `WORLDS`.
        timeout_s: How long to wait.

    Raises:
        DifferenceError: With a line for every case that is wrong.
    """
    some = cases.grid(world_size)
    found = agreed(_run(place)(runs.collectives, world_size, some, world_size=world_size, timeout_s=timeout_s))
    _refuse({case: expected(world_size, case) for case in some}, found, rtol=1e-13)


def check_dtypes(place: str | Place | Run, *, timeout_s: float = 240.0) -> None:
    """Fail where a dtype does not travel, or arrives as another, in a world of 4. Arguments as `check_collectives`."""
    some = cases.dtypes()
    found = agreed(_run(place)(runs.collectives, 4, some, world_size=4, timeout_s=timeout_s))
    _refuse({case: expected(4, case) for case in some}, found, rtol=2e-3)


def check_bits(place: str | Place | Run, *, timeout_s: float = 240.0) -> None:
    """Fail where a collective that only moves changes a bit, in a world of 4. Arguments as `check_collectives`."""
    found = agreed(_run(place)(runs.special_values, world_size=4, timeout_s=timeout_s))
    wrong = [verb for verb, (sent, got) in found.items() if sent.tobytes() != got.tobytes()]
    if wrong:
        raise DifferenceError(f"contract: {', '.join(wrong)} changed bits.", differences=wrong)


def check_gradients(place: str | Place | Run, world_size: int, *, timeout_s: float = 240.0) -> None:
    """Fail where a gradient is not the exact transpose. Arguments as `check_collectives`."""
    some = [case for case in cases.grid(world_size) if case.has_gradient]
    shapes = {case: expected(world_size, case).shape for case in some}
    run = _run(place)
    found = agreed(run(runs.gradients, world_size, some, shapes, world_size=world_size, timeout_s=timeout_s))
    _refuse({case: transposed(world_size, case, shapes[case]) for case in some}, found, rtol=1e-12)


def check_arrays(place: str | Place | Run, world_size: int, *, timeout_s: float = 240.0) -> None:
    """Fail where an array does not come back as it went, or a rank holds another slice. As `check_collectives`."""
    whole = np.arange(24.0 * 24 * 12).reshape(24, 24, 12)
    specs = SPECS[world_size]
    run = _run(place)
    results = run(laid_out.round_trips, world_size, whole, specs, world_size=world_size, timeout_s=timeout_s)
    wrong = []
    for spec, got in zip(specs, agreed(results), strict=True):
        entries = (*spec.entries, None, None, None)[:3]
        wanted = np.stack([oracle.block_of(world_size, entries, whole, rank) for rank in range(world_size)])
        ways = ("distribute", "shard_local", "constrain")
        wrong += [f"{way} under {spec!r} changed the array" for way in ways if not np.array_equal(whole, got[way])]
        there = zip(ways, got["there"], strict=True)
        wrong += [f"{way} under {spec!r} cut other blocks" for way, own in there if not np.array_equal(wanted, own)]
        if not np.array_equal(wanted, np.stack([whole[cut] for cut in got["slices"]])):
            wrong.append(f"local_slices of {spec!r} are others")
    if wrong:
        raise DifferenceError(f"contract: {len(wrong)} of arrays:\n" + "\n".join(wrong), differences=wrong)


def _run(place: str | Place | Run) -> Run:
    if isinstance(place, str | Place):
        named = place
        return lambda fn, *args, **settings: run_on(named, fn, *args, **settings)
    return place


def expected(world_size: int, case: Case) -> Any:
    """Return the results of all ranks by definition. *Pure.*"""
    blocks = case.blocks(world_size)
    return oracle.everywhere(oracle.forward, world_size, case.verb, case.axis, blocks, dict(case.settings))


def transposed(world_size: int, case: Case, shape: Sequence[int]) -> Any:
    """Return the gradients of all ranks' blocks by definition. *Pure.*"""
    weight = cases.cotangent(case, tuple(shape))
    settings = dict(case.settings)
    return case.gradient(oracle.everywhere(oracle.backward, world_size, case.verb, case.axis, weight, settings))


def _refuse(wanted: Mapping[Case, Any], found: Mapping[Case, Any], *, rtol: float) -> None:
    """Fail with every case whose result is not the oracle's, in value, shape or dtype."""
    wrong = []
    for case, value in wanted.items():
        got = found[case]
        if isinstance(got, str):
            wrong.append(f"{case}: {got}")
        elif got.dtype != value.dtype or got.shape != value.shape:
            wrong.append(f"{case}: {got.dtype}{got.shape}, expected {value.dtype}{value.shape}")
        elif not np.allclose(value, got, rtol=rtol, atol=rtol):
            wrong.append(f"{case}: {np.sum(~np.isclose(value, got, rtol=rtol, atol=rtol))} of {got.size} differ")
    if wrong:
        raise DifferenceError(f"contract: {len(wrong)} of {len(wanted)} cases:\n" + "\n".join(wrong), differences=wrong)


def agreed(results: Sequence[Any]) -> Any:
    """Return the result that all processes gave. *Pure.*

    Raises:
        DifferenceError: They gave others.
    """
    for process, result in enumerate(results):
        if not _same(results[0], result):
            raise DifferenceError(
                f"contract: process 0 found {results[0]!r}, process {process} {result!r}", differences=[process]
            )
    return results[0]


def _same(one: Any, other: Any) -> bool:
    """Tell whether two nested results are equal, arrays bit for bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, np.ndarray):
        return bool((one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes()))
    return bool(one == other)
