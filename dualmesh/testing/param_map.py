"""`ParamMap`: whose parameter is whose, between two programs with different parameter trees.

What happens to the arrays is in `transforms`; comparing two programs is in `ports`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dualmesh.errors import ArgumentError, did_you_mean, listed
from dualmesh.testing.transforms import Transform, same

Names = tuple[str, ...]


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
            arrays. A `*` on one side only stands for all numbers there, in order: for `transforms.stack`.

    >>> from dualmesh.testing import transforms
    >>> names = ParamMap([("layers.*.up.weight", "layers_*.up.kernel", transforms.transpose())])
    >>> names.to_jax({"layers.0.up.weight": np.ones((2, 3))})["layers_0.up.kernel"].shape
    (3, 2)
    """

    def __init__(self, rules: Iterable[Sequence[Any]]) -> None:
        self.rules = tuple(_rule(tuple(rule)) for rule in rules)

    def to_jax(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Return the JAX program's arrays by name, for parameters or gradients of the torch program. *Pure.*

        Raises:
            ArgumentError: Once, with all that is left over, missing, or meant twice.
        """
        return {name: array for name, (array, _) in _moved("to_jax", self.rules, tree).items()}

    def to_torch(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Return the torch program's arrays by name, for those of the JAX program. *Pure.* Raises as `to_jax`."""
        rules = [rule.turned() for rule in self.rules]
        return {name: array for name, (array, _) in _moved("to_torch", rules, tree).items()}

    def torch_sources(self, tree: Mapping[str, Any]) -> dict[str, Names]:
        """Return {torch name: the JAX names that it comes from}, for those of the JAX program. *Pure.*"""
        rules = [rule.turned() for rule in self.rules]
        return {name: sources for name, (_, sources) in _moved("to_torch", rules, tree).items()}


def _rule(rule: tuple[Any, ...]) -> Rule:
    if len(rule) not in (2, 3) or (len(rule) == 3 and not isinstance(rule[2], Transform)):
        raise ArgumentError(
            f"ParamMap: {rule!r} is no rule. Give (torch names, JAX names, transform), the transform from "
            f"dualmesh.testing.transforms or left out.",
            rule=rule,
        )
    sources, targets = ((side,) if isinstance(side, str) else tuple(side) for side in rule[:2])
    stars = {name.count("*") for name in (*sources, *targets)}
    if len(stars) > 1 and stars != {0, 1}:
        raise ArgumentError(
            f"ParamMap: {rule[:2]!r}: the names have {listed(sorted(stars))} stars. Give as many in each."
        )
    return Rule(sources, targets, rule[2] if len(rule) == 3 else same())


def _moved(where: str, rules: Sequence[Rule], tree: Mapping[str, Any]) -> dict[str, tuple[Any, Names]]:
    found: dict[str, tuple[Any, Names]] = {}
    used: dict[str, Rule] = {}
    problems: list[str] = []
    for rule in rules:
        groups = _groups(rule, tree)
        if not groups:
            problems.append(f"{listed(rule.sources)}: no parameter has this name{did_you_mean(rule.sources[0], tree)}")
        for sources, targets in groups:
            missing = [name for name in sources if name not in tree]
            if missing:
                problems.append(f"{missing[0]} is missing, which goes with {listed(set(sources) - set(missing))}")
                continue
            problems += [f"{name} is taken by two rules" for name in sources if name in used]
            used |= dict.fromkeys(sources, rule)
            arrays = rule.transform.forward([tree[name] for name in sources])
            names = targets if "*" not in targets[0] else _numbered(targets, len(arrays))
            if len(names) != len(arrays):
                problems.append(f"{listed(sources)}: the transform gives {len(arrays)} arrays for {listed(names)}")
            problems += [f"{name} is made by two rules" for name in names if name in found]
            found |= {name: (array, sources) for name, array in zip(names, arrays, strict=False)}
    left = [name for name in tree if name not in used]
    problems += [f"no rule takes {listed(left)}"] if left else []
    if problems:
        raise ArgumentError(f"ParamMap.{where}: {'; '.join(problems)}.", problems=problems, left_over=left)
    return found


def _groups(rule: Rule, tree: Mapping[str, Any]) -> list[tuple[Names, Names]]:
    """Return which names belong together: their sources, and their targets ; a star where arrays number them."""
    starred = next((name for name in rule.sources if "*" in name), None)
    if starred is None:
        return [(rule.sources, rule.targets)] if any(name in tree for name in rule.sources) else []
    texts = _texts(rule.sources, tree)
    if any("*" in name for name in rule.targets):
        return [(_filled(rule.sources, text), _filled(rule.targets, text)) for text in texts]
    sources = tuple(name for pattern in rule.sources for text in texts for name in _filled((pattern,), text))
    return [(sources, rule.targets)] if texts else []


def _texts(patterns: Names, tree: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return what the stars stand for, in the order of the numbers in it."""
    found: dict[tuple[str, ...], None] = {}
    for pattern in patterns:
        expression = re.compile("([^.]+)".join(re.escape(part) for part in pattern.split("*")) + r"\Z")
        found |= dict.fromkeys(match.groups() for name in tree if (match := expression.match(name)))
    return sorted(found, key=lambda texts: [(int(text), "") if text.isdigit() else (-1, text) for text in texts])


def _filled(patterns: Names, texts: tuple[str, ...]) -> Names:
    filled = []
    for pattern in patterns:
        parts = pattern.split("*")
        filled.append("".join(part + text for part, text in zip(parts, (*texts, ""), strict=True)))
    return tuple(filled)


def _numbered(patterns: Names, count: int) -> Names:
    return tuple(name for i in range(count // len(patterns)) for name in _filled(patterns, (str(i),)))
