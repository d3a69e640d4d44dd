"""`Line`: what `jax.lax` must be told to communicate along an axis, and where this rank is on it.

An axis of a grid is some axes of the mesh; rank groups are lists of places on all of it. The collectives themselves
are in `collectives`.
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
    """Names of mesh axes, slowest first, and the groups of places along them; None: one group of all."""

    names: Names
    groups: Groups | None = None

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

    def _told(self, what: str) -> Any:
        """Return the index or the group size of every place, as a constant."""
        groups = self.groups or ()
        found = [0] * sum(map(len, groups))
        for group in groups:
            for index, place in enumerate(group):
                found[place] = index if what == "index" else len(group)
        return jnp.asarray(found, jnp.int32)
