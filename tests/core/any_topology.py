"""Random topologies for property tests, with the numpy grid that they mean."""

from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np
from hypothesis import strategies as st

import dualmesh as dm
from dualmesh.topology.layout import cuts

NAMES = ["dp", "tp", "pp", "cp", "a b", "größe", "軸", 'q"', "stage1", "2"]


@dataclass(frozen=True)
class Example:
    """A spec, its world and the index arrays of every axis, worked out by numpy on the grid."""

    spec: dm.TopologySpec
    world_size: int
    index: dict[str, np.ndarray]


def spelled(index, sizes, members):
    """Read several axes' indices as one number, first = slowest."""
    total = np.zeros_like(next(iter(index.values())))
    for name in members:
        total = total * sizes[name] + index[name]
    return total


@st.composite
def factorisations(draw, whole):
    """Sizes, outermost first, that multiply to the size of a layout and cut it where it can be cut."""
    chain = [1]
    for place in cuts(whole)[1:]:
        if place == whole.size or (place % chain[-1] == 0 and draw(st.booleans())):
            chain.append(place)
    while any(high % low for low, high in pairwise(chain)):
        del chain[-2]
    return [high // low for low, high in pairwise(chain)][::-1] or [1]


@st.composite
def examples(draw):
    """Any factorisation in any order, with a view over some of its axes, combined axes in any order, an offset."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4))
    names = draw(st.permutations(NAMES))
    base = dict(zip(names, sizes, strict=False))
    world = prod(sizes)
    offset = draw(st.sampled_from([0, 0, 5]))
    grid = np.indices(sizes).reshape(len(sizes), -1)
    index = dict(zip(base, grid, strict=True))
    every = dict(base)
    over = tuple(draw(st.lists(st.sampled_from(list(base)), unique=True, min_size=1)))
    whole = dm.TopologySpec(base).resolve(world).layout(over)
    parts = draw(factorisations(whole))
    view = {f"v{place}": size for place, size in enumerate(parts)}
    position = spelled(index, base, over)
    for name, size in reversed(view.items()):
        index[name] = position % size
        position = position // size
    every |= view
    members = tuple(draw(st.lists(st.sampled_from(list(base)), unique=True)))
    index["joined"] = spelled(index, every, members)
    declared = dict(base)
    if draw(st.booleans()):
        inferred = draw(st.sampled_from(list(base)))
        declared[inferred] = -1
    spec = dm.TopologySpec(
        declared,
        {"joined": members},
        {"view": dm.View(over, view)},
        {"data": members},
        rank_offset=offset,
    )
    return Example(spec, world, index)
