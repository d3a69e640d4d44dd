"""Models that are plain containers of arrays, for backends whose framework has no trees or modules of its own.

Which spec each array gets is decided in `plan`; modules and registered trees are read by the backends.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dualmesh._support.optional_imports import np
from dualmesh.backend.models import Models
from dualmesh.errors import ArgumentError
from dualmesh.sharding.param_paths import with_paths
from dualmesh.sharding.partition_spec import P
from dualmesh.sharding.tree import mapped

if TYPE_CHECKING:
    from dualmesh.backend.state import ParallelState


@dataclass(frozen=True)
class AbstractArray:
    """What is known of an array without its values."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: Any


class PlainModels(Models):
    """Nested dicts, lists and tuples of arrays."""

    def __init__(self, state: "ParallelState") -> None:
        self._state = state

    def parameters(self, model: Any) -> list[tuple[str, Any]]:
        return list(with_paths(model))

    def filled(self, model: Any, values: Sequence[Any]) -> Any:
        remaining = iter(values)
        return mapped(lambda _leaf: next(remaining), model)

    def abstract(self, model: Any, specs: Sequence[P]) -> Any:
        remaining = iter(specs)
        return mapped(lambda leaf: self._described(leaf, next(remaining)), model)

    def apply(self, model: Any, specs: Sequence[P], units: Mapping[str, tuple[str, ...] | None]) -> Any:
        refuse_units("apply", units)
        remaining = iter(specs)
        return mapped(lambda leaf: self._state.arrays.distribute(leaf, next(remaining)), model)

    def init(self, fn: Callable[..., Any], specs_of: Callable[[Any], Sequence[P]], args: Sequence[Any]) -> Any:
        model = fn(*args)
        return self.apply(model, specs_of(model), {})

    def _described(self, leaf: Any, spec: P) -> AbstractArray:
        return AbstractArray(tuple(np.shape(leaf)), getattr(leaf, "dtype", type(leaf)), self._state.sharding(spec))


def refuse_units(where: str, units: Iterable[str]) -> None:
    """Refuse units where nothing wraps modules. *Pure.*"""
    if units:
        raise ArgumentError(
            f"{where}: units={tuple(units)!r} are modules of torch that FSDP2 gathers as one. Leave it out for trees "
            f"of arrays.",
            units=tuple(units),
        )
