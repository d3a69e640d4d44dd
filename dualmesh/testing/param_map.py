"""`ParamMap`: whose parameter is whose, between two programs with different parameter trees.

What happens to the arrays is in `transforms`; comparing two programs is in `ports`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dualmesh._support.checks import check_items
from dualmesh._support.optional_imports import np
from dualmesh.errors import ArgumentError, ShapeError, did_you_mean, listed
from dualmesh.testing.transforms import Transform, same

Names = tuple[str, ...]
Texts = tuple[str, ...]
"""What the stars of a name stand for."""


@dataclass(frozen=True)
class Rule:
    """Names on one side, names on the other, and what turns the arrays of the first into those of the second."""

    sources: Names
    targets: Names
    transform: Transform

    def turned(self) -> "Rule":
        """Return the rule for the way back. *Pure.*"""
        return Rule(self.targets, self.sources, self.transform.inverse())


class ParamMap:
    """A bijection between the parameters of a torch program and those of a JAX program.

    Args:
        rules: (torch names, JAX names, transform) each; the transform may be left out. A name is a dotted path in which
            `*` stands for one segment or a part of one, the same text on both sides, or a tuple of such names: several
            arrays. A `*` on one side only stands for the numbers 0, 1, 2, ... there: for `transforms.stack`, which gets
            all arrays of the first name, then all of the second.

    Both ways are checked each time: names that would not come back as they went are refused.

    >>> from dualmesh.testing import transforms
    >>> names = ParamMap([("layers.*.up.weight", "layers_*.up.kernel", transforms.transpose())])
    >>> names.to_jax({"layers.0.up.weight": np.ones((2, 3))})["layers_0.up.kernel"].shape
    (3, 2)
    """

    def __init__(self, rules: Iterable[Sequence[Any]]) -> None:
        listed_rules = check_items("ParamMap", "rules", rules)
        self.rules = tuple(_rule(check_items("ParamMap", "a rule", rule)) for rule in listed_rules)

    def to_jax(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Return the JAX program's arrays by name, for parameters or gradients of the torch program. *Pure.*

        Raises:
            ArgumentError: Once, with all that is left over, missing, or meant twice.
        """
        return {name: array for name, (array, _) in _Move("to_jax", self.rules, tree).ended().items()}

    def to_torch(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Return the torch program's arrays by name, for those of the JAX program. *Pure.* Raises as `to_jax`."""
        rules = [rule.turned() for rule in self.rules]
        return {name: array for name, (array, _) in _Move("to_torch", rules, tree).ended().items()}

    def torch_sources(self, tree: Mapping[str, Any]) -> dict[str, Names]:
        """Return {torch name: the JAX names that it comes from}, for those of the JAX program. *Pure.*"""
        rules = [rule.turned() for rule in self.rules]
        return {name: sources for name, (_, sources) in _Move("to_torch", rules, tree).ended().items()}


def _rule(rule: tuple[Any, ...]) -> Rule:
    if len(rule) not in (2, 3) or (len(rule) == 3 and not isinstance(rule[2], Transform)):
        raise ArgumentError(
            f"ParamMap: {rule!r} is no rule. Give (torch names, JAX names, transform), the transform from "
            f"dualmesh.testing.transforms or left out.",
            rule=rule,
        )
    sides = [(side,) if isinstance(side, str) else check_items("ParamMap", "names", side) for side in rule[:2]]
    if not all(side and all(isinstance(name, str) for name in side) for side in sides):
        raise ArgumentError(f"ParamMap: {rule[:2]!r}: each side is a name or some names. Give strings.", rule=rule)
    stars = [sorted({name.count("*") for name in side}) for side in sides]
    if any(len(counts) > 1 for counts in stars) or (stars[0] != stars[1] and sorted(stars) != [[0], [1]]):
        raise ArgumentError(
            f"ParamMap: {rule[:2]!r}: the names have {listed(stars[0])} and {listed(stars[1])} stars. Give as many in "
            f"each name; or one in each name of one side, and none on the other.",
            rule=rule,
        )
    sources, targets = sides
    return Rule(sources, targets, rule[2] if len(rule) == 3 else same())


class _Move:
    """One way through a map: what became of which arrays, and all that is wrong."""

    def __init__(self, where: str, rules: Sequence[Rule], tree: Mapping[str, Any]) -> None:
        self._where = where
        self._tree = {name: np.asarray(array) for name, array in tree.items()}
        self._found: dict[str, tuple[Any, Names]] = {}
        self._used: set[str] = set()
        self._problems: list[str] = []
        self._pairs: list[tuple[Rule, Names, Names]] = []
        for rule in rules:
            self._follow(rule)
        if not self._problems:
            for rule in rules:
                self._return(rule)

    def ended(self) -> dict[str, tuple[Any, Names]]:
        """Return {name: (array, the names that it comes from)}.

        Raises:
            ArgumentError: Something is left over, missing, meant twice, or would not come back.
        """
        left = [name for name in self._tree if name not in self._used]
        problems = [*self._problems, *([f"no rule takes {listed(left)}"] if left else [])]
        if problems:
            raise ArgumentError(f"ParamMap.{self._where}: {'; '.join(problems)}.", problems=problems, left_over=left)
        return self._found

    def _follow(self, rule: Rule) -> None:
        strange = _find_misnumbered(rule, self._tree)
        if strange:
            self._problems.append(
                f"{listed(rule.sources)}: a * on one side only stands for 0, 1, 2, ... without gaps, and found are "
                f"{listed(strange)}; name the arrays one by one"
            )
            return
        groups = list(_groups(rule, self._tree))
        if not groups:
            near = did_you_mean(rule.sources[0], self._tree)
            self._problems.append(f"{listed(rule.sources)}: no parameter has this name{near}")
        for sources, targets in groups:
            missing = [name for name in sources if name not in self._tree]
            if missing:
                known = [name for name in sources if name in self._tree]
                self._problems.append(f"{listed(missing)}: missing, and goes with {listed(known)}")
                continue
            taken = [name for place, name in enumerate(sources) if name in self._used or name in sources[:place]]
            self._problems += [f"{name} is taken twice" for name in taken]
            self._used |= set(sources)
            self._turn(rule, sources, targets)

    def _turn(self, rule: Rule, sources: Names, targets: Names) -> None:
        try:
            arrays = rule.transform.forward([self._tree[name] for name in sources])
        except ShapeError as error:
            self._problems.append(f"{listed(sources)}: {error}")
            return
        names = _number_names(targets, len(arrays)) if "*" in targets[0] else targets
        if len(names) != len(arrays):
            self._problems.append(f"{listed(sources)}: the transform gives {len(arrays)} arrays for {listed(names)}")
        made = [name for place, name in enumerate(names) if name in self._found or name in names[:place]]
        self._problems += [f"{name} is made twice" for name in made]
        self._found |= {name: (array, sources) for name, array in zip(names, arrays, strict=False)}
        self._pairs.append((rule, sources, names))

    def _return(self, rule: Rule) -> None:
        """Note where the names that were made are not those that the rule takes on the way back."""
        went = {names: sources for one, sources, names in self._pairs if one is rule}
        for names, patterns in _groups(rule.turned(), self._found):
            sources = went.pop(names, None)
            back = patterns if "*" not in patterns[0] else _number_names(patterns, len(sources or ()))
            if back != sources:
                came = "other names" if sources is None else listed(sources)
                self._problems.append(f"{listed(names)} would come back as {listed(back)}, but came from {came}")
        lost = went.items()
        self._problems += [f"{listed(sources)} would not come back from {listed(names)}" for names, sources in lost]


def _groups(rule: Rule, tree: Mapping[str, Any]) -> Iterator[tuple[Names, Names]]:
    """Yield which names belong together: their sources, and their targets; a star where arrays number them."""
    if "*" not in rule.sources[0]:
        if any(name in tree for name in rule.sources):
            yield rule.sources, rule.targets
        return
    texts = _texts(rule.sources, tree)
    if "*" in rule.targets[0]:
        yield from ((_fill_patterns(rule.sources, text), _fill_patterns(rule.targets, text)) for text in texts)
    elif texts:
        yield (
            tuple(name for pattern in rule.sources for text in texts for name in _fill_patterns((pattern,), text)),
            rule.targets,
        )


def _find_misnumbered(rule: Rule, tree: Mapping[str, Any]) -> list[str]:
    """Return what a star on the first side only stands for, where that is not 0, 1, 2, ..."""
    if "*" not in rule.sources[0] or "*" in rule.targets[0]:
        return []
    texts = [text for (text,) in _texts(rule.sources, tree)]
    return texts if texts != [str(number) for number in range(len(texts))] else []


def _texts(patterns: Names, tree: Mapping[str, Any]) -> list[Texts]:
    """Return what the stars stand for, in the order of the numbers in it."""
    found: dict[Texts, None] = {}
    for pattern in patterns:
        expression = re.compile("([^.]+)".join(re.escape(part) for part in pattern.split("*")) + r"\Z")
        found |= dict.fromkeys(match.groups() for name in tree if (match := expression.match(name)))
    return sorted(found, key=lambda texts: [(int(text), "") if text.isdecimal() else (-1, text) for text in texts])


def _fill_patterns(patterns: Names, texts: Texts) -> Names:
    filled = []
    for pattern in patterns:
        parts = pattern.split("*")
        filled.append("".join(part + text for part, text in zip(parts, (*texts, ""), strict=True)))
    return tuple(filled)


def _number_names(patterns: Names, count: int) -> Names:
    """Return the names of so many arrays: all numbers of the first pattern, then all of the second."""
    numbers = range(count // len(patterns))
    return tuple(
        name for pattern in patterns for number in numbers for name in _fill_patterns((pattern,), (str(number),))
    )
