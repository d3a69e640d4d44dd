"""Does a spec fit a world? Infer -1, check everything, and say every problem at once.

What is declared is in `spec`, the algebra in `layout`, the answers about ranks in `topology`.
"""

import operator
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from dualmesh.errors import ArgumentError, SpecError, counted, did_you_mean, listed
from dualmesh.topology.layout import Layout, clash, cuts, divisors, overlap, refactor, row_major, spans

if TYPE_CHECKING:
    from dualmesh.topology.spec import TopologySpec, View

ROLES = ("data", "params", "loss", "sequence", "replicate", "stages")

VIEW_ROLES = ("experts", "params", "replicate")

TOKEN_ROLES = ("data", "sequence", "loss")
"""Along their axes ranks have different tokens."""

SUMMED_ROLES = ("params", "replicate")
"""Over their axes wrappers sum gradients, all together."""

STAGED = (
    "role 'stages' names {stage!r}, which shares ranks with {axis!r} ({role}). Stages hold different layers and see "
    "the same tokens: along them no tokens differ, and nothing is sharded, kept in copies or dealt out as experts. "
    "Take one of the two out of its role."
)

Sizes = tuple[tuple[str, int], ...]

_SHOWN = 50
"""Problems written in one message; `problems` of the error has all of them."""

_COMPARED = 1000
"""Names up to which a wrong one is answered with the closest: comparing it with ten thousand takes a second."""


class Fit(NamedTuple):
    """A spec's sizes with -1 filled in, and the digits of every axis: base, views, combined, then "world"."""

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
    fitting = _Fitting()
    fitting.check_names(spec)
    offset = fitting.offset(spec.rank_offset)
    base = fitting.base(spec.base, world_size)
    waiting = fitting.combine(spec.combinations, finally_=False)
    views = {name: fitting.view(name, view) for name, view in spec.named_views}
    fitting.combine(waiting, finally_=True)
    fitting.world([name for name, _ in spec.base])
    fitting.check_roles(spec.parts)
    fitting.check_view_roles(spec.named_views)
    fitting.check_tokens(spec.roles, spec.named_views)
    fitting.check_stages(spec.roles, spec.named_views)
    refuse("Topology", fitting.problems)
    order = [name for name, _ in base]
    order += [axis for sizes in views.values() for axis, _ in sizes]
    order += [name for name, _ in spec.combinations]
    layouts = {name: layout for name in [*order, "world"] if (layout := fitting.layouts[name]) is not None}
    return Fit(base, views, offset, layouts)


def refuse(where: str, problems: Sequence[str], **values: Any) -> None:
    """Raise all problems as one error; without any, do nothing. *Pure.*

    Raises:
        SpecError: There are problems; `problems` has them all.
    """
    if not problems:
        return
    text = problems[0]
    if len(problems) > 1:
        shown = [*problems[:_SHOWN]]
        shown += [f"and {len(problems) - _SHOWN} more; the error's `problems` has all."] if problems[_SHOWN:] else []
        text = f"{len(problems)} problems.\n" + "\n".join(f"  - {problem}" for problem in shown)
    raise SpecError(f"{where}: {text}", problems=tuple(problems), **values)


class _Fitting:
    """What is known so far while a spec is fitted: problems found, and layouts (None: the axis has a problem)."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.layouts: dict[str, Layout | None] = {}

    # -- names and plain values ------------------------------------------------------------------------------------

    def check_names(self, spec: "TopologySpec") -> None:
        if not spec.base:
            self.problems.append("no axes are declared. Name at least one, for example {'dp': -1}.")
        kinds = [("axis", name) for name, _ in spec.base]
        kinds += [(f"axis of view {view!r}", name) for view, axes in spec.named_views for name, _ in axes.sizes]
        kinds += [("combined axis", name) for name, _ in spec.combinations]
        seen: dict[object, str] = {}
        for kind, name in kinds:
            if not isinstance(name, str) or not name:
                self.problems.append(f"{kind} {name!r} is no name. Names are non-empty strings.")
            elif not name.isprintable():
                self.problems.append(f"{kind} {name!r} has characters that cannot be printed. Rename it.")
            elif name in seen:
                self.problems.append(f"the name {name!r} is taken twice ({seen[name]} and {kind}). Rename one.")
            elif name == "world" and kind != "combined axis":
                self.problems.append(f"{kind} 'world': the name is kept for all ranks. Rename that axis.")
            seen.setdefault(name, kind)

    def offset(self, value: Any) -> int:
        number = whole(value)
        if number is None or number < 0:
            self.problems.append(f"rank_offset is {value!r}. It must be an integer of at least 0.")
        return number or 0

    def check_roles(self, parts: Sequence[tuple[str, tuple[str, ...]]]) -> None:
        for part, members in parts:
            if part not in ROLES:
                self.problems.append(f"role {part!r} is unknown. Roles: {listed(ROLES)}.{did_you_mean(part, ROLES)}")
            self._joined(f"role {part!r}", members)

    def check_view_roles(self, views: Sequence[tuple[str, "View"]]) -> None:
        for name, view in views:
            for part, members in view.parts:
                what = f"role {part!r} of view {name!r}"
                if part not in VIEW_ROLES:
                    hint = did_you_mean(part, VIEW_ROLES)
                    self.problems.append(f"{what} is unknown. Roles of a view: {listed(VIEW_ROLES)}.{hint}")
                self._joined(what, members)
                foreign = [axis for axis in members if axis not in view.axes]
                if foreign and part in ("experts", "params"):
                    self.problems.append(
                        f"{what} names {listed(map(repr, foreign))}, no axis of that view. Axes: {listed(view.axes)}."
                    )

    def check_tokens(self, roles: Mapping[str, tuple[str, ...]], views: Sequence[tuple[str, "View"]]) -> None:
        """Refuse roles by which gradients would not be summed over exactly the tokens that differ."""
        if self.problems:
            return
        tokens = [(part, name) for part in TOKEN_ROLES for name in roles.get(part, ())]
        summed = [(part, name) for part in SUMMED_ROLES for name in roles.get(part, ())]
        if "loss" in roles:
            self.problems += [
                f"tokens differ along {name!r} (role {part!r}), but role 'loss' leaves it out, so they would not be "
                f"counted. Add {name!r} to it, now {roles['loss']!r}, or take it out of role {part!r}."
                for part, name in self._uncovered(tokens, roles["loss"])
            ]
        if "params" in roles:
            over = [name for _, name in summed]
            self.problems += [
                f"tokens differ along {name!r} (role {part!r}), but no gradient is summed over it: it is in neither "
                f"role 'params', {roles['params']!r}, nor role 'replicate', {roles.get('replicate', ())!r}. Add it to "
                f"'params' where parameters are sharded over it, else to 'replicate'."
                for part, name in self._uncovered(tokens, over)
            ]
            if "loss" in roles:
                self.problems += [
                    f"gradients are summed over {name!r} (role {part!r}), along which no tokens differ: it is not in "
                    f"role 'loss', {roles['loss']!r}, so each would count {self._size(name)} times. Add it there, or "
                    f"take it out of role {part!r}."
                    for part, name in self._uncovered(summed, roles["loss"])
                ]
        self._check_views(tokens, roles, views)

    def _check_views(
        self,
        tokens: Sequence[tuple[str, str]],
        roles: Mapping[str, tuple[str, ...]],
        views: Sequence[tuple[str, "View"]],
    ) -> None:
        kept = roles.get("replicate", ())
        for name, view in views:
            own = view.roles
            if "params" not in own or self.problems:
                continue
            # Experts may be cut by several views that cross, one inside the pipeline and one outside.
            beside = [axis for _, other in views if other.parts for axis in other.over]
            over = [*view.over, *beside, *kept, *own.get("replicate", ())]
            self.problems += [
                f"tokens differ along {axis!r} (role {part!r}), but view {name!r}, whose parameters are sharded over "
                f"{listed(own['params'])}, neither spans it nor has copies along it, so none of their gradients is "
                f"summed over it. Lay the view over it too, now {view.over!r}, or name it in its role 'replicate'."
                for part, axis in self._uncovered(tokens, over)
            ]

    def check_stages(self, roles: Mapping[str, tuple[str, ...]], views: Sequence[tuple[str, "View"]]) -> None:
        """Refuse pipeline stages that share ranks with an axis of a role which stages cannot have."""
        if self.problems:
            return
        others = [(f"role {part!r}", name) for part in (*TOKEN_ROLES, *SUMMED_ROLES) for name in roles.get(part, ())]
        others += [
            (f"role {part!r} of view {view!r}", name)
            for view, one in views
            for part, members in one.parts
            for name in members
        ]
        self.problems += [
            STAGED.format(stage=stage, axis=axis, role=role)
            for stage in roles.get("stages", ())
            for role, axis in others
            if (own := self.layouts.get(stage)) is not None
            and (other := self.layouts.get(axis)) is not None
            and overlap(own, other)
        ]

    def _uncovered(self, named: Sequence[tuple[str, str]], over: Sequence[str]) -> list[tuple[str, str]]:
        """Return the (role, axis) whose ranks some axes do not join."""
        whole = [layout for name in over if (layout := self.layouts.get(name)) is not None]
        return [
            (part, name)
            for part, name in named
            if (layout := self.layouts.get(name)) is not None and not spans(whole, layout)
        ]

    def _size(self, name: str) -> int:
        layout = self.layouts.get(name)
        return 1 if layout is None else layout.size

    # -- axes ------------------------------------------------------------------------------------------------------

    def base(self, pairs: Sequence[tuple[str, Any]], world_size: int) -> Sizes:
        sizes = self._sizes(pairs, world_size, f"the world has {counted(world_size, 'rank')}", "")
        layouts = row_major([size for _, size in sizes]) if sizes else [None] * len(pairs)
        self.layouts.update(zip((name for name, _ in pairs), layouts, strict=True))
        return sizes

    def view(self, name: str, view: "View") -> Sizes:
        if not view.sizes:
            self.problems.append(
                f"view {name!r} has no axes. Name at least one, for example {{'ep_fsdp': -1, 'ep': 2}}."
            )
        spanned = self._joined(f"view {name!r}", view.over)
        over = " x ".join(map(str, view.over))
        total = spanned.size if spanned else None
        found = f"view {name!r} is over {over}, which has {counted(total or 0, 'position')}"
        sizes = self._sizes(view.sizes, total, found, f"view {name!r}: ")
        layouts = refactor(spanned, [size for _, size in sizes]) if spanned and sizes else None
        if spanned and sizes and layouts is None:
            self.problems.append(_cut_problem(name, over, spanned, sizes))
        self.layouts.update({axis: None for axis, _ in view.sizes})
        self.layouts.update(zip((axis for axis, _ in sizes), layouts or (), strict=False))
        return sizes

    def combine(
        self, combinations: Sequence[tuple[str, tuple[str, ...]]], *, finally_: bool
    ) -> list[tuple[str, tuple[str, ...]]]:
        """Join combined axes; before the views are known, those that name something unknown wait."""
        waiting = []
        for name, members in combinations:
            if finally_ or all(isinstance(member, str) and member in self.layouts for member in members):
                self.layouts[name] = self._joined(f"combined axis {name!r}", members)
            else:
                waiting.append((name, members))
        return waiting

    def world(self, base_axes: Sequence[str]) -> None:
        known = [layout for name in base_axes if (layout := self.layouts.get(name)) is not None]
        everything = Layout.joined(known)
        declared = self.layouts.setdefault("world", everything)
        if len(known) == len(base_axes) and declared not in (None, everything):
            self.problems.append(
                f"combined axis 'world' is not all axes in their order, which is what the name is kept for. Leave it "
                f"out, or rename it. Axes: {listed(base_axes)}."
            )

    # -- what they are made of -------------------------------------------------------------------------------------

    def _sizes(self, pairs: Sequence[tuple[str, Any]], total: int | None, found: str, where: str) -> Sizes:
        """Fill in -1 so that the sizes multiply to `total` (None: not known, check the values alone)."""
        sizes = [(name, whole(size)) for name, size in pairs]
        wrong = [(name, size) for (name, number), (_, size) in zip(sizes, pairs, strict=True) if not _is_size(number)]
        self.problems += [
            f"{where}{name}={size!r} is no size. Sizes are positive integers, or one -1 to infer."
            for name, size in wrong
        ]
        open_axes = [name for name, size in sizes if size == -1]
        if len(open_axes) > 1:
            self.problems.append(
                f"{where}{listed(open_axes)} are all -1. Only one axis can be inferred: give the others a size."
            )
        if wrong or len(open_axes) > 1 or not pairs or total is None:
            return ()
        known = tuple((name, size) for name, size in sizes if size is not None and size != -1)
        product = prod(size for _, size in known)
        if not open_axes and product != total:
            self.problems.append(_product_problem(known, product, total, found))
            return ()
        if open_axes and total % product:
            self.problems.append(
                f"{_factors(known)} to {product}, which does not divide: {found}. {open_axes[0]}=-1 needs the others "
                f"to multiply to a divisor of {total}: {listed(divisors(total))}."
            )
            return ()
        return tuple((name, total // product if size == -1 or size is None else size) for name, size in sizes)

    def _joined(self, what: str, members: Sequence[str]) -> Layout | None:
        """Join the layouts of axes declared so far, or add what is wrong to the problems."""
        unknown = [name for name in members if not isinstance(name, str) or name not in self.layouts]
        if unknown:
            are = "axis" if len(unknown) == 1 else "axes"
            self.problems.append(
                f"{what} names the {are} {listed(map(repr, unknown))}, not declared (before it). "
                f"Axes: {listed(self.layouts)}.{self._hint(unknown[0])}"
            )
            return None
        layouts = [layout for name in members if (layout := self.layouts[name]) is not None]
        if len(layouts) < len(members):
            return None
        clashing = clash(layouts)
        if clashing is not None:
            first, second = (members[place] for place in clashing)
            self.problems.append(f"{what} names {first!r} and {second!r}, which share ranks. Name axes that cross.")
            return None
        return Layout.joined(layouts)

    def _hint(self, name: object) -> str:
        return did_you_mean(name, self.layouts) if len(self.layouts) <= _COMPARED else ""


def _is_size(number: int | None) -> bool:
    return number is not None and (number >= 1 or number == -1)


def _factors(sizes: Sizes) -> str:
    verb = "multiplies" if len(sizes) == 1 else "multiply"
    return f"{listed(f'{name}={size}' for name, size in sizes)} {verb}" if sizes else "no sizes multiply"


def _product_problem(sizes: Sizes, product: int, total: int, found: str) -> str:
    fits = [f"{name}={total * size // product}" for name, size in sizes if total * size % product == 0]
    advice = f"What would fit, one changed: {listed(fits)}." if fits else "No single axis can be changed to fit."
    return (
        f"{_factors(sizes)} to {product}, but {found}. Sizes must multiply to {total}: give one axis -1 to infer it. "
        f"{advice}"
    )


def _cut_problem(name: str, over: str, spanned: Layout, sizes: Sizes) -> str:
    allowed = cuts(spanned)
    ends = list(
        zip(
            (axis for axis, _ in reversed(sizes)),
            accumulate((size for _, size in reversed(sizes)), operator.mul),
            strict=True,
        )
    )
    axis, end = next((axis, end) for axis, end in ends if end not in allowed)
    grid = " x ".join(str(digit.size) for digit in spanned.digits)
    return (
        f"view {name!r}: {_factors(sizes)} to {spanned.size} over {over}, but {axis}={dict(sizes)[axis]} ends at "
        f"{end}, where the ranks ({grid}) cannot be cut. Sizes multiplied from the innermost must each give one of: "
        f"{listed(allowed)}."
    )
