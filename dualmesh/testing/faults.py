"""`inject`: break one thing on purpose, so that a test can be seen to fail.

Values that stay right while gradients go wrong are the rule here: these are the faults that loss curves hide.
"""

import itertools
from collections.abc import Callable
from contextlib import ContextDecorator, ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import dualmesh
from dualmesh.errors import ArgumentError, did_you_mean, listed
from dualmesh.lanes import expanded
from dualmesh.lazy import array_api_compat
from dualmesh.pending import Finished
from dualmesh.registry import registry
from dualmesh.sequence import ring
from dualmesh.state import ParallelState
from dualmesh.testing.instruments import instruments_of
from dualmesh.testing.taps import place, watch
from dualmesh.topology import Axis
from dualmesh.verbs import Collectives

MOVING = ("all_gather", "all_to_all", "broadcast", "permute", "ragged_all_to_all")
SUMMING = ("all_reduce", "reduce_scatter", "leave")
_ids = itertools.count()


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
    """A permutation whose gradient goes on instead of back."""
    y = called.cut(called.done())
    if not called.is_float:
        return y
    back = called.done(pairs=tuple((dst, src) for src, dst in called.settings["pairs"]))
    return y + (back - called.cut(back))


def _swapped(called: Called) -> Any:
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


def _averaged(called: Called) -> Any:
    return called.done() / called.size if called.is_float else called.done()


@dataclass(frozen=True)
class Fault:
    """What `inject` can break."""

    what: str
    verbs: tuple[str, ...] = ()
    wrong: Callable[[Called], Any] | None = None
    part: str | None = None
    """The role whose axes alone are broken."""
    patch: tuple[Any, str, Callable[[Any], Any]] | None = None
    """A function of dualmesh to replace instead: where it is, its name, and what makes the wrong one."""


def _own_total(right: Any) -> Any:
    return lambda loss_sum, count, *args, total=None, **settings: right(loss_sum, count, *args, **settings)


def _mean_of_gradients(right: Any) -> Any:
    def wrong(params: Any, axis: Any = None, **settings: Any) -> Any:
        found = right(params, axis, **settings)
        owner = dualmesh.get_parallel_state()
        size = owner.size(owner.topology.role("loss") if axis is None else axis)
        for parameter in getattr(params, "parameters", lambda: params)():
            parameter.grad /= size
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
    "grad_wrong_way": Fault("gradients of permutations go on instead of back", ("permute",), _sent_on),
    "grad_not_summed": Fault("the gradient of `enter` is not summed", ("enter",), lambda c: c.x),
    "swap_ranks": Fault("indices 0 and 1 are swapped", MOVING, _swapped),
    "drop_last_shard": Fault("the last index brings zeros", (*MOVING, *SUMMING), _without_last),
    "mean_for_sum": Fault("sums are divided by the size of the axis", SUMMING, _averaged),
    "own_total": Fault("token_mean divides by its own count", patch=(dualmesh, "token_mean", _own_total)),
    "wrappers_average": Fault(
        "dm.sum_gradients does nothing", patch=(dualmesh, "sum_gradients", lambda right: lambda model, **settings: None)
    ),
    "gradients_averaged": Fault(
        "dm.sync_gradients averages (torch)", patch=(dualmesh, "sync_gradients", _mean_of_gradients)
    ),
    "stale_maximum": Fault("ring attention merges without rescaling", patch=(ring, "_merged", _stale_maximum)),
}


class inject(ContextDecorator):
    """Break one thing while a block, or the decorated function, runs: to see a test fail. *Local.*

    States that are registered by then are broken in this process; call it on every process. Compiled programs are
    traced anew inside. Where nothing was broken in the end, an error says so.

    Args:
        name: A name of `FAULTS`: grad_times_sp, grad_times_size, grad_wrong_factor, grad_wrong_way, grad_not_summed,
            swap_ranks, drop_last_shard, mean_for_sum, own_total, wrappers_average, gradients_averaged, stale_maximum.
        after: Break only what is called between the tap of this name and the next tap.
        axis: Break only collectives over this axis.
        verb: Break only this collective.

    Raises:
        ArgumentError: No such fault, no state is registered, or nothing was broken.
    """

    def __init__(
        self, name: str, *, after: str | None = None, axis: Axis | None = None, verb: str | None = None
    ) -> None:
        if name not in FAULTS:
            raise ArgumentError(
                f"inject: no fault {name!r}. Faults: {listed(FAULTS)}.{did_you_mean(name, FAULTS)}", fault=name
            )
        self.name, self.after, self.axis, self.verb = name, after, axis, verb
        self.broken = 0
        self._stack: ExitStack | None = None

    def __enter__(self) -> "inject":
        states = registry.states()
        if not states:
            raise ArgumentError("inject: no state is registered here yet. Register the states first, on every process.")
        self.broken = 0
        with ExitStack() as stack:
            for backend in dict.fromkeys(state.backend for state in states):
                stack.enter_context(instruments_of(backend).retraced((next(_ids),)))
            watch.faults += 1
            stack.callback(_end_watch)
            fault = FAULTS[self.name]
            if fault.patch is not None:
                where, attribute, make = fault.patch
                self._set(stack, where, attribute, self._counted(make(getattr(where, attribute))))
            else:
                for state in states:
                    self._set(stack, state, "collectives", _Broken(state, self, fault))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stack is not None:
            self._stack.close()
            self._stack = None
        if kind is None and not self.broken:
            where = f" after the tap {self.after!r}" if self.after else ""
            raise ArgumentError(
                f"inject: {self.name!r} broke nothing: {FAULTS[self.name].what}, but no such call was made{where}.",
                fault=self.name,
            )

    def applies(self, owner: ParallelState, verb: str, axis: Axis) -> bool:
        """Tell whether a call is one to break. *Local.*"""
        fault = FAULTS[self.name]
        if verb not in fault.verbs or (self.verb not in (None, verb)) or (self.after not in (None, place.name)):
            return False
        own = _named(owner, axis)
        allowed = None if self.axis is None else _named(owner, self.axis)
        if fault.part is not None:
            allowed = _named(owner, owner.topology.role(fault.part))
        return owner.size(axis) > 1 and (allowed is None or own <= allowed)

    def _counted(self, wrong: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **settings: Any) -> Any:
            self.broken += 1
            return wrong(*args, **settings)

        return counted

    @staticmethod
    def _set(stack: ExitStack, where: Any, attribute: str, wrong: Any) -> None:
        stack.callback(setattr, where, attribute, getattr(where, attribute))
        setattr(where, attribute, wrong)


class _Broken:
    """The collectives of a state with some of them wrong."""

    def __init__(self, owner: ParallelState, injection: inject, fault: Fault) -> None:
        self._owner = owner
        self._right = owner.collectives
        self._injection = injection
        self._fault = fault

    def started(self, verb: str, x: Any, axis: Axis, **settings: Any) -> Finished:
        """Run to the end what would not wait: so it is broken too."""
        return Finished(getattr(self, verb)(x, axis, **settings))

    def __getattr__(self, verb: str) -> Any:
        right = getattr(self._right, verb)
        wrong = self._fault.wrong
        if verb not in self._fault.verbs or wrong is None:
            return right

        def call(x: Any, axis: Axis, **settings: Any) -> Any:
            if not self._injection.applies(self._owner, verb, axis):
                return right(x, axis, **settings)
            self._injection.broken += 1
            return wrong(Called(self._right, self._owner, verb, x, axis, settings))

        return call


def _named(owner: ParallelState, axis: Axis) -> set[str]:
    return set(expanded(owner.topology, (axis,) if isinstance(axis, str) else axis))


def _end_watch() -> None:
    watch.faults -= 1
    place.name = None
