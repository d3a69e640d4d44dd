"""Functions of global arrays and their gradients, as a backend lifts, differentiates and sums them.

Arguments arrive checked (`arrays.transforms` and `arrays.loss` do that).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dualmesh._support.warn import caution
from dualmesh.errors import BackendError, listed
from dualmesh.sharding.partition_spec import P
from dualmesh.topology.topology import Axis

if TYPE_CHECKING:
    from dualmesh.topology.averaging import AveragingPlan


class Programs(ABC):
    """Functions of global arrays."""

    @abstractmethod
    def shard_map(
        self,
        fn: Callable[..., Any],
        in_specs: Any,
        out_specs: Any,
        axes: tuple[str, ...] | None,
        check_replicated: bool,
    ) -> Callable[..., Any]:
        """Return `fn` lifted from per-rank blocks to global arrays; see `dualmesh.shard_map`."""

    @abstractmethod
    def value_and_grad(self, fn: Callable[..., Any], argnums: tuple[int, ...]) -> Callable[..., tuple[Any, Any]]:
        """Return a function that gives (value, tuple of gradients by argnums) of a global scalar."""

    @abstractmethod
    def remat(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return `fn` whose forward is recomputed in backward, under the scope that its forward had."""

    @abstractmethod
    def sum_gradients(self, model: Any) -> None:
        """Make every gradient reduction that wrappers in `model` do a plain sum over the ranks that must be summed.

        Backends of frameworks with wrappers also take `axis`, `unwrapped` and `blocks` of `dualmesh.sum_gradients`,
        by name.
        """

    @abstractmethod
    def sync_gradients(self, params: Any, axis: Axis) -> Any:
        """Sum the gradients of replicated parameters over the axis; return them."""

    @abstractmethod
    def global_norm(self, tree: Any, order: float, axis: Axis | None) -> Any:
        """Return the norm of all global arrays in a tree together, a scalar; `order` is above 0 or inf.

        Blocks, which differ along `axis` only, count as global arrays that are split over it.
        """

    def clip_grad_norm_(
        self,
        parameters: Any,
        max_norm: float,
        order: float,
        blocks: Mapping[Axis, Any],
        error_if_nonfinite: bool,
    ) -> Any:
        """Scale gradients in place; return their norm before. For frameworks whose parameters hold gradients.

        Raises:
            BackendError: The framework's gradients are values.
        """
        raise BackendError(
            "clip_grad_norm_: the gradients of this backend are values, which nothing changes in place. Multiply them "
            "by min(1, max_norm / (dm.global_norm(gradients) + 1e-6))."
        )

    def federated_mean(self, tree: Any, plan: "AveragingPlan") -> Any:
        """Carry out a plan of federated averaging for the state's ranks; see `dualmesh.federated_mean`."""
        raise BackendError(f"federated_mean: {type(self).__qualname__} does not offer it. Use torch, jax or sim.")


FORGOTTEN = (
    "shard_map in_specs: an argument of shape {shape} is split over {axes}, which {spec!r} leaves out, so each call "
    "gathers it and every rank gets all of it. Name the axis in the spec; where it is meant, lay the argument out with "
    "dm.constrain first."
)


def warn_of_forgotten(spec: P, shape: Sequence[int], axes: Sequence[str]) -> None:
    """Warn that a spec leaves out axes over which its argument is split. *Local.*"""
    caution(FORGOTTEN.format(shape=tuple(shape), axes=listed(axes), spec=spec))
