"""What an axis does, read from the roles of the spec and of its views: names are values, and no code looks at spelling.

Which roles there are, and which contradict each other, is in `resolve`.
"""

from collections.abc import Sequence
from functools import lru_cache

from dualmesh.topology.resolve import TOKEN_ROLES
from dualmesh.topology.topology import Topology


def expand_axes(topology: Topology, names: Sequence[str]) -> tuple[str, ...]:
    """Return the axes with combined ones replaced by what they are made of, down to base and view axes. *Pure.*"""
    combined = topology.spec.combined
    found: list[str] = []
    for name in names:
        if name in combined:
            found += expand_axes(topology, combined[name])
        elif name == "world":
            found += topology.base_axes
        else:
            found.append(name)
    return tuple(found)


@lru_cache(maxsize=128)
def token_axes(topology: Topology) -> tuple[str, ...]:
    """Return the base axes of size > 1 along which ranks have different tokens, outermost first. *Pure.*

    Tokens differ along the axes of the roles "data", "sequence" and "loss". A gradient is whole once it is summed over
    all of them; an axis of a view counts as the base axes that it shares ranks with.

    >>> import dualmesh as dm
    >>> token_axes(dm.parallel_spec(dp_shard_size=2, ulysses_size=2, tp_size=2).resolve(8))
    ('dp_shard', 'ulysses')
    """
    named = {name for part in TOKEN_ROLES for name in expand_axes(topology, topology.spec.roles.get(part, ()))}
    lists = tuple(name for name in topology.axis_names if name in named and topology.rank_groups(name) is not None)
    digits = [digit for name in named - set(lists) for digit in topology.layout(name).digits]

    def carries(axis: str) -> bool:
        # Two digits share ranks where the ranges of strides that they count in overlap.
        return any(
            max(own.stride, other.stride) < min(own.stride * own.size, other.stride * other.size)
            for own in topology.layouts[axis].digits
            for other in digits
        )

    return (*lists, *(axis for axis in topology.base_axes if carries(axis)))


def has_token_roles(topology: Topology) -> bool:
    """Tell whether the spec says along which axes tokens differ, be it none. *Pure.*"""
    return any(part in topology.spec.roles for part in TOKEN_ROLES)


def param_axes(topology: Topology, view: str | None = None) -> tuple[str, ...]:
    """Return the axes that shard parameters: of a view, those that lie on it; () where none is said. *Pure.*

    >>> import dualmesh as dm
    >>> topology = dm.parallel_spec(dp_shard_size=4, ep_size=2).resolve(4)
    >>> param_axes(topology), param_axes(topology, "ep")
    (('dp_shard', 'ulysses', 'cp'), ('ep_fsdp',))
    """
    roles = topology.spec.roles if view is None else topology.spec.views[view].roles
    return roles.get("params", ())


def replica_axes(topology: Topology, view: str | None = None) -> tuple[str, ...]:
    """Return the axes along which parameters have copies: of a view, those that lie on it. *Pure.*"""
    own = () if view is None else topology.spec.views[view].roles.get("replicate", ())
    return own or topology.spec.roles.get("replicate", ())


@lru_cache(maxsize=128)
def stage_axes(topology: Topology) -> tuple[str, ...]:
    """Return the axes of size > 1 along which each index holds other layers: pipeline stages. *Pure.*

    >>> import dualmesh as dm
    >>> stage_axes(dm.parallel_spec(pp_size=2, tp_size=2).resolve(4)), stage_axes(dm.TopologySpec({"pp": 2}).resolve(2))
    (('pp',), ())
    """
    named = expand_axes(topology, topology.spec.roles.get("stages", ()))
    return tuple(name for name in named if topology.rank_groups(name) is not None or topology.layout(name).size > 1)


def expert_views(topology: Topology) -> tuple[str, ...]:
    """Return the views of which an axis has other experts at each index. *Pure.*"""
    return tuple(name for name, view in topology.spec.named_views if view.roles.get("experts"))


@lru_cache(maxsize=128)
def view_param_axes(topology: Topology) -> frozenset[str]:
    """Return the axes of views over which wrappers gather parameters or reduce gradients. *Pure.*

    A combined axis that a view names for its copies is one too, also where what it is made of serves code as well.
    """
    return frozenset(
        name
        for _, view in topology.spec.named_views
        for part in ("params", "replicate")
        for name in view.roles.get(part, ())
        if name in view.axes or name in topology.spec.combined
    )
