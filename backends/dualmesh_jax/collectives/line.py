"""`Line`: what `jax.lax` must be told to communicate along an axis, and where this rank is on it.

An axis of a grid is some axes of the mesh; rank groups are lists of places on all of it. The collectives themselves
are in `collectives`.

`lax.psum_scatter` on gloo, which carries JAX's collectives on CPU once `jax.distributed` runs, sends from the buffer
that it writes its result to: the end of index 0's block is wrong now and then, without an error, from about 1 MiB on
(https://github.com/jax-ml/jax/issues/40830), and it gives up after 30 s whatever the flags say (issue 40831). JAX's own
transpose of `lax.all_gather` is `psum_scatter`, so there both are written with `lax.all_to_all`, which is its own
transpose. Retired by a JAX whose `psum_scatter` passes `tests/jax_backend/test_processes.py` without it.
"""

# mypy: allow-untyped-calls
# jax leaves some of its public functions unannotated.

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
from jax import lax

Names = tuple[str, ...]
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Line:
    """Names of mesh axes, slowest first, and the groups of places along them; None: one group of all.

    `by_exchange`: whether to gather and to scatter sums by `all_to_all`, as gloo needs it.
    """

    names: Names
    groups: Groups | None = None
    by_exchange: bool = False

    @cached_property
    def is_equal(self) -> bool:
        """Whether all groups have one size."""
        return self.groups is None or len({len(group) for group in self.groups}) == 1

    def index(self) -> Any:
        """Return this rank's index in its group, traced."""
        place = lax.axis_index(self.names)
        return place if self.groups is None else self._told("index")[place]

    def size(self) -> Any:
        """Return the size of this rank's group, traced."""
        return lax.axis_size(self.names) if self.groups is None else self._told("size")[lax.axis_index(self.names)]

    def sum(self, x: Any) -> Any:
        """Sum over the group."""
        return lax.psum(x, self.names, axis_index_groups=self.groups)

    def mean(self, x: Any) -> Any:
        """Average over the group; `lax.pmean` would divide by the size of the first group."""
        if self.groups is None:
            return lax.pmean(x, self.names)
        total = self.sum(x)
        return total / self.size().astype(total.dtype)

    def gather(self, x: Any, dim: int) -> Any:
        """Join the blocks of the group along a dim, in index order; the group's sizes are equal."""
        if not self.by_exchange:
            return lax.all_gather(x, self.names, axis=dim, axis_index_groups=self.groups, tiled=True)
        # Everyone is sent the same block; the transpose is an exchange and a local sum.
        copies = jnp.broadcast_to(x, (self._equal_size(), *x.shape))
        return lax.all_to_all(copies, self.names, 0, dim + 1, axis_index_groups=self.groups, tiled=True)[0]

    def scatter_sum(self, x: Any, dim: int) -> Any:
        """Sum over the group and keep this index' block of a dim; the group's sizes are equal."""
        if not self.by_exchange:
            return lax.psum_scatter(x, self.names, scatter_dimension=dim, axis_index_groups=self.groups, tiled=True)
        blocks = lax.all_to_all(x, self.names, dim, dim, axis_index_groups=self.groups, tiled=True)
        size = self._equal_size()
        by_sender = blocks.reshape(*x.shape[:dim], size, x.shape[dim] // size, *x.shape[dim + 1 :])
        return jnp.sum(by_sender, axis=dim, dtype=x.dtype)

    def max(self, x: Any) -> Any:
        """Return the elementwise maximum over the group."""
        return lax.pmax(x, self.names, axis_index_groups=self.groups)

    def min(self, x: Any) -> Any:
        """Return the elementwise minimum over the group."""
        return lax.pmin(x, self.names, axis_index_groups=self.groups)

    def pairs(self, pairs: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        """Return pairs of indices as pairs of places along the mesh axes, those of every group. *Pure.*"""
        if self.groups is None:
            return pairs
        return tuple((group[src], group[dst]) for group in self.groups for src, dst in pairs)

    def _equal_size(self) -> int:
        return int(lax.axis_size(self.names)) if self.groups is None else len(self.groups[0])

    def _told(self, what: str) -> Any:
        """Return the index or the group size of every place, as a constant."""
        groups = self.groups or ()
        found = [0] * sum(map(len, groups))
        for group in groups:
            for index, place in enumerate(group):
                found[place] = index if what == "index" else len(group)
        return jnp.asarray(found, jnp.int32)
