"""What every collective checks before a backend sees it: the state, the axis, the dims, the dtype.

The collectives themselves are in `collectives`, `pairs` and `ragged`.
"""

import operator
from typing import Any

from dualmesh.backend.state import ParallelState
from dualmesh.errors import ArgumentError, ArrayTypeError, MembershipError, ShapeError, counted, listed
from dualmesh.runtime.scope import current_scope, resolve_state
from dualmesh.topology.resolve import whole
from dualmesh.topology.topology import Axis

KINDS = {
    "sum": ("integer", "float", "complex"),
    "mean": ("float", "complex"),
    "max": ("integer", "float"),
    "min": ("integer", "float"),
}


UNEQUAL = (
    "{where}: axis {axis!r} of {label} has groups of the sizes {sizes}. Here one program runs as all ranks, and its "
    "arrays have one shape, so this needs groups of one size. Use such groups, or a state over each group (ranks=...)."
)


def resolve_axis(
    where: str, axis: Any, state: ParallelState | None, *, unequal: bool = False
) -> tuple[ParallelState, Axis, int]:
    """Return the state that is meant, the axis and its size; refuse what cannot communicate. *Local.*

    Args:
        unequal: Whether one program can do this for groups of different sizes; the largest is returned then.
    """
    owner = resolve_state(where, state)
    size = owner.regular_sizes.get(axis) if type(axis) is str else None
    if size is None:
        return owner, *_looked_up(where, owner, axis, state, unequal=unequal)
    owner.require_ready(where)
    return owner, axis, size


def _looked_up(
    where: str, owner: ParallelState, axis: Any, state: ParallelState | None, *, unequal: bool
) -> tuple[Axis, int]:
    """Return an axis that is no regular named one, or refuse it, and its size, the largest of several."""
    if isinstance(axis, list):
        axis = tuple(axis)
    _check_axis(where, owner, axis, state)
    owner.require_ready(where)
    sizes = _sizes(where, owner, axis)
    if len(sizes) > 1 and not unequal:
        raise ShapeError(
            UNEQUAL.format(where=where, axis=axis, label=owner.label, sizes=listed(sizes)), axis=axis, sizes=sizes
        )
    return axis, max(sizes)


def _sizes(where: str, owner: ParallelState, axis: Axis) -> tuple[int, ...]:
    """Return the sizes of the groups that this code runs in; what is in none communicates nothing, so is refused."""
    try:
        return owner.sizes_here(axis)
    except MembershipError as error:
        raise MembershipError(f"{where}: {owner.label}. {error}", state=owner, axis=axis, rank=error.rank) from None


def least_size(owner: ParallelState, axis: Axis, size: int) -> int:
    """Return the size of the smallest group that this code runs in, of a checked axis and its largest size. *Pure.*"""
    return size if size == 1 or axis in owner.regular_sizes else owner.sizes_here(axis)[0]


def _check_axis(where: str, owner: ParallelState, axis: Axis, state: ParallelState | None) -> None:
    """Refuse an axis that the state does not have, and say whether an outer scope has it."""
    try:
        owner.topology.group_sizes(axis)
        return
    except KeyError:
        error = owner.unknown_axis(axis)
    scope = current_scope() if state is None else None
    hint = ""
    outer = scope.outer if scope is not None else None
    while outer is not None and not hint:
        hint = f" (Outer scope {outer.name!r} has it.)" if axis in outer.state.axis_names else ""
        outer = outer.outer
    message = f"{where}: {error}{hint}"
    raise type(error)(message, axis=axis, axes=owner.axis_names, state=owner)


def admit_array(
    where: str, x: Any, axis: Axis, state: ParallelState | None, *, unequal: bool = False
) -> tuple[ParallelState, Axis, int, str]:
    """Return the state, the axis, its size and the kind of the dtype of `x` ("float" where nothing moves). *Local.*"""
    owner, axis, size = resolve_axis(where, axis, state, unequal=unequal)
    return owner, axis, size, "float" if size == 1 else owner.collectives.admit(where, x, axis)


def check_reduction(where: str, op: str, kind: str, allowed: dict[str, tuple[str, ...]]) -> None:
    """Refuse a reduction that does not exist, or that the dtype does not have. *Pure.*"""
    if not isinstance(op, str) or op not in allowed:
        raise ArgumentError(f"{where}: op={op!r}. Allowed: {listed(allowed)}.", op=op)
    if kind not in allowed[op]:
        raise ArrayTypeError(
            f"{where}: the {op} of {kind} values is not defined. Kinds that have one: {listed(allowed[op])}. Convert "
            f"the array first.",
            op=op,
            kind=kind,
        )


def checked_dim(where: str, x: Any, dim: int) -> int:
    """Return a dim of `x` counted from 0, or refuse it. *Pure.*"""
    dims = len(x.shape)
    number = dim if type(dim) is int else whole(dim)
    if number is None or not -dims <= number < dims:
        allowed = f"Dims are {-dims}..{dims - 1}." if dims else "It has no dims: reshape it to (1,) first."
        raise ShapeError(
            f"{where}: dim {dim!r} is out of range for shape {tuple(x.shape)}. {allowed}", dim=dim, shape=tuple(x.shape)
        )
    return number % dims


def check_divides(where: str, x: Any, dim: int, axis: Axis, size: int) -> int:
    """Return a dim of `x` counted from 0, or refuse it where the size of the axis does not divide it. *Pure.*"""
    dim = checked_dim(where, x, dim)
    length = x.shape[dim]
    if length % size:
        raise ShapeError(
            f"{where}: dim {dim} of shape {tuple(x.shape)} has size {length}, which axis {axis!r} with "
            f"{counted(size, 'index', 'indices')} does not divide. Pad dim {dim} to {-(-length // size) * size}.",
            dim=dim,
            axis=axis,
            size=size,
            shape=tuple(x.shape),
        )
    return dim


def checked_index(where: str, name: str, value: Any, axis: Axis, size: int) -> int:
    """Return an index of an axis as an int, or refuse it. *Pure.*"""
    if type(value) is int and 0 <= value < size:
        return value
    index = whole(value)
    if index is None or not 0 <= index < size:
        raise ArgumentError(
            f"{where}: {name}={value!r} is no index of axis {axis!r}. Indices are 0..{size - 1} along the axis, not "
            f"global ranks.",
            axis=axis,
            **{name: value},
        )
    return operator.index(index)
