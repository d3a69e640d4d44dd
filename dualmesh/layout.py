"""Mixed-radix layouts: how an axis reads its index out of a rank, in closed form.

Names, sizes from users and their validation do not belong here; they are in `spec` and `topology`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from dualmesh.lazy import np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Digit(NamedTuple):
    """One digit of a rank: `(rank // stride) % size`."""

    size: int
    stride: int


@dataclass(frozen=True)
class Layout:
    """The digits of an axis, slowest first; digits of size 1 are dropped and neighbours are merged.

    A group is the ranks that differ in these digits only. With digits (n1, s1), (n2, s2), ... the index of a
    rank is the mixed-radix number ((rank // s1) % n1) * n2 + ((rank // s2) % n2) ...

    >>> Layout.of([Digit(2, 4), Digit(2, 2)])
    Layout(digits=(Digit(size=4, stride=2),))
    >>> Layout.of([Digit(4, 2)]).ranks(5)
    (1, 3, 5, 7)
    """

    digits: tuple[Digit, ...]
    size: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", prod(digit.size for digit in self.digits))

    @classmethod
    def of(cls, digits: Iterable[Digit]) -> "Layout":
        """Build the canonical layout of digits, slowest first. *Pure.*"""
        canonical: list[Digit] = []
        for digit in digits:
            if digit.size == 1:
                continue
            if canonical and canonical[-1].stride == digit.size * digit.stride:
                canonical[-1] = Digit(canonical[-1].size * digit.size, digit.stride)
            else:
                canonical.append(digit)
        return cls(tuple(canonical))

    @classmethod
    def joined(cls, layouts: Iterable["Layout"]) -> "Layout":
        """Read several layouts as one, the first slowest. *Pure.*"""
        return cls.of(digit for layout in layouts for digit in layout.digits)

    def index(self, rank: int) -> int:
        """Return the position of a rank in its group, 0..size-1. *Pure.*"""
        index = 0
        for size, stride in self.digits:
            index = index * size + (rank // stride) % size
        return index

    def offset(self, index: int) -> int:
        """Return how far the member at `index` lies from the member at index 0. *Pure.*"""
        offset = 0
        for size, stride in reversed(self.digits):
            index, digit = divmod(index, size)
            offset += digit * stride
        return offset

    def ranks(self, rank: int) -> tuple[int, ...]:
        """Return the group of a rank in index order, `size` ranks. *Pure.*"""
        first = rank - self.offset(self.index(rank))
        offsets = [0]
        for size, stride in self.digits:
            offsets = [offset + step for offset in offsets for step in range(0, size * stride, stride)]
        return tuple(first + offset for offset in offsets)

    def member(self, rank: int, index: int) -> int:
        """Return the rank at `index` in the group of `rank`. *Pure.*"""
        return rank - self.offset(self.index(rank)) + self.offset(index)

    @cached_property
    def ascending(self) -> tuple[Digit, ...]:
        """The digits by rising stride."""
        return tuple(sorted(self.digits, key=lambda digit: digit.stride))

    def complement(self, world_size: int) -> "Layout":
        """Return the layout of the digits that this one leaves out of a world, which must be disjoint. *Pure.*"""
        rest: list[Digit] = []
        covered = 1
        for size, stride in self.ascending:
            rest.append(Digit(stride // covered, covered))
            covered = stride * size
        rest.append(Digit(world_size // covered, covered))
        return Layout.of(reversed(rest))

    def offsets(self) -> "NDArray[np.int64]":
        """Return the offset of every index as an array of shape (size,). *Pure.*"""
        offsets = np.zeros(1, dtype=np.int64)
        for size, stride in self.digits:
            offsets = np.add.outer(offsets, np.arange(size, dtype=np.int64) * stride).reshape(-1)
        return offsets

    def partition(self, world_size: int) -> "NDArray[np.int64]":
        """Return all groups, shape (world_size // size, size), ordered by first rank. *Pure.*"""
        return np.add.outer(self.complement(world_size).offsets(), self.offsets())


def row_major(sizes: Sequence[int]) -> list[Layout]:
    """Return the layout of each axis of a grid whose last axis varies fastest. *Pure.*"""
    layouts: list[Layout] = []
    stride = 1
    for size in reversed(sizes):
        layouts.append(Layout.of([Digit(size, stride)]))
        stride *= size
    return layouts[::-1]


def overlap(first: Layout, second: Layout) -> bool:
    """Tell whether two layouts read a common digit of the rank, so that they cannot be joined. *Pure.*"""
    return any(
        a.stride < b.stride * b.size and b.stride < a.stride * a.size for a in first.digits for b in second.digits
    )


def refactored(whole: Layout, sizes: Sequence[int]) -> list[Layout] | None:
    """Factor a layout anew into axes of the given sizes, first = slowest. *Pure.*

    Returns one layout per size, or None when an axis would have to cut a digit at a place that is no divisor.
    The sizes must multiply to `whole.size`.

    >>> refactored(Layout.of([Digit(4, 2)]), [2, 2])
    [Layout(digits=(Digit(size=2, stride=4),)), Layout(digits=(Digit(size=2, stride=2),))]
    """
    remaining = list(whole.digits)
    layouts: list[Layout] = []
    for size in reversed(sizes):
        digits: list[Digit] = []
        while size > 1:
            digit = remaining.pop()
            if digit.size <= size:
                if size % digit.size:
                    return None
                digits.insert(0, digit)
                size //= digit.size
            else:
                if digit.size % size:
                    return None
                digits.insert(0, Digit(size, digit.stride))
                remaining.append(Digit(digit.size // size, digit.stride * size))
                size = 1
        layouts.append(Layout.of(digits))
    return layouts[::-1]


def refinement(layouts: Iterable[Layout], world_size: int) -> tuple[Digit, ...] | None:
    """Return the coarsest grid on which every layout is a list of whole axes, or None if there is none. *Pure.*

    The strides at which any layout starts or ends must form a divisor chain; the grid's digits, slowest first,
    lie between neighbours of that chain.

    >>> refinement([Layout.of([Digit(2, 2)]), Layout.of([Digit(4, 1)])], 4)
    (Digit(size=2, stride=2), Digit(size=2, stride=1))
    """
    cuts = {1, world_size}
    for layout in layouts:
        for size, stride in layout.digits:
            cuts |= {stride, size * stride}
    chain = sorted(cuts)
    atoms = [Digit(high // low, low) for low, high in pairwise(chain)]
    if any(high % low for low, high in pairwise(chain)):
        return None
    return tuple(reversed(atoms))


def on_grid(layout: Layout, grid: Sequence[Digit]) -> tuple[int, ...] | None:
    """Return the positions of the grid's digits that spell a layout, slowest first, or None. *Pure.*"""
    positions: list[int] = []
    for size, stride in layout.digits:
        covered = stride * size
        for position, atom in enumerate(grid):
            if atom.stride >= stride and atom.stride * atom.size <= covered:
                positions.append(position)
                size //= atom.size
        if size != 1:
            return None
    return tuple(positions)
