"""`inject`: break one thing on purpose, so that a test can be seen to fail.

What can be broken is in `faults`.
"""

import itertools
from collections.abc import Callable
from contextlib import ContextDecorator, ExitStack
from types import TracebackType
from typing import Any

from dualmesh._support.checks import is_one_of
from dualmesh.backend.pending import Finished
from dualmesh.backend.state import ParallelState
from dualmesh.errors import ArgumentError, did_you_mean, listed
from dualmesh.runtime.registry import registry
from dualmesh.testing.faults import FAULTS, Called, Fault, Patch
from dualmesh.testing.instruments import instruments_of
from dualmesh.testing.taps import place, watch
from dualmesh.topology.roles import expand_axes
from dualmesh.topology.topology import Axis

_ids = itertools.count()


class inject(ContextDecorator):
    """Break one thing while a block, or the decorated function, runs: to see a test fail. *Local.*

    States that are registered by then are broken in this process; call it on every process. Compiled programs are
    traced anew inside. Where nothing was broken in the end, an error says so.

    Args:
        name: A name of `FAULTS`: grad_times_sp, grad_times_size, grad_wrong_factor, grad_wrong_way, grad_not_summed,
            swap_ranks, drop_last_shard, mean_for_sum, own_total, wrappers_average, gradients_averaged, stale_maximum.
        after: Break only what is called between the tap of this name and the next tap.
        axis: Break only what is called over this axis, or over a part of it.
        verb: Break only this collective.

    Raises:
        ArgumentError: No such fault, a setting that the fault has not, no state is registered, or nothing was broken.
    """

    def __init__(
        self, name: str, *, after: str | None = None, axis: Axis | None = None, verb: str | None = None
    ) -> None:
        if not is_one_of(name, FAULTS):
            raise ArgumentError(
                f"inject: no fault {name!r}. Faults: {listed(FAULTS)}.{did_you_mean(name, FAULTS)}", fault=name
            )
        fault = self.fault = FAULTS[name]
        self.name, self.after, self.axis, self.verb = name, after, axis, verb
        if verb is not None and verb not in fault.verbs:
            breaks = f"the collectives {listed(fault.verbs)}" if fault.verbs else "no collective"
            raise ArgumentError(
                f"inject: {name!r} breaks {breaks}, not {verb!r}. Leave verb= out or name one.", verb=verb
            )
        if axis is not None and fault.patch is not None and fault.patch.over is None:
            raise ArgumentError(f"inject: {name!r} breaks what names no axis. Leave axis={axis!r} out.", axis=axis)
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
            patch = self.fault.patch
            if patch is not None:
                self._set(stack, patch.where, patch.name, self._patched(patch, getattr(patch.where, patch.name)))
            else:
                for state in states:
                    self._set(stack, state, "collectives", _Broken(state, self, self.fault))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stack is not None:
            self._stack.close()
            self._stack = None
        if kind is None and not self.broken:
            limits = [f" after the tap {self.after!r}"] if self.after is not None else []
            limits += [f" over {self.axis!r}"] if self.axis is not None else []
            raise ArgumentError(
                f"inject: {self.name!r} broke nothing: {self.fault.what}, but no such call was made{''.join(limits)} "
                f"where more than one rank takes part.",
                fault=self.name,
            )

    def applies(self, owner: ParallelState, verb: str, axis: Axis) -> bool:
        """Tell whether a collective is one to break. *Local.*"""
        return verb in self.fault.verbs and self.verb in (None, verb) and self._is_here() and self._is_over(owner, axis)

    def _is_here(self) -> bool:
        return self.after in (None, place.name)

    def _is_over(self, owner: ParallelState, axis: Axis) -> bool:
        part = self.fault.part
        limits = [
            limit for limit in (self.axis, None if part is None else owner.topology.role(part)) if limit is not None
        ]
        own = _named(owner, axis)
        return max(owner.group_sizes(axis)) > 1 and all(own <= _named(owner, limit) for limit in limits)

    def _patched(self, patch: Patch, right: Callable[..., Any]) -> Callable[..., Any]:
        wrong = patch.wrong(right)

        def call(*args: Any, **settings: Any) -> Any:
            over = None if patch.over is None else patch.over(*args, **settings)
            if not self._is_here() or (over is not None and not self._is_over(*over)):
                return right(*args, **settings)
            self.broken += 1
            return wrong(*args, **settings)

        return call

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
    return set(expand_axes(owner.topology, (axis,) if isinstance(axis, str) else axis))


def _end_watch() -> None:
    watch.faults -= 1
    place.name = None
