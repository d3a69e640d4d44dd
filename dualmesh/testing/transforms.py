"""How one program's parameters become the other's: transpose, permute, reshape, fuse, split, stack, and in a row.

Each is a rearrangement of elements, so its inverse is its transpose, and gradients map as parameters do. Which
parameters a transform is for is said in `param_map`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from dualmesh._support.checks import check_items
from dualmesh._support.optional_imports import np
from dualmesh.errors import ShapeError
from dualmesh.topology.resolve import whole

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
        return [self._turned(array, self.order) for array in arrays]

    def backward(self, arrays: "Arrays") -> "Arrays":
        order = None if self.order is None else tuple(int(i) for i in np.argsort(self.order))
        return [self._turned(array, order) for array in arrays]

    def _turned(self, array: "NDArray[Any]", order: tuple[int, ...] | None) -> "NDArray[Any]":
        if order is not None and len(order) != array.ndim:
            raise ShapeError(f"transpose: {self.order} are not the dims of shape {array.shape}.", shape=array.shape)
        return np.transpose(array, order)


@dataclass(frozen=True)
class Permute(Transform):
    """The positions along a dim of each array in another order."""

    order: tuple[int, ...]
    dim: int

    def forward(self, arrays: "Arrays") -> "Arrays":
        return [self._taken(array, self.order) for array in arrays]

    def backward(self, arrays: "Arrays") -> "Arrays":
        return [self._taken(array, [int(i) for i in np.argsort(self.order)]) for array in arrays]

    def _taken(self, array: "NDArray[Any]", order: Sequence[int]) -> "NDArray[Any]":
        size = _size("permute", array, self.dim)
        if size != len(order):
            raise ShapeError(
                f"permute: the order has {len(order)} positions, and dim {self.dim} of shape {array.shape} has {size}. "
                f"Order all of them.",
                shape=array.shape,
            )
        return np.take(array, order, axis=self.dim)


@dataclass(frozen=True)
class Reshape(Transform):
    """Each array in another shape, elements in the same order."""

    before: tuple[int, ...]
    after: tuple[int, ...]

    def forward(self, arrays: "Arrays") -> "Arrays":
        return [_reshaped(array, self.before, self.after) for array in arrays]

    def backward(self, arrays: "Arrays") -> "Arrays":
        return [_reshaped(array, self.after, self.before) for array in arrays]


@dataclass(frozen=True)
class Fuse(Transform):
    """Several arrays behind each other along a dim; `sizes` are theirs there, None: equal ones."""

    dim: int
    count: int
    sizes: tuple[int, ...] | None

    def forward(self, arrays: "Arrays") -> "Arrays":
        found = tuple(_size("fuse", array, self.dim) for array in arrays)
        if found != (self.sizes or found[:1] * self.count):
            wanted = self.sizes or f"{self.count} equal ones"
            raise ShapeError(f"fuse: dim {self.dim} has the sizes {found}, said were {wanted}.", sizes=found)
        rest = [(np.delete(array.shape, self.dim).tolist(), array.dtype) for array in arrays]
        _check_alike("fuse", arrays, rest)
        return [np.concatenate(arrays, axis=self.dim)]

    def backward(self, arrays: "Arrays") -> "Arrays":
        array = _one("split", arrays)
        size = _size("split", array, self.dim)
        if size % self.count if self.sizes is None else size != sum(self.sizes):
            wanted = f"{self.count} equal parts" if self.sizes is None else f"the sizes {self.sizes}"
            raise ShapeError(
                f"split: dim {self.dim} of shape {array.shape} has {size} positions, which are not {wanted}.",
                shape=array.shape,
            )
        at = self.count if self.sizes is None else [int(i) for i in np.cumsum(self.sizes)[:-1]]
        return list(np.split(array, at, axis=self.dim))


@dataclass(frozen=True)
class Stack(Transform):
    """Arrays of one shape along a new dim: one array of all layers."""

    dim: int

    def forward(self, arrays: "Arrays") -> "Arrays":
        _check_alike("stack", arrays, [(array.shape, array.dtype) for array in arrays])
        _size("stack", arrays[0][None], self.dim)
        return [np.stack(arrays, axis=self.dim)]

    def backward(self, arrays: "Arrays") -> "Arrays":
        array = _one("stack", arrays)
        if not _size("stack", array, self.dim):
            raise ShapeError(f"stack: shape {array.shape} has nothing along dim {self.dim}.", shape=array.shape)
        return list(np.moveaxis(array, self.dim, 0))


def _size(what: str, array: "NDArray[Any]", dim: int) -> int:
    """Return the size of a dim."""
    if not -array.ndim <= dim < array.ndim:
        raise ShapeError(f"{what}: shape {array.shape} has no dim {dim}.", shape=array.shape, dim=dim)
    return int(array.shape[dim])


def _one(what: str, arrays: "Arrays") -> "NDArray[Any]":
    """Return the one array that there should be."""
    if len(arrays) != 1:
        raise ShapeError(f"{what}: takes one array apart, and got {len(arrays)}. Name one.", count=len(arrays))
    return arrays[0]


def _check_alike(what: str, arrays: "Arrays", kinds: Sequence[Any]) -> None:
    """Refuse arrays that cannot be one array without a loss."""
    if not arrays:
        raise ShapeError(f"{what}: there is no array to take. Give one or more.")
    if any(kind != kinds[0] for kind in kinds):
        found = ", ".join(f"{array.dtype}{array.shape}" for array in arrays)
        raise ShapeError(f"{what}: {found} do not fit together.", found=found)


def _reshaped(array: "NDArray[Any]", before: tuple[int, ...], after: tuple[int, ...]) -> "NDArray[Any]":
    if array.shape != before:
        raise ShapeError(f"reshape: from shape {before}, and found {array.shape}.", shape=array.shape)
    return array.reshape(after)


def same() -> Transform:
    """Return the transform that changes nothing. *Pure.*"""
    return Row(())


def transpose(*order: int) -> Transform:
    """Return the transform to other dims, reversed where no order is given: a Linear's weight to a kernel. *Pure.*

    Raises:
        ShapeError: The order is no permutation.
    """
    return Transpose(_permutation("transpose", order) or None)


def permute(order: Sequence[int], dim: int = 0) -> Transform:
    """Return the transform that takes position `order[i]` of a dim to position i. *Pure.*

    Raises:
        ShapeError: The order is no permutation.
    """
    return Permute(_permutation("permute", order), _number("permute", "dim", dim))


def reshape(before: Sequence[int], after: Sequence[int]) -> Transform:
    """Return the transform from one shape to another. *Pure.*

    Raises:
        ShapeError: They have not as many elements, or leave a size open.
    """
    first, second = _sizes("reshape", "before", before), _sizes("reshape", "after", after)
    if prod(first) != prod(second):
        raise ShapeError(f"reshape: {first} and {second} have not as many elements.", before=before)
    return Reshape(first, second)


def fuse(dim: int, count: int = 2, *, sizes: Sequence[int] | None = None) -> Transform:
    """Return the transform of several arrays to one: query, key and value to one kernel. *Pure.*

    >>> [part.tolist() for part in fuse(0).backward([np.arange(4)])]
    [[0, 1], [2, 3]]
    """
    parts = None if sizes is None else _sizes("fuse", "sizes", sizes)
    number = _number("fuse", "count", count) if parts is None else len(parts)
    if number < 1:
        raise ShapeError("fuse: of no array at all. Give a count of 1 or more.", count=number)
    return Fuse(_number("fuse", "dim", dim), number, parts)


def split(dim: int, count: int = 2, *, sizes: Sequence[int] | None = None) -> Transform:
    """Return the transform of one array to several: the inverse of `fuse`. *Pure.*"""
    return fuse(dim, count, sizes=sizes).inverse()


def stack(dim: int = 0) -> Transform:
    """Return the transform of all arrays of a `*` to one: layers to the array that a scan runs over. *Pure.*"""
    return Stack(_number("stack", "dim", dim))


def _number(what: str, name: str, value: Any) -> int:
    number = whole(value)
    if number is None:
        raise ShapeError(f"{what}: {name} is {value!r}. Give an integer.", **{name: value})
    return number


def _sizes(what: str, name: str, values: Any) -> tuple[int, ...]:
    sizes = tuple(_number(what, name, value) for value in check_items(what, name, values))
    if any(size < 0 for size in sizes):
        raise ShapeError(f"{what}: {name} is {sizes}. Say every size: a map goes both ways.", **{name: values})
    return sizes


def _permutation(what: str, values: Any) -> tuple[int, ...]:
    order = tuple(_number(what, "order", value) for value in check_items(what, "order", values))
    if sorted(order) != list(range(len(order))):
        raise ShapeError(f"{what}: {list(order)} is no permutation of 0..{len(order) - 1}.", order=order)
    return order
