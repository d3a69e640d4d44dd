"""Every collective as data, and its gradient: the gradient contract in one table.

What a collective does to arrays is in the backends (`Collectives`); arguments are checked in `ops`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dualmesh.errors import NotDifferentiableError
from dualmesh.topology.topology import Axis


@dataclass(frozen=True)
class Call:
    """One collective with its settings: `verb` is a method of `Collectives`, `scale` multiplies its result."""

    verb: str
    axis: Axis
    size: int
    settings: tuple[tuple[str, Any], ...] = ()
    scale: float = 1.0

    def __getitem__(self, setting: str) -> Any:
        return dict(self.settings)[setting]

    @cached_property
    def backward(self) -> "Call":
        """`gradient` of it, written down once."""
        return gradient(self)


def call(verb: str, axis: Axis, size: int, *, scale: float = 1.0, **settings: Any) -> Call:
    """Write down a collective. *Pure.*"""
    return Call(verb, axis, size, tuple((name, settings[name]) for name in sorted(settings)), scale)


def transpose(forward: Call) -> Call:
    """Return the collective that maps cotangents of the result to cotangents of the input. *Pure.*

    The objective is the sum over ranks of each rank's scalar, so this is the exact transpose of the linear map
    that `forward` is on the blocks of all ranks together: <d, A x> = <A' d, x>, summed over ranks.

    Raises:
        NotDifferentiableError: max and min have no gradient here.

    >>> transpose(call("all_gather", "dp", 4, dim=1)).verb
    'reduce_scatter'
    """
    return _TRANSPOSES[forward.verb](forward)


def gradient(forward: Call) -> Call:
    """Return the collective that a backend runs on cotangents: the transpose, but for the tensor-parallel pair.

    `enter` and `leave` say what counts once instead of transposing: the gradient of `enter` (an identity) is a sum,
    that of `leave` (a sum) the identity.

    >>> gradient(call("enter", "tp", 2)).verb
    'leave'
    """
    if forward.verb in _PAIR:
        return call(_PAIR[forward.verb], forward.axis, forward.size, scale=forward.scale)
    return transpose(forward)


WITHOUT_GRADIENT = ("max", "min")
_PAIR = {"enter": "leave", "leave": "enter"}


def _all_reduce(forward: Call) -> Call:
    op = forward["op"]
    if op in WITHOUT_GRADIENT:
        raise NotDifferentiableError(
            f"ops.all_reduce(op={op!r}) over {forward.axis!r} has no gradient. Differentiate a sum or mean, or cut the "
            f"graph before it (detach, stop_gradient).",
            op=op,
            axis=forward.axis,
        )
    return forward


def _all_gather(forward: Call) -> Call:
    return call("reduce_scatter", forward.axis, forward.size, dim=forward["dim"], op="sum", scale=forward.scale)


def _reduce_scatter(forward: Call) -> Call:
    scale = forward.scale / (forward.size if forward["op"] == "mean" else 1)
    return call("all_gather", forward.axis, forward.size, dim=forward["dim"], scale=scale)


def _all_to_all(forward: Call) -> Call:
    split_dim, concat_dim = forward["concat_dim"], forward["split_dim"]
    return call(
        "all_to_all", forward.axis, forward.size, split_dim=split_dim, concat_dim=concat_dim, scale=forward.scale
    )


def _broadcast(forward: Call) -> Call:
    return call("reduce", forward.axis, forward.size, src=forward["src"], scale=forward.scale)


def _reduce(forward: Call) -> Call:
    return call("broadcast", forward.axis, forward.size, src=forward["src"], scale=forward.scale)


def _permute(forward: Call) -> Call:
    pairs = tuple(sorted((dst, src) for src, dst in forward["pairs"]))
    return call("permute", forward.axis, forward.size, pairs=pairs, scale=forward.scale)


def _shift(forward: Call) -> Call:
    offset, wrap = -forward["offset"], forward["wrap"]
    return call("shift", forward.axis, forward.size, offset=offset, wrap=wrap, scale=forward.scale)


def _ragged_all_to_all(forward: Call) -> Call:
    return call(
        "ragged_all_to_all",
        forward.axis,
        forward.size,
        send_counts=forward["recv_counts"],
        recv_counts=forward["send_counts"],
        rows=forward["sent_rows"],
        sent_rows=forward["rows"],
        scale=forward.scale,
    )


def _take_block(forward: Call) -> Call:
    return call("place_block", forward.axis, forward.size, dim=forward["dim"], scale=forward.scale)


def _place_block(forward: Call) -> Call:
    return call("take_block", forward.axis, forward.size, dim=forward["dim"], scale=forward.scale)


_TRANSPOSES: dict[str, Callable[[Call], Call]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "permute": _permute,
    "shift": _shift,
    "ragged_all_to_all": _ragged_all_to_all,
    "take_block": _take_block,
    "place_block": _place_block,
}
