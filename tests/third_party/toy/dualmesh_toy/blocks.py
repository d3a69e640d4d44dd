"""Collectives: every rank gets all blocks of its group and takes what is its own."""

import numpy as np

from dualmesh.backend import Collectives
from dualmesh.errors import ArrayTypeError, OutsideShardMapError
from dualmesh_toy.threads import here

KINDS = {"b": "bool", "i": "integer", "u": "integer", "f": "float", "c": "complex"}


class ToyCollectives(Collectives):
    """All on top of one swap."""

    def __init__(self, state):
        self._state = state

    def admit(self, where, x, axis):
        if here.get() is None:
            raise OutsideShardMapError(f"{where}: there is a rank only inside dm.shard_map.")
        if not isinstance(x, np.ndarray | np.generic):
            raise ArrayTypeError(f"{where}: {type(x).__name__} is no numpy array.")
        return KINDS[x.dtype.kind]

    def all_reduce(self, x, axis, *, op):
        everything = self._all(x, axis, f"all_reduce {op}")
        if op in ("max", "min"):
            return everything.max(0) if op == "max" else everything.min(0)
        return np.asarray(getattr(everything, op)(0, dtype=x.dtype))

    def all_gather(self, x, axis, *, dim):
        return np.concatenate(list(self._all(x, axis, f"all_gather {dim}")), dim)

    def reduce_scatter(self, x, axis, *, dim, op):
        return self.take_block(self.all_reduce(x, axis, op=op), axis, dim=dim)

    def all_to_all(self, x, axis, *, split_dim, concat_dim):
        everything = self._all(x, axis, f"all_to_all {split_dim} {concat_dim}")
        return np.concatenate([self.take_block(block, axis, dim=split_dim) for block in everything], concat_dim)

    def broadcast(self, x, axis, *, src):
        return self._all(x, axis, f"broadcast {src}")[src].copy()

    def permute(self, x, axis, *, pairs):
        everything = self._all(x, axis, f"permute {pairs}")
        for src, dst in pairs:
            if dst == self.axis_index(axis):
                return everything[src].copy()
        return np.zeros_like(x)

    def ragged_all_to_all(self, x, axis, *, send_counts, recv_counts, rows, sent_rows):
        index = self.axis_index(axis)
        counts = self._all(np.array(send_counts), axis, "ragged counts")
        most = int(self._all(np.array(sent_rows), axis, "ragged rows").max())
        everything = self._all(np.concatenate([x, np.zeros((most - len(x), *x.shape[1:]), x.dtype)]), axis, "ragged")
        parts = [block[sum(c[:index]) : sum(c[: index + 1])] for block, c in zip(everything, counts, strict=True)]
        found = np.concatenate(parts)
        return np.concatenate([found, np.zeros((rows - len(found), *x.shape[1:]), x.dtype)])

    def enter(self, x, axis):
        return x

    def leave(self, x, axis):
        return self.all_reduce(x, axis, op="sum")

    def take_block(self, x, axis, *, dim):
        return np.split(x, self._state.size(axis), dim)[self.axis_index(axis)].copy()

    def axis_index(self, axis):
        return self._state.index(axis)

    def stop_gradient(self, x):
        return x

    def _all(self, x, axis, call):
        crew, rank = here.get()
        return np.stack(crew.swap(rank, self._state.ranks(axis), f"{call} {x.shape} {x.dtype}", np.array(x)))
