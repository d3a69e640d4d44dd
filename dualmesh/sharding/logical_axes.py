"""Logical axis rules: from what a dim of an array means ("embed", "heads") to the axes that split it.

The semantics are those of flax's `logical_to_mesh_axes`, checked over the digits of a topology where one is given.
Which names an array has is said by a `ShardingPlan` (`plan`).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dualmesh._support.checks import check_items
from dualmesh.errors import ShardingError, counted
from dualmesh.sharding.partition_spec import Entry, P, split_axes
from dualmesh.topology.layout import overlap
from dualmesh.topology.topology import Topology

Rules = tuple[tuple[str, Entry], ...]
Names = tuple[str | None, ...]


def rules_of(rules: Any) -> Rules:
    """Return rules as pairs, from a mapping or from pairs in order of precedence. *Pure.*

    A name may have several pairs: alternatives, in order. A tuple or list of axes splits one dim over all of them.

    Raises:
        ShardingError: Something is no pair of a name and an axis, several axes or None.

    >>> rules_of({"embed": "dp_shard_sp", "batch": ["dp_replicate", "dp_shard"], "length": None})
    (('embed', 'dp_shard_sp'), ('batch', ('dp_replicate', 'dp_shard')), ('length', None))
    """
    given = () if rules is None else rules
    pairs = given.items() if isinstance(given, Mapping) else check_items("Logical rules", "rules", given)
    found = []
    for pair in pairs:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ShardingError(
                f"Logical rules: {pair!r} is no rule. A rule is a pair of a logical name and an axis, a tuple of axes "
                f"or None; give a dict or a list of pairs.",
                rule=pair,
            )
        found.append((pair[0], P(pair[1]).entries[0]))
    return tuple(found)


def names_in(names: Iterable[Any]) -> Names:
    """Return the logical names of an array's dims as a tuple. *Pure.*

    Raises:
        ShardingError: One is neither a name nor None, or one is there twice.
    """
    found = tuple(names)
    for name in found:
        if name is not None and not isinstance(name, str):
            raise ShardingError(
                f"Logical names {found!r}: {name!r} is no name. Give one name or None per dim.", names=found
            )
        if name is not None and found.count(name) > 1:
            raise ShardingError(
                f"Logical names {found!r}: {name!r} names {counted(found.count(name), 'dim')}. Each dim needs a name "
                f"of its own: a rule cannot tell them apart.",
                names=found,
            )
    return found


def spec_by_rules(names: Iterable[str | None], rules: Any, topology: Topology | None = None) -> P:
    """Return the spec of an array whose dims have logical names. *Pure.*

    Rules are tried in order of precedence, whatever the order of the dims: a rule gives its axes to its dim if that
    dim has none yet and no other dim has one of the axes. With a topology, axes that share ranks (`dp` and
    `dp_shard`) count as the same. None is a rule too: the dim stays whole. A name that no rule fits stays whole.

    >>> rules = (("batch", "X"), ("features", "X"), ("heads", "Y"), ("batch", "Z"))
    >>> spec_by_rules(("batch", "length", "heads", "features"), rules)
    P('X', None, 'Y', None)
    """
    wanted = names_in(names)
    given: dict[int, Entry] = {}
    for name, entry in rules_of(rules):
        if name not in wanted or wanted.index(name) in given:
            continue
        if _is_free(split_axes(entry), [axis for other in given.values() for axis in split_axes(other)], topology):
            given[wanted.index(name)] = entry
    return P(*(given.get(dim) for dim in range(len(wanted))))


def _is_free(axes: Sequence[str], taken: Sequence[str], topology: Topology | None) -> bool:
    if not set(axes).isdisjoint(taken):
        return False
    known = {} if topology is None else topology.layouts
    layouts = [known[axis] for axis in axes if axis in known]
    return not any(overlap(layout, known[axis]) for layout in layouts for axis in taken if axis in known)
