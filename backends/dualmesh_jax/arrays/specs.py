"""Containers of specs beside containers of arrays, in JAX's trees (registered classes included).

What one spec means is in `dualmesh.sharding.partition_spec`, what it is called in JAX in `state`.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from dualmesh.errors import ShardingError, listed
from dualmesh.sharding.partition_spec import P, check_axes, is_spec, named_axes, named_set
from dualmesh.topology.layout import Layout
from dualmesh.topology.refinement import Refinement
from dualmesh.topology.topology import Topology


def check_specs(topology: Topology, what: str, specs: Any, axes: tuple[str, ...] | None) -> Any:
    """Return the specs with a `P` at every leaf; a list of specs for the arguments becomes a tuple. *Pure.*

    Raises:
        ShardingError: A leaf is no spec, or names an axis that `axes` leaves to JAX.
        UnknownAxisError: An axis that the topology does not have.
    """
    if axes is not None:
        topology.size(axes)

    def checked(leaf: Any) -> P:
        spec = P.of(leaf)
        check_axes(topology, spec, what=what)
        outside = [name for name in spec.axes if axes is not None and name not in axes]
        if outside:
            raise ShardingError(
                f"{what}: {spec!r} splits over {listed(outside)}, but axes={axes!r} leaves that to JAX. Name only "
                f"these axes, or add it.",
                spec=spec,
                axes=axes,
            )
        return spec

    return jax.tree.map(checked, tuple(specs) if isinstance(specs, list) else specs, is_leaf=is_spec)


def map_by_spec(what: str, fn: Callable[[P, Any], Any], specs: Any, tree: Any) -> Any:
    """Return the tree with `fn(spec, leaf)` at its leaves; the specs are a prefix of the tree. *Pure.*

    Raises:
        ShardingError: The specs are no prefix of the tree.
    """
    try:
        pairs = jax.tree.map(_Below, specs, tree, is_leaf=is_spec)
    except ValueError as error:
        raise ShardingError(
            f"{what}: the specs {specs!r} do not fit {jax.tree.structure(tree)}: {error}. Give one dm.P for all of it, "
            f"or the same containers with one dm.P per leaf.",
            specs=specs,
        ) from None
    return jax.tree.map(lambda below: below.mapped(fn), pairs, is_leaf=lambda value: isinstance(value, _Below))


def spec_for(topology: Topology, refined: Refinement, native: PartitionSpec) -> P:
    """Return what a PartitionSpec in the names of a refined mesh means, in canonical names. *Pure.*

    Raises:
        ShardingError: No spec of the topology means the same.
    """
    if getattr(native, "reduced", None):
        raise ShardingError(f"{native}: `reduced` says how a gradient lies, which dm.P has no word for.", spec=native)
    digits = dict(zip(refined.names, refined.atoms, strict=True))
    entries = []
    for dim, entry in enumerate(getattr(native, "partitions", native)):
        names = (entry,) if isinstance(entry, str) else tuple(entry or ())
        axes = named_axes(topology, Layout.of(digits[name] for name in names if name in digits))  # not a mesh's mark
        entries.append(_spelt(axes, f"dim {dim} is split by {listed(names)}", topology, native))
    unreduced = sorted(getattr(native, "unreduced", None) or ())
    summed = sorted((digits[name] for name in unreduced), key=lambda digit: -digit.stride)
    over = _spelt(named_set(topology, Layout.of(summed)), f"it is unreduced over {listed(unreduced)}", topology, native)
    return P(*entries, partial=over)


def _spelt(axes: tuple[str, ...] | None, what: str, topology: Topology, native: PartitionSpec) -> tuple[str, ...]:
    if axes is None:
        raise ShardingError(
            f"{native}: {what}, which no axes of the topology spell. Axes: {listed(topology.axis_names)}. Declare an "
            f"axis or a view for it.",
            spec=native,
        )
    return axes


class _Below:
    """What lies under one spec."""

    __slots__ = ("spec", "tree")

    def __init__(self, spec: P, tree: Any) -> None:
        self.spec = spec
        self.tree = tree

    def mapped(self, fn: Callable[[P, Any], Any]) -> Any:
        return jax.tree.map(lambda leaf: fn(self.spec, leaf), self.tree)
