"""Whole models, as a backend reads them and lays them out.

Which spec a parameter gets is in `arrays.plan`; containers without a framework are in `plain_models`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dualmesh.sharding.partition_spec import P


class Models(ABC):
    """Whole models: trees of arrays, or modules, laid out array by array. Specs come checked, in the model's order."""

    @abstractmethod
    def parameters(self, model: Any) -> "list[tuple[str, Any]]":
        """Return (path, array) of everything in a model that gets a spec. A path is keys joined by dots."""

    @abstractmethod
    def filled(self, model: Any, values: Sequence[Any]) -> Any:
        """Return a tree like the model with a value in place of every array; of a module, {path: value}."""

    @abstractmethod
    def abstract(self, model: Any, specs: Sequence[P]) -> Any:
        """Return such a tree of what has the shapes, dtypes and shardings of the arrays, and no memory."""

    @abstractmethod
    def apply(self, model: Any, specs: Sequence[P], units: Mapping[str, tuple[str, ...] | None]) -> Any:
        """Return the model laid out over the ranks.

        `units` are patterns of modules that a wrapper gathers as one, each with the axes that the wrapper splits over,
        or None for the usual ones.
        """

    @abstractmethod
    def init(self, fn: Callable[..., Any], specs_of: Callable[[Any], Sequence[P]], args: Sequence[Any]) -> Any:
        """Return `fn(*args)` laid out as `specs_of(model)` says, with no process holding all of it where it can be."""
