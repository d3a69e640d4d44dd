"""Sizes that the axes of a spec do not divide: what they are padded to, and what of it is the array's own.

The zeros are put there by the backends (`verbs.Arrays.grown`); layouts of sizes that divide are in `partition_spec`.
"""

from collections.abc import Sequence
from typing import Any

from dualmesh.arguments import items_of
from dualmesh.errors import ShapeError
from dualmesh.partition_spec import P, check_axes, check_entries, split_axes
from dualmesh.resolution import positive
from dualmesh.topology import Topology


def padded_shape(topology: Topology, spec: P, shape: Sequence[int], *, what: str = "array") -> tuple[int, ...]:
    """Return the smallest shape that a spec divides and that holds an array of `shape`. *Pure.*

    Raises:
        ShardingError: More entries than dims.
        UnknownAxisError: An axis that the topology does not have.

    >>> import dualmesh as dm
    >>> topology = dm.TopologySpec({"dp": 2, "tp": 3}).resolve(6)
    >>> padded_shape(topology, P("tp", "dp"), (10, 4))
    (12, 4)
    """
    check_entries(spec, shape, what)
    check_axes(topology, spec, what=what)
    parts = [topology.size(split_axes(entry)) for entry in spec.entries]
    parts += [1] * (len(shape) - len(parts))
    return tuple(-(-size // count) * count for size, count in zip(shape, parts, strict=True))


def clipped(slices: Sequence[slice], shape: Sequence[int]) -> tuple[slice, ...]:
    """Return which part of a slice of the padded array lies in the array itself; what is all padding is empty. *Pure.*

    >>> clipped((slice(8, 12), slice(12, 16)), (10, 10))
    (slice(8, 10, None), slice(10, 10, None))
    """
    return tuple(slice(min(cut.start, size), min(cut.stop, size)) for cut, size in zip(slices, shape, strict=True))


def trimmed(where: str, value: Any, shape: Any) -> Any:
    """Return the first part of a padded value that has `shape`. *Local.*

    Raises:
        ShapeError: The value has another number of dims, or is smaller.
    """
    asked = tuple(positive(where, "shape", size, least=0) for size in items_of(where, "shape", shape))
    found = tuple(value.shape)
    if len(asked) != len(found) or any(size > whole for size, whole in zip(asked, found, strict=True)):
        raise ShapeError(
            f"{where}: shape={asked}, but the array has shape {found}. Give the shape that it had before it was "
            f"padded, at most its own in every dim.",
            shape=found,
            asked=asked,
        )
    return value[tuple(slice(size) for size in asked)]
