"""How one program's parameters become the other's: transpose, permute, reshape, fuse, split, stack, and in a row.

Each is a rearrangement of elements, so its inverse is its transpose, and gradients map as parameters do. Which
parameters a transform is for is said in `param_map`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from dualmesh.errors import ShapeError
from dualmesh.lazy import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Arrays = list[NDArray[Any]]


class Transform(ABC):
    """Some arrays to some arrays, and back without loss."""

    @abstractmethod
    def forward(self, arrays: "Arrays") -> "Arrays":
        """Return the other program's arrays. *Pure.*"""

    @abstractmethod
    def backward(self, arrays: "Arrays") -> "Arrays":
        """Return the first program's arrays. *Pure.*"""

    def then(self, following: "Transform") -> "Transform":
        """Return this transform followed by another. *Pure.*"""
        return Row((self, following))

    def inverse(self) -> "Transform":
        """Return the transform that goes back. *Pure.*"""
        return Inverse(self)


@dataclass(frozen=True)
class Row(Transform):
    """Transforms one after the other."""

    steps: tuple[Transform, ...]

    def forward(self, arrays: "Arrays") -> "Arrays":
        for step in self.steps:
            arrays = step.forward(arrays)
        return arrays

    def backward(self, arrays: "Arrays") -> "Arrays":
        for step in reversed(self.steps):
            arrays = step.backward(arrays)
        return arrays


@dataclass(frozen=True)
class Inverse(Transform):
    """A transform read from its other end."""

    of: Transform

    def forward(self, arrays: "Arrays") -> "Arrays":
        return self.of.backward(arrays)

    def backward(self, arrays: "Arrays") -> "Arrays":
        return self.of.forward(arrays)


@dataclass(frozen=True)
class Transpose(Transform):
    """The dims of each array in another order."""

    order: tuple[int, ...] | None

    def forward(self, arrays: "Arrays") -> "Arrays":
        return [np.transpose(array, self.order) for array in arrays]

    def backward(self, arrays: "Arrays") -> "Arrays":
        order = None if self.order is None else [int(i) for i in np.argsort(self.order)]
        return [np.transpose(array, order) for array in arrays]


@dataclass(frozen=True)
class Permute(Transform):
    """The positions along a dim of each array in another order."""

    order: tuple[int, ...]
    dim: int

    def forward(self, arrays: "Arrays") -> "Arrays":
        return [np.take(array, self.order, axis=self.dim) for array in arrays]

    def backward(self, arrays: "Arrays") -> "Arrays":
        return [np.take(array, np.argsort(self.order), axis=self.dim) for array in arrays]


@dataclass(frozen=True)
class Reshape(Transform):
    """Each array in another shape, elements in the same order."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    def forward(self, arrays: "Arrays") -> "Arrays":
        return [array.reshape(self.after) for array in arrays]

    def backward(self, arrays: "Arrays") -> "Arrays":
        return [array.reshape(self.before) for array in arrays]


@dataclass(frozen=True)
class Fuse(Transform):
    """Several arrays behind each other along a dim; `sizes` are theirs there, None: equal ones."""

    dim: int
    count: int
    sizes: tuple[int, ...] | None

    def forward(self, arrays: "Arrays") -> "Arrays":
        found = tuple(array.shape[self.dim] for array in arrays)
        if found != (self.sizes or (found[0],) * self.count):
            wanted = self.sizes or f"{self.count} equal ones"
            raise ShapeError(f"fuse: dim {self.dim} has the sizes {found}, said were {wanted}.", sizes=found)
        return [np.concatenate(arrays, axis=self.dim)]

    def backward(self, arrays: "Arrays") -> "Arrays":
        (array,) = arrays
        at = self.count if self.sizes is None else [int(i) for i in np.cumsum(self.sizes)[:-1]]
        return list(np.split(array, at, axis=self.dim))


@dataclass(frozen=True)
class Stack(Transform):
    """Arrays of one shape along a new dim: one array of all layers."""

    dim: int

    def forward(self, arrays: "Arrays") -> "Arrays":
        return [np.stack(arrays, axis=self.dim)]

    def backward(self, arrays: "Arrays") -> "Arrays":
        (array,) = arrays
        return list(np.moveaxis(array, self.dim, 0))


def same() -> Transform:
    """Return the transform that changes nothing. *Pure.*"""
    return Row(())


def transpose(*order: int) -> Transform:
    """Return the transform to other dims, reversed where no order is given: a Linear's weight to a kernel. *Pure.*"""
    return Transpose(order or None)


def permute(order: Sequence[int], dim: int = 0) -> Transform:
    """Return the transform that takes position `order[i]` of a dim to position i. *Pure.*

    Raises:
        ShapeError: The order is no permutation.
    """
    if sorted(order) != list(range(len(order))):
        raise ShapeError(f"permute: {list(order)} is no permutation of 0..{len(order) - 1}.", order=tuple(order))
    return Permute(tuple(order), dim)


def reshape(before: Sequence[int], after: Sequence[int]) -> Transform:
    """Return the transform from one shape to another. *Pure.*

    Raises:
        ShapeError: They have not as many elements.
    """
    if prod(before) != prod(after):
        raise ShapeError(f"reshape: {tuple(before)} and {tuple(after)} have not as many elements.", before=before)
    return Reshape(tuple(before), tuple(after))


def fuse(dim: int, count: int = 2, *, sizes: Sequence[int] | None = None) -> Transform:
    """Return the transform of several arrays to one: query, key and value to one kernel. *Pure.*

    >>> [part.tolist() for part in fuse(0).backward([np.arange(4)])]
    [[0, 1], [2, 3]]
    """
    return Fuse(dim, count if sizes is None else len(sizes), None if sizes is None else tuple(sizes))


def split(dim: int, count: int = 2, *, sizes: Sequence[int] | None = None) -> Transform:
    """Return the transform of one array to several: the inverse of `fuse`. *Pure.*"""
    return fuse(dim, count, sizes=sizes).inverse()


def stack(dim: int = 0) -> Transform:
    """Return the transform of all arrays of a `*` to one: layers to the array that a scan runs over. *Pure.*"""
    return Stack(dim)
