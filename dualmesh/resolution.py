"""Does a spec fit a world? Infer -1, check everything, and say every problem at once.

What is declared is in `spec`, the algebra in `layout`, the answers about ranks in `topology`.
"""

import operator
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from dualmesh.errors import ArgumentError, SpecError, counted, did_you_mean, listed
from dualmesh.layout import Layout, overlap, refactored, row_major

if TYPE_CHECKING:
    from dualmesh.spec import TopologySpec, View

ROLES = ("data", "params", "loss", "sequence", "replicate")

Sizes = tuple[tuple[str, int], ...]


class Fit(NamedTuple):
    """A spec's sizes with -1 filled in, and the digits of every axis, all in declared order."""

    base: Sizes
    views: dict[str, Sizes]
    rank_offset: int
    layouts: dict[str, Layout]


def whole(value: Any) -> int | None:
    """Return an int given as any integer type but bool, else None. *Pure.*"""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def positive(where: str, name: str, value: Any, least: int = 1) -> int:
    """Return a count as an int, or refuse it by name. *Pure.*

    Raises:
        ArgumentError: The value is no integer of at least `least`.
    """
    number = whole(value)
    if number is None or number < least:
        raise ArgumentError(
            f"{where}: {name} is {value!r}. It must be an integer of at least {least}.", **{name: value}
        )
    return number


def fit(spec: "TopologySpec", world_size: int) -> Fit:
    """Fit a spec to a world. *Pure.*

    Raises:
        ArgumentError: The world size is no positive integer.
        SpecError: The spec does not fit; `problems` lists every reason.
    """
    world_size = positive("TopologySpec.resolve", "world_size", world_size)
    problems = _name_problems(spec)
    offset = whole(spec.rank_offset)
    if offset is None or offset < 0:
        problems.append(f"rank_offset is {spec.rank_offset!r}. It must be an integer of at least 0.")
    base = _sizes(spec.base, world_size, f"the world has {counted(world_size, 'rank')}", problems)
    _refuse(problems)
    layouts = dict(zip(dict(base), row_major([size for _, size in base]), strict=True))
    views = {name: _view(name, view, layouts, problems) for name, view in spec.named_views}
    for name, members in spec.combinations:
        joined = _joined(f"combined axis {name!r}", members, layouts, problems)
        if joined is not None:
            layouts[name] = joined
    layouts.setdefault("world", Layout.joined(layouts[name] for name, _ in base))
    for part, members in spec.parts:
        if part not in ROLES:
            problems.append(f"role {part!r} is unknown. Roles: {listed(ROLES)}.{did_you_mean(part, ROLES)}")
        _joined(f"role {part!r}", members, layouts, problems)
    _refuse(problems)
    return Fit(base, views, offset or 0, layouts)


def _refuse(problems: Sequence[str]) -> None:
    if len(problems) == 1:
        raise SpecError(f"Topology: {problems[0]}", problems=tuple(problems))
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise SpecError(f"Topology: {len(problems)} problems.\n{lines}", problems=tuple(problems))


def _name_problems(spec: "TopologySpec") -> list[str]:
    kinds = [("axis", name) for name, _ in spec.base]
    kinds += [(f"axis of view {view_name!r}", name) for view_name, view in spec.named_views for name, _ in view.sizes]
    kinds += [("combined axis", name) for name, _ in spec.combinations]
    problems = [] if spec.base else ["no axes are declared. Name at least one, for example {'dp': -1}."]
    seen: dict[object, str] = {}
    for kind, name in kinds:
        if not isinstance(name, str) or not name:
            problems.append(f"{kind} {name!r} is no name. Names are non-empty strings.")
        elif name in seen:
            problems.append(f"the name {name!r} is taken twice ({seen[name]} and {kind}). Rename one.")
        elif name == "world" and kind != "combined axis":
            problems.append("the name 'world' is kept for all ranks. Rename that axis.")
        seen[name] = kind
    return problems


def _sizes(pairs: Sequence[tuple[str, Any]], total: int, found: str, problems: list[str]) -> Sizes:
    """Fill in -1 so that the sizes multiply to `total`."""
    sizes = {name: whole(size) for name, size in pairs}
    bad = [name for name, size in sizes.items() if size is None or (size < 1 and size != -1)]
    given = dict(pairs)
    problems += [f"{name}={given[name]!r} is no size. Sizes are positive integers, or one -1 to infer." for name in bad]
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        problems.append(f"{listed(open_axes)} are all -1. Only one axis can be inferred: give the others a size.")
    if bad or len(open_axes) > 1 or not pairs:
        return ()
    known = {name: size for name, size in sizes.items() if size is not None and size != -1}
    product = prod(known.values())
    if not open_axes and product != total:
        problems.append(_product_problem(known, product, total, found))
    elif open_axes and total % product:
        problems.append(
            f"{_factors(known)} to {product}, which does not divide: {found}. {open_axes[0]}=-1 needs the others to "
            f"multiply to a divisor of {total}: {_divisors(total)}."
        )
    else:
        return tuple((name, known.get(name, total // product)) for name in sizes)
    return ()


def _factors(sizes: dict[str, int]) -> str:
    return f"{', '.join(f'{name}={size}' for name, size in sizes.items())} multiply"


def _divisors(number: int) -> str:
    return listed(n for n in range(1, min(number, 4096) + 1) if number % n == 0)


def _product_problem(sizes: dict[str, int], product: int, total: int, found: str) -> str:
    fits = [f"{name}={total * size // product}" for name, size in sizes.items() if total * size % product == 0]
    advice = f"What would fit, one changed: {listed(fits)}." if fits else "No single axis can be changed to fit."
    return (
        f"{_factors(sizes)} to {product}, but {found}. Sizes must multiply to {total}: give one axis -1 to infer it. "
        f"{advice}"
    )


def _view(name: str, view: "View", layouts: dict[str, Layout], problems: list[str]) -> Sizes:
    """Add the axes of a view to the layouts and return its sizes with -1 filled in."""
    spanned = _joined(f"view {name!r}", view.over, layouts, problems)
    if spanned is None:
        return ()
    over = " x ".join(view.over)
    found = f"view {name!r} is over {over}, which has {counted(spanned.size, 'position')}"
    sizes = _sizes(view.sizes, spanned.size, found, problems)
    axes = refactored(spanned, [size for _, size in sizes]) if sizes else []
    if axes is None:
        cut = ", ".join(f"{axis}={layouts[axis].size}" for axis in view.over)
        problems.append(
            f"view {name!r}: {_factors(dict(sizes))} to {spanned.size} over {over}, but they cut its axes ({cut}) at "
            f"places that do not divide. Products of the sizes, counted from the innermost, must divide or be "
            f"multiples of products of the axes, counted from the innermost."
        )
        return ()
    layouts.update(zip((axis for axis, _ in sizes), axes, strict=True))
    return sizes


def _joined(what: str, members: Sequence[str], layouts: dict[str, Layout], problems: list[str]) -> Layout | None:
    """Join the layouts of axes declared so far, or add what is wrong to the problems."""
    unknown = [name for name in members if name not in layouts]
    for name in unknown:
        problems.append(
            f"{what} names the axis {name!r}, which is not declared (before it). "
            f"Axes: {listed(layouts)}.{did_you_mean(name, layouts)}"
        )
    if unknown:
        return None
    found = [layouts[name] for name in members]
    for later, layout in enumerate(found):
        for earlier in range(later):
            if overlap(found[earlier], layout):
                problems.append(f"{what} names {members[earlier]!r} and {members[later]!r}, which share ranks.")
                return None
    return Layout.joined(found)
