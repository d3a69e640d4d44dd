"""What can be broken on purpose: wrong collectives, and wrong functions of dualmesh.

Breaking it while a block runs is in `injection`. Values that stay right while gradients go wrong are the rule here:
these are the faults that loss curves hide.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import dualmesh
from dualmesh._support.optional_imports import array_api_compat
from dualmesh.backend.collectives import Collectives
from dualmesh.backend.state import ParallelState
from dualmesh.runtime.scope import get_parallel_state
from dualmesh.sequence import ring
from dualmesh.topology.topology import Axis

MOVING = ("all_gather", "all_to_all", "broadcast", "permute", "shift", "ragged_all_to_all")
SUMMING = ("all_reduce", "reduce_scatter", "leave")


@dataclass(frozen=True)
class Called:
    """A collective that a program calls, and the unbroken `collectives` that carry it out."""

    collectives: Collectives
    owner: ParallelState
    verb: str
    x: Any
    axis: Axis
    settings: dict[str, Any]

    @property
    def size(self) -> int:
        """The size of the axis."""
        return int(max(self.owner.group_sizes(self.axis)))

    @property
    def is_float(self) -> bool:
        """Whether it has a gradient."""
        return "float" in str(self.x.dtype)

    def done(self, x: Any = None, **changed: Any) -> Any:
        """Return the right result, of another block or with other settings."""
        return getattr(self.collectives, self.verb)(
            self.x if x is None else x, self.axis, **{**self.settings, **changed}
        )

    def cut(self, y: Any) -> Any:
        """Return a value without its gradient."""
        return self.collectives.stop_gradient(y)


def _grad_times(factor: Callable[[Called], float]) -> Callable[[Called], Any]:
    def wrong(called: Called) -> Any:
        y = called.done()
        return y + (factor(called) - 1.0) * (y - called.cut(y)) if called.is_float else y

    return wrong


def _sent_on(called: Called) -> Any:
    """A permutation or shift whose gradient goes on instead of back."""
    y = called.cut(called.done())
    if not called.is_float:
        return y
    if called.verb == "shift":
        back = called.done(offset=-called.settings["offset"])
    else:
        back = called.done(pairs=tuple((dst, src) for src, dst in called.settings["pairs"]))
    return y + (back - called.cut(back))


def _swap(called: Called) -> Any:
    """Indices 0 and 1 of the axis take each other's place before the collective."""
    pairs = ((0, 1), (1, 0), *((i, i) for i in range(2, called.size)))
    return called.done(called.collectives.permute(called.x, called.axis, pairs=pairs))


def _without_last(called: Called) -> Any:
    """The last index of the axis brings zeros."""
    index = called.collectives.axis_index(called.axis)
    xp = array_api_compat.array_namespace(called.x)
    last = called.size - 1
    if isinstance(index, int):
        return called.done(called.x * 0 if index == last else called.x)
    return called.done(xp.where(index == last, xp.zeros_like(called.x), called.x))


def _average(called: Called) -> Any:
    return called.done() / called.size if called.is_float else called.done()


@dataclass(frozen=True)
class Patch:
    """A function of dualmesh to replace."""

    where: Any
    name: str
    wrong: Callable[[Any], Callable[..., Any]]
    """Makes the wrong function from the right one."""
    over: Callable[..., tuple[ParallelState, Axis]] | None = None
    """From the arguments of a call, the state and the axis that it is over; None: a call is over none that it names."""


@dataclass(frozen=True)
class Fault:
    """What `inject` can break."""

    what: str
    verbs: tuple[str, ...] = ()
    wrong: Callable[[Called], Any] | None = None
    part: str | None = None
    """The role whose axes alone are broken."""
    patch: Patch | None = None


def _over_loss(_first: Any, *arguments: Any, axis: Any = None, state: ParallelState | None = None, **_: Any) -> Any:
    owner = get_parallel_state() if state is None else state
    named = arguments[-1] if arguments and isinstance(arguments[-1], str | tuple) else axis
    return owner, owner.topology.role("loss") if named is None else named


def _own_total(right: Any) -> Any:
    def wrong(loss_sum: Any, count: Any, *arguments: Any, total: Any = None, **settings: Any) -> Any:
        return right(loss_sum, count, *arguments, total=count, **settings)

    return wrong


def _mean_of_gradients(right: Any) -> Any:
    def wrong(params: Any, *arguments: Any, **settings: Any) -> Any:
        found = right(params, *arguments, **settings)
        owner, axis = _over_loss(params, *arguments, **settings)
        for parameter in getattr(params, "parameters", lambda: params)():
            parameter.grad /= owner.size(axis)
        return found

    return wrong


def _stale_maximum(right: Any) -> Any:
    def wrong(xp: Any, first: Any, second: Any) -> Any:
        numerator, denominator, highest = right(xp, first, second)
        old = xp.exp(first[2] - highest)
        return numerator + first[0] * (1 - old), denominator + first[1] * (1 - old), highest

    return wrong


_EVERY = (*MOVING, *SUMMING, "take_block", "enter")
FAULTS = {
    "grad_times_size": Fault(
        "gradients come multiplied by the size of the axis", _EVERY, _grad_times(lambda c: c.size)
    ),
    "grad_times_sp": Fault(
        "gradients of sequence parallelism come multiplied by its size",
        _EVERY,
        _grad_times(lambda c: c.size),
        part="sequence",
    ),
    "grad_wrong_factor": Fault("gradients come multiplied by 1.5", _EVERY, _grad_times(lambda c: 1.5)),
    "grad_wrong_way": Fault("gradients of permutations go on instead of back", ("permute", "shift"), _sent_on),
    "grad_not_summed": Fault("the gradient of `enter` is not summed", ("enter",), lambda c: c.x),
    "swap_ranks": Fault("indices 0 and 1 are swapped", MOVING, _swap),
    "drop_last_shard": Fault("the last index brings zeros", (*MOVING, *SUMMING), _without_last),
    "mean_for_sum": Fault("sums are divided by the size of the axis", SUMMING, _average),
    "own_total": Fault(
        "token_mean divides by its own count", patch=Patch(dualmesh, "token_mean", _own_total, _over_loss)
    ),
    "wrappers_average": Fault(
        "dm.sum_gradients does nothing",
        patch=Patch(dualmesh, "sum_gradients", lambda right: lambda model, **settings: None),
    ),
    "gradients_averaged": Fault(
        "dm.sync_gradients averages (torch)", patch=Patch(dualmesh, "sync_gradients", _mean_of_gradients, _over_loss)
    ),
    "stale_maximum": Fault("ring attention merges without rescaling", patch=Patch(ring, "_merge", _stale_maximum)),
}
"""What `inject` can break, by name."""
