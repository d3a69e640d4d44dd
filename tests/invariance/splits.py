"""Every way to split 8 ranks over the axes, and the few that cover every pair of axes."""

from itertools import product
from math import prod

import dualmesh as dm

RANKS = 8
BASE = ("dp_replicate", "dp_shard", "ulysses", "cp", "tp")
SPANNED = ("dp_shard", "ulysses", "cp")
PARTS = {"experts": "ep", "params": "ep_fsdp", "replicate": "ep_replicate"}


def every():
    """Return all splits as {axis: size}: the base axes multiply to 8, ep divides what the view spans."""
    sizes = (1, 2, 4, 8)
    grids = [dict(zip(BASE, grid, strict=True)) for grid in product(sizes, repeat=5) if prod(grid) == RANKS]
    return [{**grid, "ep": ep} for grid in grids for ep in sizes if prod(grid[a] for a in SPANNED) % ep == 0]


# Each axis at 1, 2 and 4, and every pair of axes together.
COVER = [
    {"dp_replicate": 2, "dp_shard": 2, "ulysses": 2, "ep": 4},
    {"dp_replicate": 2, "cp": 2, "tp": 2, "ep": 2},
    {"dp_shard": 2, "cp": 2, "tp": 2, "ep": 2},
    {"ulysses": 2, "cp": 2, "tp": 2, "ep": 1},
    {"dp_replicate": 4, "ulysses": 2, "ep": 2},
    {"dp_shard": 4, "tp": 2, "ep": 4},
    {"ulysses": 4, "tp": 2, "ep": 2},
    {"dp_shard": 2, "cp": 4, "ep": 8},
    {"ulysses": 2, "tp": 4, "ep": 1},
]


def full(split):
    """Return a split with its axes of size 1."""
    return {**dict.fromkeys((*BASE, "ep"), 1), **split}


def spec_of(split):
    """Return the spec of a split; the experts' view is there at size 1 too, so that the model need not ask."""
    split = full(split)
    usual = dm.parallel_spec(**{f"{axis}_size": split[axis] for axis in BASE})
    view = dm.View(over=SPANNED, axes={"ep_fsdp": -1, "ep": split["ep"]}, roles=PARTS)
    return dm.TopologySpec(usual.axes, {**usual.combined, "ep_replicate": ("dp_replicate",)}, {"ep": view}, usual.roles)


def named(split):
    """Write a split: its axes of size > 1."""
    return " ".join(f"{axis}{size}" for axis, size in full(split).items() if size > 1) or "one"
