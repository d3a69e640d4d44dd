"""`aot`: functions compiled ahead of time that refuse to run in another state than the one they were lowered in.

A jitted function is traced anew for every state; one that was lowered and compiled (`fn.lower(...).compile()`) keeps
the answers of the scope that it was lowered in, and would give them anywhere.
"""

from collections.abc import Callable
from typing import Any

from dualmesh.backend.state import ParallelState
from dualmesh.errors import ArgumentError, ScopeError, listed
from dualmesh.runtime.registry import Naming, registry
from dualmesh.runtime.scope import get_parallel_state, scope_name


class AheadOfTime:
    """What `aot` returns: calls the function, and lowers it for the ambient state."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._fn(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> "ScopedStage":
        """Trace the function for these arguments and the ambient state. *Local.*"""
        traced = self._fn.trace(*args, **kwargs)  # type: ignore[attr-defined]
        return ScopedStage(traced, get_parallel_state(), scope_name(), registry.naming)

    def lower(self, *args: Any, **kwargs: Any) -> "ScopedStage":
        """Lower the function for these arguments and the ambient state. *Local.*"""
        lowered = self._fn.lower(*args, **kwargs)  # type: ignore[attr-defined]
        return ScopedStage(lowered, get_parallel_state(), scope_name(), registry.naming)


class ScopedStage:
    """A traced, lowered or compiled function with the state that it was traced in; anything else is the framework's.

    `naming` is what the names that traced code looked up meant then.
    """

    def __init__(self, stage: Any, state: ParallelState, name: str | None, naming: Naming) -> None:
        self._stage = stage
        self._state = state
        self._name = name
        self._naming = naming

    def lower(self, *args: Any, **kwargs: Any) -> "ScopedStage":
        """Lower what was traced, in the state that it was traced in: the framework looks at its mesh again. *Local.*

        Raises:
            ScopeError: Another state is ambient.
        """
        self._require_here("lowered")
        return ScopedStage(self._stage.lower(*args, **kwargs), self._state, self._name, self._naming)

    def compile(self, *args: Any, **kwargs: Any) -> "ScopedStage":
        """Compile what was lowered. *Local.*"""
        return ScopedStage(self._stage.compile(*args, **kwargs), self._state, self._name, self._naming)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._require_here("called")
        if not callable(self._stage):
            raise ArgumentError(
                f"aot: a {type(self._stage).__name__} function is not compiled yet. Call its .compile()."
            )
        return self._stage(*args, **kwargs)

    def _require_here(self, done: str) -> None:
        here = get_parallel_state()
        if here is not self._state:
            raise ScopeError(
                f"aot: this function was traced in {self._name!r} ({self._state.label}) and is {done} in "
                f"{scope_name()!r} ({here.label}), where its sizes and meshes are others. Call it under "
                f"dm.use_parallel_state({self._name!r}), or lower and compile it once per state.",
                lowered_in=self._state,
                called_in=here,
            )
        here.require_live("aot")
        renamed = sorted({name for name, _ in registry.naming ^ self._naming})
        if renamed:
            raise ScopeError(
                f"aot: since this function was traced, names that traced code looked up mean other states, or none: "
                f"{listed(map(repr, renamed))}. It would give the old ones' answers: lower and compile it anew.",
                names=tuple(renamed),
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)


def aot(fn: Callable[..., Any]) -> AheadOfTime:
    """Return a jitted function whose `.lower(...).compile()` refuses to run in another state than then. *Local.*

    The state must be the one in which it was lowered, or traced (`.trace(...).lower().compile()`); the name that it is
    entered by may be another.

    Args:
        fn: What `jax.jit` returns.

    Raises:
        ArgumentError: `fn` cannot be lowered.
    """
    if not callable(fn) or not hasattr(fn, "lower"):
        raise ArgumentError(f"aot: {fn!r} cannot be lowered. Give a jitted function: dm.aot(jax.jit(fn)).", fn=fn)
    return AheadOfTime(fn)
