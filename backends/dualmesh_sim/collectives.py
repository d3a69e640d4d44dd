"""Per-rank collectives in numpy: the ranks of a group swap copies, then each computes its own result.

How ranks meet is in `rendezvous`. Reductions run in index order, so they give the same bits every time.
"""

from typing import TYPE_CHECKING, Any

from dualmesh._support.optional_imports import np
from dualmesh.backend.collectives import Collectives, Kind
from dualmesh.errors import AgreementError, ArrayTypeError, OutsideShardMapError
from dualmesh.topology.topology import Axis
from dualmesh_sim.rendezvous import Place, place

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dualmesh_sim.state import SimState

    Block = NDArray[Any]

_KINDS: dict[str, Kind] = {"b": "bool", "i": "integer", "u": "integer", "f": "float", "c": "complex"}


def kind_of(where: str, dtype: Any) -> Kind:
    """Return the kind of a dtype, ml_dtypes' narrow ones included. *Pure.*

    Raises:
        ArrayTypeError: The dtype is no number.
    """
    if dtype.kind in _KINDS:
        return _KINDS[dtype.kind]
    if dtype.type.__module__ == "ml_dtypes":
        return "integer" if "int" in dtype.name else "float"
    raise ArrayTypeError(f"{where}: dtype {dtype} is no number. Give a bool, integer, float or complex array.")


class SimCollectives(Collectives):
    """The collectives of `transpose_rules`, `reduce` and `place_block` included, on numpy blocks."""

    def __init__(self, state: "SimState") -> None:
        self._state = state

    def admit(self, where: str, x: Any, axis: Axis) -> Kind:
        self._here(where)
        if not isinstance(x, np.ndarray | np.generic):
            raise ArrayTypeError(
                f"{where}: found a {type(x).__module__}.{type(x).__qualname__}. Blocks of the sim backend are numpy "
                f"arrays.",
                found=type(x),
            )
        return kind_of(where, x.dtype)

    def all_reduce(self, x: Any, axis: Axis, *, op: str) -> Any:
        return reduce_blocks(self._swap("all_reduce", x, axis, op=op), op)

    def all_gather(self, x: Any, axis: Axis, *, dim: int) -> Any:
        return np.concatenate(self._swap("all_gather", x, axis, dim=dim), axis=dim)

    def reduce_scatter(self, x: Any, axis: Axis, *, dim: int, op: str) -> Any:
        blocks = self._swap("reduce_scatter", x, axis, dim=dim, op=op)
        return self._own_block(reduce_blocks(blocks, op), axis, dim)

    def all_to_all(self, x: Any, axis: Axis, *, split_dim: int, concat_dim: int) -> Any:
        blocks = self._swap("all_to_all", x, axis, split_dim=split_dim, concat_dim=concat_dim)
        return np.concatenate([self._own_block(block, axis, split_dim) for block in blocks], axis=concat_dim)

    def broadcast(self, x: Any, axis: Axis, *, src: int) -> Any:
        return self._swap("broadcast", x, axis, src=src)[src].copy()

    def permute(self, x: Any, axis: Axis, *, pairs: tuple[tuple[int, int], ...]) -> Any:
        if self._state.size(axis) == 1:
            return np.zeros_like(x)
        blocks = self._swap("permute", x, axis, pairs=pairs)
        source = {dst: src for src, dst in pairs}.get(self.axis_index(axis))
        return np.zeros_like(blocks[0]) if source is None else blocks[source].copy()

    def ragged_all_to_all(
        self, x: Any, axis: Axis, *, send_counts: Any, recv_counts: Any, rows: int, sent_rows: int
    ) -> Any:
        index = self.axis_index(axis) if self._state.size(axis) > 1 else 0
        ends = np.cumsum(np.asarray(send_counts))
        parts = [np.asarray(x)[end - count : end] for end, count in zip(ends, send_counts, strict=True)]
        arrived = [sent[index] for sent in self._swap_parts(parts, axis)] if len(parts) > 1 else parts
        found = tuple(part.shape[0] for part in arrived)
        if found != tuple(recv_counts):
            raise AgreementError(
                f"ops.ragged_all_to_all: recv_counts={tuple(recv_counts)} on index {index} of axis {axis!r}, but the "
                f"indices send {found} rows. Exchange the counts first (ops.all_to_all).",
                recv_counts=tuple(recv_counts),
                found=found,
            )
        result = np.zeros((rows, *x.shape[1:]), x.dtype)
        result[: sum(found)] = np.concatenate(arrived)
        return result

    def enter(self, x: Any, axis: Axis) -> Any:
        return x

    def leave(self, x: Any, axis: Axis) -> Any:
        return self.all_reduce(x, axis, op="sum")

    def take_block(self, x: Any, axis: Axis, *, dim: int) -> Any:
        return self._own_block(np.asarray(x), axis, dim)

    def axis_index(self, axis: Axis) -> Any:
        self._here("ops.axis_index")
        return self._state.index(axis)

    def stop_gradient(self, x: Any) -> Any:
        return x

    def known_number(self, x: Any) -> float | None:
        return float(x)

    def reduce(self, x: Any, axis: Axis, *, src: int) -> Any:
        """Sum the blocks to index `src`; zeros elsewhere. The transpose of `broadcast`."""
        total = reduce_blocks(self._swap("reduce", x, axis, src=src), "sum")
        return total if self.axis_index(axis) == src else np.zeros_like(total)

    def place_block(self, x: Any, axis: Axis, *, dim: int) -> Any:
        """Put the block at block `index` of `dim`, zeros around it. The transpose of `take_block`."""
        x = np.asarray(x)
        size, width = self._state.size(axis), x.shape[dim]
        whole = np.zeros((*x.shape[:dim], size * width, *x.shape[dim + 1 :]), x.dtype)
        start = self.axis_index(axis) * width
        whole[(*(slice(None),) * dim, slice(start, start + width))] = x
        return whole

    def _own_block(self, x: "Block", axis: Axis, dim: int) -> "Block":
        width = x.shape[dim] // self._state.size(axis)
        start = self.axis_index(axis) * width
        return x[(*(slice(None),) * dim, slice(start, start + width))].copy()

    def _swap(self, verb: str, x: Any, axis: Axis, **settings: Any) -> "list[Block]":
        """Return the blocks of all indices, in index order; nobody may change them."""
        here = self._here(f"ops.{verb}")
        sent = np.array(x, order="C")
        said = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        call = f"{verb}({said}) of {sent.dtype}{list(sent.shape)}"
        return here.run.exchange(here.rank, self._state.ranks(axis), call, sent)

    def _swap_parts(self, parts: "list[Block]", axis: Axis) -> "list[list[Block]]":
        """Return what all indices send to all indices, in index order; nobody may change it."""
        here = self._here("ops.ragged_all_to_all")
        call = f"ragged_all_to_all() of {parts[0].dtype} rows {list(parts[0].shape[1:])}"
        return here.run.exchange(here.rank, self._state.ranks(axis), call, [part.copy() for part in parts])

    def _here(self, where: str) -> Place:
        here = place()
        if here is None:
            raise OutsideShardMapError(
                f"{where}: this process simulates every rank, so here no rank is defined. Call it inside a function "
                f"given to dm.shard_map.",
                where=where,
            )
        return here


def reduce_blocks(blocks: "list[Block]", op: str) -> "Block":
    """Reduce equal blocks elementwise in index order; the dtype stays. *Pure.*"""
    combine = {"max": np.maximum, "min": np.minimum}.get(op, np.add)
    total = blocks[0].copy()
    for block in blocks[1:]:
        combine(total, block, out=total)
    return np.asarray(total / len(blocks)).astype(total.dtype, copy=False) if op == "mean" else total
