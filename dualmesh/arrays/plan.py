"""`ShardingPlan`: which spec every parameter of a model gets, said once for all topologies and both frameworks.

What a spec means is in `partition_spec`, whether it fits in `plan_report`; what a state makes of the specs in
`models`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from dualmesh._support.checks import check_items
from dualmesh._support.plain_data import read_pairs, write_pairs
from dualmesh.arrays.models import ModelPlan
from dualmesh.errors import ShardingError, did_you_mean, listed
from dualmesh.sharding.logical_axes import Names, Rules, names_in, rules_of, spec_by_rules
from dualmesh.sharding.param_paths import Pattern, path_of, with_paths
from dualmesh.sharding.partition_spec import P, is_spec, local_shape
from dualmesh.sharding.plan_report import Report, fit_problems
from dualmesh.sharding.tree import mapped
from dualmesh.topology.topology import Topology

Path = str | Iterable[object]
Choice = P | Names
"""Axes per dim, or logical names per dim."""


class Parameter(NamedTuple):
    """What a plan needs to know of one array."""

    path: str
    shape: tuple[int, ...]
    names: Names | None = None


class _Chosen(NamedTuple):
    spec: P
    origin: str


@dataclass(frozen=True, init=False, repr=False)
class ShardingPlan(ModelPlan):
    """Patterns over parameter paths and the spec each gives; a value, frozen and hashable.

    Paths are keys joined by dots, as `named_parameters()` of torch and key paths of JAX have them. `*` is one segment
    or a part of one, `**` any number of segments. The first pattern that matches counts, so list exceptions first.

    Args:
        patterns: {pattern: dm.P(...)}, the axes of each dim; or {pattern: ("embed", "heads")}, the logical name of
            each dim (or None), for the rules to translate.
        rules: {logical name: axis, tuple of axes or None}, or pairs in order of precedence, in which a name may
            have several: the semantics of flax's `logical_to_mesh_axes`. In an array an axis is used once: by the
            first rule that still fits; a dim whose name no rule fits stays whole.
        default: The spec (or names) of parameters that no pattern matches; None: they are an error. Scalars need no
            pattern.

    >>> import numpy as np
    >>> plan = ShardingPlan({"layers.*.attn.wq": P("tp", "dp_shard_sp"), "**.norm": P()})
    >>> plan.specs({"layers.0.attn.wq": np.ones((8, 4)), "layers.0.norm": np.ones(4)})
    {'layers.0.attn.wq': P('tp', 'dp_shard_sp'), 'layers.0.norm': P()}
    """

    patterns: tuple[tuple[str, Choice], ...]
    rules: Rules
    default: Choice | None

    def __init__(self, patterns: Any, rules: Any = None, default: Any = None) -> None:
        where = "ShardingPlan"
        pairs = patterns.items() if isinstance(patterns, Mapping) else check_items(where, "patterns", patterns)
        wrong = [pair for pair in pairs if not isinstance(pair, tuple) or len(pair) != 2]
        if wrong:
            raise ShardingError(f"{where}: {wrong[0]!r} is no (pattern, spec) pair. Give {{pattern: spec}}.", plan=self)
        chosen = tuple((Pattern(text).text, _choice(f"pattern {text!r}", value)) for text, value in pairs)
        object.__setattr__(self, "patterns", chosen)
        object.__setattr__(self, "rules", rules_of(rules))
        object.__setattr__(self, "default", None if default is None else _choice("default", default))
        texts = [text for text, _ in chosen]
        repeated = [text for text in texts if texts.count(text) > 1]
        if repeated:
            raise ShardingError(f"ShardingPlan: pattern {repeated[0]!r} is listed twice. List it once.", plan=self)
        named = [text for text, value in (*chosen, ("default", self.default)) if isinstance(value, tuple)]
        if named and not self.rules:
            raise ShardingError(
                f"ShardingPlan: {named[0]!r} gives logical names, but there are no rules to translate them. Give "
                f"rules={{name: axis}}, or the axes themselves: dm.P('axis', ...).",
                plan=self,
            )

    @cached_property
    def _matchers(self) -> tuple[Pattern, ...]:
        return tuple(Pattern(text) for text, _ in self.patterns)

    # -- what a parameter gets -------------------------------------------------------------------------------------

    def spec_of(
        self, path: Path, shape: Sequence[int], topology: Topology | None = None, names: Names | None = None
    ) -> P:
        """Return the spec of one parameter. *Pure.*

        Args:
            path: Its dotted path, or its keys.
            shape: Its global shape.
            topology: Where given, the spec is checked against it.
            names: The logical names of its dims, where the model says them; a pattern that matches goes first.

        Raises:
            ShardingError: It has no spec, or one that does not fit.
        """
        report = Report()
        parameter = _parameter((path, shape, names))
        chosen = self._checked(parameter, topology, report)
        report.refuse()
        return chosen.spec

    def resolve(self, parameters: Iterable[Any], topology: Topology | None = None) -> dict[str, P]:
        """Return {path: spec} of a whole model, from (path, shape) or (path, shape, logical names). *Pure.*

        Args:
            parameters: One tuple per array; a path is a dotted string or an iterable of keys.
            topology: Where given, every spec is checked against it.

        Raises:
            ShardingError: Once, with everything that is wrong in `problems`: patterns that matched nothing,
                parameters without a spec, too many entries, unknown axes, axes that share ranks, sizes that do not
                divide.
        """
        report = Report()
        found = [_parameter(parameter) for parameter in parameters]
        specs: dict[str, P] = {}
        for parameter in found:
            if parameter.path in specs:
                report.add("two arrays have the same path", parameter.path)
            specs[parameter.path] = self._checked(parameter, topology, report).spec
        self._report_unused([parameter.path for parameter in found], report)
        report.refuse()
        return specs

    def specs(
        self, tree: Any, topology: Topology | None = None, *, names: Mapping[str, Sequence[str | None]] | None = None
    ) -> Any:
        """Return a tree like `tree` with the spec of every leaf. *Pure.*

        Args:
            tree: Nested dicts, lists, tuples of arrays (or of anything with a shape), or a dict of dotted names.
            topology: Where given, every spec is checked against it.
            names: {path: logical names of its dims} for arrays that no pattern matches.

        Raises: as `resolve`; also for leaves that are no arrays.
        """
        specs = self.resolve(_parameters(tree, names or {}), topology)
        paths = iter([path for path, _ in with_paths(tree)])
        return mapped(lambda _leaf: specs[next(paths)], tree)

    def table(self, tree: Any, topology: Topology, *, names: Mapping[str, Sequence[str | None]] | None = None) -> str:
        """Return a text table of path, shape, spec and the shape of one rank's part, a line per parameter. *Pure.*

        Raises: as `specs`.
        """
        parameters = list(_parameters(tree, names or {}))
        specs = self.resolve(parameters, topology)
        rows = [("path", "shape", "spec", "per rank")]
        for path, shape, _ in parameters:
            rows.append((path, str(shape), repr(specs[path]), str(local_shape(topology, specs[path], shape))))
        return _align_columns(rows)

    def _checked(self, parameter: Parameter, topology: Topology | None, report: Report) -> _Chosen:
        chosen = self._chosen(parameter, topology, report)
        for problem in fit_problems(topology, chosen.spec, parameter.shape):
            report.add(f"{chosen.origin} gives {chosen.spec!r}: {problem}", parameter.path)
        return chosen

    def _chosen(self, parameter: Parameter, topology: Topology | None, report: Report) -> _Chosen:
        path, shape, names = parameter
        for matcher, (text, choice) in zip(self._matchers, self.patterns, strict=True):
            if matcher.matches(path):
                return self._translated(choice, f"pattern {text!r}", topology)
        if names is not None and self.rules:
            return self._translated(names, "the model", topology)
        if shape and self.default is not None:
            return self._translated(self.default, "the default", topology)
        if names is not None and shape:
            report.add(f"the model gives the logical names {names!r}, but the plan has no rules", path)
        elif shape:
            report.add("no pattern matches, and the plan has no default", path)
        return _Chosen(P(), "nothing")

    def _translated(self, choice: Choice, origin: str, topology: Topology | None) -> _Chosen:
        if isinstance(choice, P):
            return _Chosen(choice, origin)
        return _Chosen(spec_by_rules(choice, self.rules, topology), f"{origin} with names {choice!r}")

    def _report_unused(self, paths: Sequence[str], report: Report) -> None:
        first = {next((i for i, matcher in enumerate(self._matchers) if matcher.matches(path)), None) for path in paths}
        for place, matcher in enumerate(self._matchers):
            if place in first:
                continue
            taken = next((path for path in paths if matcher.matches(path)), None)
            if taken is None:
                report.add(f"pattern {matcher.text!r} matches nothing.{did_you_mean(matcher.text, paths)}")
            else:
                earlier = next(other.text for other in self._matchers if other.matches(taken))
                report.add(
                    f"pattern {matcher.text!r} gets nothing: the first match counts, and {earlier!r} is listed before "
                    f"it. List it first",
                    taken,
                )

    # -- as data and text ------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data for YAML, TOML or JSON. *Pure.*"""
        data: dict[str, Any] = {"patterns": write_pairs(self.patterns, _plain)}
        if self.rules:
            data["rules"] = [[name, list(entry) if isinstance(entry, tuple) else entry] for name, entry in self.rules]
        if self.default is not None:
            data["default"] = _plain(self.default)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ShardingPlan":
        """Build a plan from what `to_dict` returns. *Pure.*

        A list is the axes of each dim, `{"names": [...]}` their logical names. Of patterns and rules the first that
        matches counts: they are lists of pairs, or mappings unless their keys are sorted, which is what tools make of
        any order.

        Raises:
            ShardingError: A key is unknown, there are no patterns, or their order cannot be known.
        """
        known = ("patterns", "rules", "default")
        unknown = [key for key in data if key not in known]
        if unknown or "patterns" not in data:
            key = repr(unknown[0]) + " is unknown" if unknown else "'patterns' is missing"
            raise ShardingError(f"ShardingPlan.from_dict: {key}. Keys: {listed(known)}.", data=data)
        default = data.get("default")
        where, rules = "ShardingPlan.from_dict", data.get("rules")
        pairs = read_pairs(where, "patterns", data["patterns"], ShardingError)
        if isinstance(rules, Mapping):
            rules = read_pairs(where, "rules", rules, ShardingError)
        patterns = tuple((text, _from_plain(value)) for text, value in pairs)
        return cls(patterns, rules, None if default is None else _from_plain(default))

    def __repr__(self) -> str:
        parts = [repr(dict(self.patterns))]
        parts += [f"rules={self.rules!r}"] if self.rules else []
        parts += [f"default={self.default!r}"] if self.default is not None else []
        return f"ShardingPlan({', '.join(parts)})"

    def __str__(self) -> str:
        rows = [("pattern", "gets"), *((text, repr(choice)) for text, choice in self.patterns)]
        rows += [] if self.default is None else [("(no pattern)", repr(self.default))]
        rows += [("", ""), ("rule", "axes"), *((name, repr(entry)) for name, entry in self.rules)] if self.rules else []
        return _align_columns(rows)


def _choice(where: str, value: Any) -> Choice:
    if isinstance(value, tuple | list) and not is_spec(value):
        return names_in(value)
    spec = P.of(value)
    if spec.partial:
        raise ShardingError(
            f"ShardingPlan: {where} gives {spec!r}. A parameter is whole in value: leave `partial` out.", spec=spec
        )
    return spec


def _parameter(parameter: Any) -> Parameter:
    path, shape, *names = parameter
    named = names[0] if names else None
    return Parameter(path_of(path), tuple(shape), None if named is None else names_in(named))


def _parameters(tree: Any, names: Mapping[str, Sequence[str | None]]) -> Iterator[Parameter]:
    report = Report()
    for path, leaf in with_paths(tree):
        shape = () if isinstance(leaf, bool | int | float | complex) else getattr(leaf, "shape", None)
        if shape is None:
            report.add(f"a {type(leaf).__name__} is no array: it has no shape. Leave it out of the tree", path)
        else:
            yield _parameter((path, shape, names.get(path)))
    report.refuse()


def _plain(choice: Choice) -> Any:
    if isinstance(choice, P):
        return [list(entry) if isinstance(entry, tuple) else entry for entry in choice.entries]
    return {"names": list(choice)}


def _from_plain(value: Any) -> Choice:
    return names_in(value["names"]) if isinstance(value, Mapping) else P(*value)


def _align_columns(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)
