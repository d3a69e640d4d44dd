"""What a framework must be able to do at the border to another: give arrays away, take them in, differentiate across.

Who calls it, and what may pass, is in `interop`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dualmesh.backend.state import ParallelState
from dualmesh.errors import ShardingError
from dualmesh.sharding.partition_spec import P


@dataclass(frozen=True)
class Piece:
    """What one process holds of an array, between two frameworks."""

    block: Any
    """This rank's block; speaks DLPack."""
    shape: tuple[int, ...]
    """Of the global array; the block's where there is no spec."""
    dtype: str
    """As numpy and ml_dtypes call it: float32, bfloat16, float8_e4m3fn."""
    spec: P | None
    """How the global array is split over the state; None: an array of this process alone."""
    is_fresh: bool = False
    """Whether nobody else knows the block's memory."""


class Linear(NamedTuple):
    """The results of a function, and the way back."""

    results: list[Any]
    rebuild: Callable[[Sequence[Any]], Any]
    """Results, of any framework, into the containers that the function returned."""
    pullback: Callable[[Sequence[Any]], list[Any]]
    """Cotangents of the results (None: zero) to those of the arguments (None: not differentiable)."""


class Border(ABC):
    """One framework's side of `dm.interop`."""

    @abstractmethod
    def owns(self, x: Any) -> bool:
        """Tell whether `x` is an array of this framework. *Local.*"""

    @abstractmethod
    def piece(self, where: str, x: Any, state: ParallelState | None, *, copy: bool) -> Piece:
        """Return what this process holds of an array; with `copy` the block may be fresh memory already. *Local.*

        Raises:
            ArrayTypeError: Another framework cannot take it: a gradient hangs on it, or it is traced.
            ShardingError: It is split over another mesh than the state's.
        """

    @abstractmethod
    def array(self, where: str, piece: Piece, state: ParallelState | None, *, copy: bool) -> Any:
        """Return an array of this framework on a piece's memory, or on a copy of it. *Local.*

        Raises:
            ArrayTypeError: This framework has no such dtype, or would narrow it; or it cannot do without a copy.
        """

    @abstractmethod
    def linearized(self, fn: Callable[..., Any], state: ParallelState | None) -> Callable[[Sequence[Any]], Linear]:
        """Return how to call `fn` on arrays of this framework, keeping the way back. *Local.*

        Args:
            fn: From arrays to nested containers of arrays.
            state: Where the arrays are per-rank blocks, `fn` runs as one rank of it. None: alone.
        """

    @abstractmethod
    def function(self, where: str, call: Callable[[Sequence[Any]], Linear]) -> Callable[..., Any]:
        """Return a differentiable function of this framework that another one computes. *Local.*

        Args:
            where: What messages call it.
            call: From arrays of this framework to results of this framework; its pullback takes and returns them too.
        """


def require_state(where: str, state: ParallelState | None, found: object) -> ParallelState:
    """Return the state that a global array needs. *Pure.*

    Raises:
        ShardingError: There is none.
    """
    if state is None:
        raise ShardingError(
            f"{where}: {found} is split over a mesh, and no parallel state is ambient or given. Call it inside "
            f"dm.use_parallel_state(...), or give state=.",
            found=found,
        )
    return state
