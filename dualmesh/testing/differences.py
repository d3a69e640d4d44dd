"""Where two arrays differ: which element, which ranks hold it, both values, how many units in the last place.

Which arrays of a run are compared is decided in `comparison`, `sharded`, `ports` and `recordings`; how far apart they
may be, here.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dualmesh._support.optional_imports import np
from dualmesh.errors import ArgumentError, DifferenceError
from dualmesh.sharding.param_paths import leaves_by_path

if TYPE_CHECKING:
    from numpy.typing import NDArray

RELATIVE = {8: 1e-10, 4: 2e-5, 2: 1e-2, 1: 0.2}
"""How far apart elements may be by the bytes of their dtype, as a part of the array's largest magnitude."""

Ranks = Callable[[tuple[int, ...]], Sequence[int]]
"""Which ranks hold an element."""


@dataclass(frozen=True)
class Difference:
    """One array that is not the same in two places."""

    what: str
    """Which array."""
    places: tuple[str, str]
    """Who computed each side; the first one is what was expected."""
    values: tuple[Any, Any] | None = None
    """Both values of the first element that differs."""
    element: tuple[int, ...] = ()
    """Its index in the global array."""
    ranks: tuple[int, ...] = ()
    """The ranks that hold it, where the second side was computed."""
    ulps: float = 0.0
    """How many numbers of the narrower dtype lie between the two values."""
    count: tuple[int, int] = (1, 1)
    """How many elements differ, of how many."""
    worst: float = 0.0
    """The largest difference, as a part of the array's largest magnitude."""
    said: str = ""
    """What else is wrong: shapes, dtypes, shardings; then there are no values."""

    def __str__(self) -> str:
        if self.values is None:
            return f"{self.what}: {self.said}"
        parts = [self.what, f"element {_index(self.element)}"] if self.element else [self.what]
        if self.ranks:
            parts.append(f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {_short(self.ranks)}")
        first, second = (f"{value!s} ({place})" for value, place in zip(self.values, self.places, strict=True))
        parts += [f"{first} and {second}", ulps_text(self.ulps)]
        more = "" if self.count[1] == 1 else f"; {self.count[0]} of {self.count[1]} elements differ"
        return (
            f"{', '.join(parts)}{more}, at most by {self.worst:.0e} of the largest{f'; {self.said}' * bool(self.said)}"
        )


def assert_same(
    what: str,
    wanted: Any,
    found: Any,
    *,
    places: tuple[str, str] = ("expected", "found"),
    rtol: float | None = None,
) -> None:
    """Fail where nested containers of numpy arrays differ, for what `run_on` brought back. *Pure.*

    Args:
        what: What the arrays are, for the report.
        wanted: What is expected: arrays or numbers, or nested containers of them.
        found: What is there, in containers with the same keys.
        places: Who computed each.
        rtol: See `difference`.

    Raises:
        DifferenceError: It names the array by its path, the element, both values, and ulps.
        ArgumentError: Neither side holds an array, so that nothing would be compared.

    >>> assert_same("totals", {"loss": np.float64(6)}, {"loss": 2.0 * 3.0})
    """
    one, other = leaves_by_path("assert_same", wanted), leaves_by_path("assert_same", found)
    if not one and not other:
        raise ArgumentError(f"assert_same: {what}: neither side holds an array. Give what should be compared.")
    wrong = differing(what, one, other, lambda path: f"{what} {path}".strip(), places=places, rtol=rtol)
    refuse_differences("assert_same", wrong)


def differing(
    what: str,
    wanted: Mapping[str, Any],
    found: Mapping[str, Any],
    named: Callable[[str], str],
    *,
    places: tuple[str, str],
    rtol: float | None,
    ranks: Callable[[str], Ranks] | None = None,
) -> Iterator[Difference]:
    """Yield the differences of arrays by path; arrays that only one side has are one. *Pure.*"""
    if wanted.keys() != found.keys():
        said = f"{sorted(wanted)} ({places[0]}) and {sorted(found)} ({places[1]}) are not the same arrays"
        yield Difference(what, places, said=said)
        return
    for path, array in wanted.items():
        holders = None if ranks is None else ranks(path)
        one = difference(named(path), array, found[path], places=places, rtol=rtol, ranks=holders)
        if one is not None:
            yield one


def difference(
    what: str,
    wanted: Any,
    found: Any,
    *,
    places: tuple[str, str] = ("expected", "found"),
    rtol: float | None = None,
    ranks: Ranks | None = None,
    offset: Sequence[int] = (),
    scale: float | None = None,
) -> Difference | None:
    """Return the first element in which two numpy arrays differ, or None. *Pure.*

    Args:
        what: What the arrays are, for the report.
        wanted: What is expected.
        found: What is there.
        places: Who computed each.
        rtol: How far apart, as a part of the largest magnitude in `wanted`; None: by the narrower dtype
            (`RELATIVE`); 0: every bit counts, but NaN equals NaN and -0.0 equals 0.0. Integers and bools must be equal.
        ranks: Which ranks hold an element of `found`.
        offset: Where in the global array `found` begins.
        scale: The largest magnitude, where the arrays are parts of larger ones.

    >>> print(difference("w", np.float32([1, 1.25]), np.float32([1, 1.5])))
    w, element (1,), 1.25 (expected) and 1.5 (found), 2^21 ulps; 1 of 2 elements differ, at most by 2e-01 of the largest
    """
    wanted, found = (_numbers(what, x) for x in (wanted, found))
    if wanted.shape != found.shape:
        return Difference(
            what, places, said=f"shape {wanted.shape} ({places[0]}) and {found.shape} ({places[1]}) differ"
        )
    if not _comparable(wanted.dtype, found.dtype):
        return Difference(
            what, places, said=f"dtype {wanted.dtype} ({places[0]}) and {found.dtype} ({places[1]}) differ"
        )
    if not wanted.size or (wanted.dtype == found.dtype and np.array_equal(wanted, found)):
        return None
    narrow = min(wanted.dtype, found.dtype, key=lambda dtype: int(dtype.itemsize))
    apart, relative = _apart(wanted, found, narrow, scale)
    allowed = _tolerance_of(narrow, rtol)
    wrong = ~(relative <= allowed) if allowed else apart
    if not wrong.any():
        return None
    first = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
    element = tuple(int(i) for i in first)
    values = (wanted[first], found[first])
    place = tuple(i + start for i, start in zip(element, offset or (0,) * len(element), strict=True))
    return Difference(
        what,
        places,
        values=values,
        element=place,
        ranks=tuple(ranks(place)) if ranks is not None else (),
        ulps=ulps_between(*values, narrow),
        count=(int(wrong.sum()), wrong.size),
        worst=float(relative.max()),
    )


def _numbers(what: str, x: Any) -> "NDArray[Any]":
    array = np.asarray(x)
    if array.dtype.kind in "OSUMm":
        raise ArgumentError(f"difference: {what} is {x!r}, no array of numbers. Compare it by ==.", found=x)
    return array


def _comparable(one: Any, other: Any) -> bool:
    """Tell whether two dtypes are one; narrow floats that numpy lacks arrive from torch as their values in float32."""
    if one == other:
        return True
    return {_is_foreign(one), _is_foreign(other)} == {True, False} and "float32" in (one.name, other.name)


def _is_foreign(dtype: Any) -> bool:
    return bool(dtype.type.__module__ == "ml_dtypes")


def _apart(
    wanted: "NDArray[Any]", found: "NDArray[Any]", narrow: Any, scale: float | None
) -> "tuple[NDArray[np.bool_], NDArray[np.float64]]":
    """Return which elements are not equal, and by what part of the largest magnitude."""
    wide: Any = np.complex128 if narrow.kind == "c" else np.float64
    if narrow.kind in "biu":
        apart = wanted != found
        return apart, np.where(apart, np.inf, 0.0)
    one, other = wanted.astype(wide), found.astype(wide)
    apart = ~((one == other) | (np.isnan(one) & np.isnan(other)))
    most = max(scale or 0.0, largest(one)) or 1.0
    with np.errstate(invalid="ignore", over="ignore"):
        relative = np.where(apart, np.abs(one - other) / most, 0.0)
    return apart, np.where(np.isnan(relative), np.inf, relative)


def largest(array: "NDArray[Any]") -> float:
    """Return the largest finite magnitude in an array, 0 where there is none. *Pure.*

    >>> largest(np.array([1.0, -3.0, np.inf]))
    3.0
    """
    wide = array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
    finite = np.abs(wide[np.isfinite(wide)])
    return float(finite.max()) if finite.size else 0.0


def _tolerance_of(narrow: Any, rtol: float | None) -> float:
    if rtol is not None:
        return rtol
    if narrow.kind in "biu":
        return 0.0
    return RELATIVE[min(narrow.itemsize // (2 if narrow.kind == "c" else 1), 8)]


def ulps_between(one: Any, other: Any, dtype: Any) -> float:
    """Return how many steps to the next number of a dtype lead from one value to the other; inf for NaN. *Pure.*

    >>> ulps_between(1.25, 1.5, np.dtype("float32")) == 2**21
    True
    """
    if dtype.kind in "biu":
        return float(abs(int(one) - int(other)))
    if dtype.kind == "c":
        part = np.dtype(f"float{dtype.itemsize * 4}")
        return max(ulps_between(one.real, other.real, part), ulps_between(one.imag, other.imag, part))
    if np.isnan(one) or np.isnan(other):
        return math.inf
    first, second = (_place_on_line(np.asarray(value).astype(dtype)) for value in (one, other))
    return float(abs(first - second))


def _place_on_line(value: "NDArray[Any]") -> int:
    """Return the number of a floating-point number when all are counted from 0."""
    bits = int(value.view(f"u{value.dtype.itemsize}"))
    sign = 1 << (8 * value.dtype.itemsize - 1)
    return sign - bits if bits & sign else bits


def ulps_text(ulps: float) -> str:
    """Write a number of units in the last place: powers of two beyond a thousand. *Pure.*

    >>> ulps_text(3), ulps_text(2**21), ulps_text(2**21 + 5**8)
    ('3 ulps', '2^21 ulps', '2^21.2 ulps')
    """
    if not math.isfinite(ulps):
        return "no number of ulps"
    if ulps < 1024:
        return f"{ulps:.0f} ulp{'s' * (ulps != 1)}"
    power = math.log2(ulps)
    return f"2^{power:.0f} ulps" if power == round(power) else f"2^{power:.1f} ulps"


def refuse_differences(where: str, differences: Iterable[Difference], *, shown: int = 12) -> None:
    """Raise if anything differs; the message begins with the first difference. *Pure.*

    Raises:
        DifferenceError: It lists what differs; `differences` has all.
    """
    found = list(differences)
    if not found:
        return
    lines = [f"{where}: first difference: {found[0]}"]
    lines += [f"  then: {one}" for one in found[1:shown]]
    lines += [f"  and {len(found) - shown} more"] if len(found) > shown else []
    raise DifferenceError("\n".join(lines), differences=found)


def _index(element: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, element))}{',' * (len(element) == 1)})"


def _short(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
