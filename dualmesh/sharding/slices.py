"""Slices of global arrays: the smallest that covers several ranks' blocks, and what of a padded array is its own.

Which slice one rank holds is in `partition_spec`.
"""

from collections.abc import Sequence
from typing import Any

from dualmesh._support.checks import check_items
from dualmesh.errors import ShapeError, counted
from dualmesh.sharding.partition_spec import P, check_axes, check_entries, slices_of, split_axes
from dualmesh.topology.resolve import positive
from dualmesh.topology.topology import Topology


def covering_slices(topology: Topology, spec: P, shape: Sequence[int], ranks: Sequence[int]) -> tuple[slice, ...]:
    """Return the smallest slice of a global array that covers the blocks of some ranks, one slice per dim. *Pure.*

    >>> import dualmesh as dm
    >>> topology = dm.TopologySpec({"dp": 2, "tp": 2}).resolve(4)
    >>> covering_slices(topology, P("dp", "tp"), (8, 6), [2, 3])
    (slice(4, 8, None), slice(0, 6, None))
    """
    blocks = [slices_of(topology, spec, shape, rank) for rank in ranks]
    return tuple(
        slice(min(cut.start for cut in cuts), max(cut.stop for cut in cuts)) for cuts in zip(*blocks, strict=True)
    )


def global_shape_of_cover(
    topology: Topology, spec: P, covering: Sequence[int], ranks: Sequence[int], *, what: str
) -> tuple[int, ...]:
    """Return the shape of the global array of which some ranks' blocks are covered by a slice of a given shape. *Pure.*

    Raises:
        ShapeError: A dim that is no whole number of the blocks that it covers.

    >>> import dualmesh as dm
    >>> topology = dm.TopologySpec({"dp": 2, "tp": 2}).resolve(4)
    >>> global_shape_of_cover(topology, P("dp", "tp"), (4, 6), [2, 3], what="block")
    (8, 6)
    """
    check_axes(topology, spec, what=what)
    shape = list(covering)
    for dim, entry in enumerate(spec.entries[: len(shape)]):
        layout = topology.layout(split_axes(entry))
        places = [layout.index(topology.position(rank)) for rank in ranks]
        blocks = max(places) - min(places) + 1
        if shape[dim] % blocks:
            raise ShapeError(
                f"{what} of shape {tuple(covering)}: dim {dim} has size {shape[dim]}, and should hold "
                f"{counted(blocks, 'block')} of equal size ({entry!r}). dm.local_slices says which slice this process "
                f"holds.",
                dim=dim,
                axis=entry,
                shape=tuple(covering),
            )
        shape[dim] = shape[dim] // blocks * layout.size
    return tuple(shape)


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


def clip_slices(slices: Sequence[slice], shape: Sequence[int]) -> tuple[slice, ...]:
    """Return which part of a slice of the padded array lies in the array itself; what is all padding is empty. *Pure.*

    >>> clip_slices((slice(8, 12), slice(12, 16)), (10, 10))
    (slice(8, 10, None), slice(10, 10, None))
    """
    return tuple(slice(min(cut.start, size), min(cut.stop, size)) for cut, size in zip(slices, shape, strict=True))


def trim(where: str, value: Any, shape: Any) -> Any:
    """Return the first part of a padded value that has `shape`. *Local.*

    Raises:
        ShapeError: The value has another number of dims, or is smaller.
    """
    asked = tuple(positive(where, "shape", size, least=0) for size in check_items(where, "shape", shape))
    found = tuple(value.shape)
    if len(asked) != len(found) or any(size > whole for size, whole in zip(asked, found, strict=True)):
        raise ShapeError(
            f"{where}: shape={asked}, but the array has shape {found}. Give the shape that it had before it was "
            f"padded, at most its own in every dim.",
            shape=found,
            asked=asked,
        )
    return value[tuple(slice(size) for size in asked)]
