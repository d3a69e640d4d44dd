"""The smallest slice of a global array that covers the blocks of several ranks: what a process of several ranks loads.

What one rank holds is in `partition_spec`.
"""

from collections.abc import Sequence

from dualmesh.errors import ShapeError, counted
from dualmesh.partition_spec import P, check_axes, slices_of, split_axes
from dualmesh.topology import Topology


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


def covered_shape(
    topology: Topology, spec: P, covering: Sequence[int], ranks: Sequence[int], *, what: str
) -> tuple[int, ...]:
    """Return the shape of the global array of which some ranks' blocks are covered by a slice of a given shape. *Pure.*

    Raises:
        ShapeError: A dim that is no whole number of the blocks that it covers.

    >>> import dualmesh as dm
    >>> topology = dm.TopologySpec({"dp": 2, "tp": 2}).resolve(4)
    >>> covered_shape(topology, P("dp", "tp"), (4, 6), [2, 3], what="block")
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
