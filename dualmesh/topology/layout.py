"""Mixed-radix layouts: how an axis reads its index out of a rank, in closed form.

Names, sizes from users and their validation do not belong here; they are in `spec` and `resolve`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from math import isqrt, prod
from typing import TYPE_CHECKING, NamedTuple

from dualmesh._support.optional_imports import np

if TYPE_CHECKING:
    from numpy.typing import NDArray


_TRANSPOSED = 1 << 16
"""Ranks up to which all groups are had by transposing a grid; above, sums of digits are written faster."""


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
        """Read several layouts, which must not clash, as one, the first slowest. *Pure.*"""
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
        if len(self.digits) == 1:  # the usual case, and half the time
            size, stride = self.digits[0]
            return tuple(range(first, first + size * stride, stride))
        group: tuple[int, ...] = (first,)
        for size, stride in self.digits:
            group = tuple(chain.from_iterable([range(start, start + size * stride, stride) for start in group]))
        return group

    def member(self, rank: int, index: int) -> int:
        """Return the rank at `index` in the group of `rank`. *Pure.*"""
        return rank - self.offset(self.index(rank)) + self.offset(index)

    @cached_property
    def ascending(self) -> tuple[Digit, ...]:
        """The digits by rising stride."""
        return tuple(sorted(self.digits, key=lambda digit: digit.stride))

    def complement(self, world_size: int) -> "Layout":
        """Return the layout of all digits of a world that this one leaves out. *Pure.*"""
        rest: list[Digit] = []
        covered = 1
        for size, stride in self.ascending:
            rest.append(Digit(stride // covered, covered))
            covered = stride * size
        rest.append(Digit(world_size // covered, covered))
        return Layout.of(reversed(rest))

    def partition(self, world_size: int, first: int = 0) -> "NDArray[np.int64]":
        """Return all groups of ranks first..first+world_size-1, shape (world_size // size, size). *Pure.*

        Groups are ordered by their first rank, ranks by their index.
        """
        digits = Layout.joined((self.complement(world_size), self)).digits
        if len(digits) > 1 and world_size > _TRANSPOSED:
            ranks = np.full(1, first, dtype=np.int64)
            for size, stride in digits:
                ranks = np.add.outer(ranks, np.arange(0, size * stride, stride, dtype=np.int64)).reshape(-1)
            return ranks.reshape(-1, self.size)
        grid = sorted(digits, key=lambda digit: -digit.stride)
        ranks = np.arange(first, first + world_size, dtype=np.int64).reshape([digit.size for digit in grid])
        return ranks.transpose([grid.index(digit) for digit in digits]).reshape(-1, self.size)


def row_major(sizes: Sequence[int]) -> list[Layout]:
    """Return the layout of each axis of a grid whose last axis varies fastest. *Pure.*"""
    layouts: list[Layout] = []
    stride = 1
    for size in reversed(sizes):
        layouts.append(Layout.of([Digit(size, stride)]))
        stride *= size
    return layouts[::-1]


def clash(layouts: Sequence[Layout]) -> tuple[int, int] | None:
    """Return the positions of two layouts that cannot be read as one, in rising order, or None. *Pure.*

    Digits combine when they can be ordered so that each ends where, or at a divisor of where, the next starts.
    Others share ranks: with `rank % 2` beside `rank // 3 % 2` two ranks of one group would have one index.

    >>> clash([Layout.of([Digit(2, 1)]), Layout.of([Digit(2, 2)]), Layout.of([Digit(4, 1)])])
    (0, 2)
    """
    owners = [(digit.stride, digit.size, owner) for owner, layout in enumerate(layouts) for digit in layout.digits]
    for (stride, size, owner), (above, _, other) in pairwise(sorted(owners)):
        if above % (stride * size):
            return min(owner, other), max(owner, other)
    return None


def overlap(first: Layout, second: Layout) -> bool:
    """Tell whether two layouts cannot be read as one. *Pure.*"""
    return clash((first, second)) is not None


def spans(layouts: Iterable[Layout], part: Layout) -> bool:
    """Tell whether several layouts together join all ranks that one joins. *Pure.*

    >>> spans([Layout.of([Digit(2, 2)]), Layout.of([Digit(2, 1)])], Layout.of([Digit(4, 1)]))
    True
    """
    ranges: list[tuple[int, int]] = []
    for size, stride in sorted(
        (digit for layout in layouts for digit in layout.digits), key=lambda digit: digit.stride
    ):
        if ranges and ranges[-1][1] >= stride:
            ranges[-1] = ranges[-1][0], max(ranges[-1][1], stride * size)
        else:
            ranges.append((stride, stride * size))
    return all(
        any(start <= stride and stride * size <= end and stride % start == 0 for start, end in ranges)
        for size, stride in part.digits
    )


def refactor(whole: Layout, sizes: Sequence[int]) -> list[Layout] | None:
    """Factor a layout anew into axes of the given sizes, first = slowest. *Pure.*

    Returns one layout per size, or None when an axis would have to cut a digit at a place that is no divisor.
    The sizes must multiply to `whole.size`.

    >>> refactor(Layout.of([Digit(4, 2)]), [2, 2])
    [Layout(digits=(Digit(size=2, stride=4),)), Layout(digits=(Digit(size=2, stride=2),))]
    """
    remaining = list(whole.digits)
    layouts: list[Layout] = []
    for size in reversed(sizes):
        digits: list[Digit] = []
        while size > 1:
            whole_digit = remaining.pop()
            low = Digit(min(whole_digit.size, size), whole_digit.stride)
            if size % low.size or whole_digit.size % low.size:
                return None
            if whole_digit.size > low.size:
                remaining.append(Digit(whole_digit.size // low.size, low.stride * low.size))
            digits.append(low)
            size //= low.size
        layouts.append(Layout.of(reversed(digits)))
    return layouts[::-1]


def cuts(whole: Layout) -> list[int]:
    """Return the sizes at which a layout can be cut, counted from its fastest position, rising. *Pure.*

    >>> cuts(Layout.of([Digit(3, 8), Digit(4, 1)]))
    [1, 2, 4, 12]
    """
    found: list[int] = []
    below = 1
    for digit in reversed(whole.digits):
        found += [below * divisor for divisor in divisors(digit.size)[:-1]]
        below *= digit.size
    return [*found, below]


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number, rising. *Pure.*

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    low = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return low + [number // divisor for divisor in reversed(low) if divisor * divisor != number]


def refinement(layouts: Iterable[Layout], world_size: int) -> tuple[Digit, ...] | None:
    """Return the coarsest grid on which every layout is a list of whole axes, or None if there is none. *Pure.*

    The strides at which any layout starts or ends must form a divisor chain; the grid's digits, slowest first,
    lie between neighbours of that chain.

    >>> refinement([Layout.of([Digit(2, 2)]), Layout.of([Digit(4, 1)])], 4)
    (Digit(size=2, stride=2), Digit(size=2, stride=1))
    """
    edges = {1, world_size}
    for layout in layouts:
        for size, stride in layout.digits:
            edges |= {stride, size * stride}
    chain = sorted(edges)
    if any(high % low for low, high in pairwise(chain)):
        return None
    return tuple(Digit(high // low, low) for low, high in reversed(list(pairwise(chain))))


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
