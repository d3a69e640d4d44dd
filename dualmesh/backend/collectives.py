"""Collectives of per-rank blocks, as a backend carries them out.

Arguments arrive checked and normalised (`ops` does that); the gradient of each is in `transpose_rules`.
"""

from abc import ABC, abstractmethod
from typing import Any, Literal

from dualmesh.backend.pending import Finished, Pending
from dualmesh.topology.topology import Axis

Kind = Literal["bool", "integer", "float", "complex"]


class Collectives(ABC):
    """Per-rank blocks in, per-rank blocks out; differentiable, each with the gradient of `transpose_rules`.

    `reduce` and `place_block`, which the table also names, are for backends that write their backward by hand.

    Dims are non-negative, sizes divide, axes exist and have size > 1 (`permute`, `shift`, `take_block` and
    `axis_index` also come with size 1). Inputs may be non-contiguous. The result never shares memory with the input.
    """

    @abstractmethod
    def admit(self, where: str, x: Any, axis: Axis) -> Kind:
        """Refuse an array or a place in which `where` cannot run; return the kind of the array's dtype.

        Raises:
            ArrayTypeError: `x` is no array of this backend.
            OutsideShardMapError: No rank is defined here.
            StaleStateError: The state's session has ended.
        """

    @abstractmethod
    def all_reduce(self, x: Any, axis: Axis, *, op: str) -> Any:
        """Reduce elementwise over the axis; shape stays. `op` is sum, mean, max or min."""

    @abstractmethod
    def all_gather(self, x: Any, axis: Axis, *, dim: int) -> Any:
        """Concatenate the blocks along `dim` in index order; `dim` grows by the size of the axis."""

    @abstractmethod
    def reduce_scatter(self, x: Any, axis: Axis, *, dim: int, op: str) -> Any:
        """Reduce, then keep block `index` of `dim`. `op` is sum or mean."""

    @abstractmethod
    def all_to_all(self, x: Any, axis: Axis, *, split_dim: int, concat_dim: int) -> Any:
        """Send block j of `split_dim` to index j, concatenate what arrives along `concat_dim` by sender index."""

    @abstractmethod
    def broadcast(self, x: Any, axis: Axis, *, src: int) -> Any:
        """Return the bits of index `src`'s block everywhere."""

    @abstractmethod
    def permute(self, x: Any, axis: Axis, *, pairs: tuple[tuple[int, int], ...]) -> Any:
        """Send each pair's src block to its dst; indices that no pair names as dst get zeros."""

    def shift(self, x: Any, axis: Axis, *, offset: int, wrap: bool, size: int) -> Any:
        """Send each block `offset` indices on, around the end where `wrap`; `size` is the axis'. Here by `permute`."""
        targets = [(src, (src + offset) % size if wrap else src + offset) for src in range(size)]
        return self.permute(x, axis, pairs=tuple((src, dst) for src, dst in targets if 0 <= dst < size))

    @abstractmethod
    def ragged_all_to_all(
        self, x: Any, axis: Axis, *, send_counts: Any, recv_counts: Any, rows: int, sent_rows: int
    ) -> Any:
        """Send runs of rows of `x` to the indices in order; return what arrives by sender, then zeros up to `rows`.

        Counts are tuples of ints, one per index, or traced integers; `sent_rows` is `x.shape[0]`. Also for size 1.
        """

    @abstractmethod
    def enter(self, x: Any, axis: Axis) -> Any:
        """Return `x`; its gradient is summed over the axis. The only result that may share memory with its input."""

    @abstractmethod
    def leave(self, x: Any, axis: Axis) -> Any:
        """Return the sum over the axis; its gradient passes as it is."""

    @abstractmethod
    def take_block(self, x: Any, axis: Axis, *, dim: int) -> Any:
        """Return block `index` of `dim`; communicates nothing."""

    @abstractmethod
    def axis_index(self, axis: Axis) -> Any:
        """Return this rank's index along the axis, an int or a traced integer."""

    @abstractmethod
    def stop_gradient(self, x: Any) -> Any:
        """Return `x` cut off from the gradient."""

    def known_number(self, x: Any) -> float | None:
        """Return the value of a scalar array where looking at it waits for nothing, else None: traced, on a device."""
        return None

    def started(self, verb: str, x: Any, axis: Axis, **settings: Any) -> Pending:
        """Start all_reduce, all_gather, reduce_scatter or all_to_all, with the settings of that method.

        Here it runs to its end; backends that can do other work meanwhile say how.
        """
        return Finished(getattr(self, verb)(x, axis, **settings))
