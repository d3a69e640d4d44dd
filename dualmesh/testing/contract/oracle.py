"""What every collective means, in numpy on the blocks of all ranks at once, and its exact transpose.

Written from the definitions (DESIGN section 6), from no backend's code and not from the core's layout algebra: groups
come from reshaping an array of ranks.
"""

from typing import Any

import numpy as np

TOPOLOGIES: dict[int, dict[str, int]] = {
    1: {"a": 1, "b": 1},
    2: {"a": 2, "b": 1},
    3: {"a": 3, "b": 1},
    4: {"a": 2, "b": 2},
    6: {"a": 3, "b": 2},
    8: {"a": 2, "b": 2, "c": 2},
}
COMBINED: dict[int, dict[str, tuple[str, ...]]] = {8: {"bc": ("b", "c"), "ca": ("c", "a")}}
VIEWS: dict[int, Any] = {8: {"over": ("a", "b", "c"), "axes": {"wide": 2, "narrow": 4}}}


def members(world: Any, axis: Any) -> Any:
    """The base axes of a name or tuple of names, slowest first."""
    names = (axis,) if isinstance(axis, str) else axis
    known = {"world": tuple(TOPOLOGIES[world]), **COMBINED.get(world, {})}
    return tuple(base for name in names for base in known.get(name, (name,)))


def groups(world: Any, axis: Any) -> Any:
    """All groups of an axis, shape (n, size); position in a row is the index."""
    sizes = TOPOLOGIES[world]
    view = VIEWS.get(world)
    ranks = np.arange(world).reshape(list(sizes.values()))
    if view and axis in view["axes"]:
        position = list(view["axes"]).index(axis)
        cube = _last(ranks, sizes, view["over"]).reshape(-1, *view["axes"].values())
        moved = np.moveaxis(cube, 1 + position, -1)
        return moved.reshape(-1, moved.shape[-1])
    return _last(ranks, sizes, members(world, axis))


def _last(ranks: Any, sizes: Any, axes: Any) -> Any:
    order = [name for name in sizes if name not in axes] + list(axes)
    size = int(np.prod([sizes[name] for name in axes], dtype=int))
    return ranks.transpose([list(sizes).index(name) for name in order]).reshape(-1, size)


def forward(verb: Any, blocks: Any, size: Any, **k: Any) -> Any:
    """The results of one group, in index order, from its blocks in index order."""
    return _FORWARD[verb](np.stack(blocks), size, **k)


def backward(verb: Any, cotangents: Any, size: Any, **k: Any) -> Any:
    """The cotangents of the inputs from the cotangents of the results."""
    return _BACKWARD[verb](np.stack(cotangents), size, **k)


def _all_reduce(x: Any, n: Any, op: Any) -> Any:
    reduce: Any = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}[op]
    keep = {"dtype": x.dtype} if op in ("sum", "mean") else {}
    return [reduce(x, axis=0, **keep)] * n


def _all_gather(x: Any, n: Any, dim: Any) -> Any:
    return [np.concatenate(list(x), axis=dim)] * n


def _reduce_scatter(x: Any, n: Any, dim: Any, op: Any = "sum") -> Any:
    return np.split(_all_reduce(x, n, op)[0], n, axis=dim)


def _all_to_all(x: Any, n: Any, split_dim: Any, concat_dim: Any) -> Any:
    cut = [np.split(block, n, axis=split_dim) for block in x]
    return [np.concatenate([cut[sender][i] for sender in range(n)], axis=concat_dim) for i in range(n)]


def _broadcast(x: Any, n: Any, src: Any) -> Any:
    return [x[src]] * n


def _shift(x: Any, n: Any, offset: Any, wrap: Any = True) -> Any:
    zero = np.zeros_like(x[0])
    return [x[(i - offset) % n] if wrap or 0 <= i - offset < n else zero for i in range(n)]


def _permute(x: Any, n: Any, pairs: Any) -> Any:
    out = [np.zeros_like(x[0]) for _ in range(n)]
    for src, dst in pairs:
        out[dst] = x[src]
    return out


def _take_block(x: Any, n: Any, dim: Any) -> Any:
    return [np.split(x[i], n, axis=dim)[i] for i in range(n)]


def sent_rows(counts: Any) -> int:
    """The rows that every index has in these cases: one more than the most that any of them sends."""
    return max(map(sum, counts)) + 1


def _ragged_all_to_all(x: Any, n: Any, counts: Any, rows: Any) -> Any:
    out = np.zeros((n, rows, *x[0].shape[1:]), x[0].dtype)
    for receiver, filled in zip(range(n), out, strict=True):
        parts = [x[sender][_sent(counts, sender, receiver)] for sender in range(n)]
        filled[: sum(map(len, parts))] = np.concatenate(parts)
    return list(out)


def _sent(counts: Any, sender: Any, receiver: Any) -> slice:
    first = sum(counts[sender][:receiver])
    return slice(first, first + counts[sender][receiver])


def _enter(x: Any, n: Any) -> Any:
    return list(x)


def _leave(x: Any, n: Any) -> Any:
    return _all_reduce(x, n, "sum")


def _axis_index(x: Any, n: Any) -> Any:
    return [np.full_like(x[i], i) for i in range(n)]


def _all_reduce_t(d: Any, n: Any, op: Any) -> Any:
    return _all_reduce(d, n, op)


def _all_gather_t(d: Any, n: Any, dim: Any) -> Any:
    return np.split(d.sum(0), n, axis=dim)


def _reduce_scatter_t(d: Any, n: Any, dim: Any, op: Any = "sum") -> Any:
    return [np.concatenate(list(d), axis=dim) / (n if op == "mean" else 1)] * n


def _all_to_all_t(d: Any, n: Any, split_dim: Any, concat_dim: Any) -> Any:
    cut = [np.split(block, n, axis=concat_dim) for block in d]
    return [np.concatenate([cut[receiver][i] for receiver in range(n)], axis=split_dim) for i in range(n)]


def _broadcast_t(d: Any, n: Any, src: Any) -> Any:
    return [d.sum(0) if i == src else np.zeros_like(d[0]) for i in range(n)]


def _shift_t(d: Any, n: Any, offset: Any, wrap: Any = True) -> Any:
    return _shift(d, n, -offset, wrap)


def _permute_t(d: Any, n: Any, pairs: Any) -> Any:
    return _permute(d, n, [(dst, src) for src, dst in pairs])


def _take_block_t(d: Any, n: Any, dim: Any) -> Any:
    zero = np.zeros_like(d[0])
    return [np.concatenate([d[i] if j == i else zero for j in range(n)], axis=dim) for i in range(n)]


def _ragged_all_to_all_t(d: Any, n: Any, counts: Any, rows: Any) -> Any:
    out = np.zeros((n, sent_rows(counts), *d[0].shape[1:]), d[0].dtype)
    for receiver in range(n):
        first = 0
        for sender in range(n):
            count = counts[sender][receiver]
            out[sender][_sent(counts, sender, receiver)] = d[receiver][first : first + count]
            first += count
    return list(out)


def _enter_t(d: Any, n: Any) -> Any:
    return _leave(d, n)  # no transpose: each index has the whole gradient of its part, and the parts are summed


def _leave_t(d: Any, n: Any) -> Any:
    return list(d)


_FORWARD: dict[str, Any] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "shift": _shift,
    "permute": _permute,
    "take_block": _take_block,
    "ragged_all_to_all": _ragged_all_to_all,
    "enter": _enter,
    "leave": _leave,
    "axis_index": _axis_index,
}
_BACKWARD: dict[str, Any] = {
    "all_reduce": _all_reduce_t,
    "all_gather": _all_gather_t,
    "reduce_scatter": _reduce_scatter_t,
    "all_to_all": _all_to_all_t,
    "broadcast": _broadcast_t,
    "shift": _shift_t,
    "permute": _permute_t,
    "take_block": _take_block_t,
    "ragged_all_to_all": _ragged_all_to_all_t,
    "enter": _enter_t,
    "leave": _leave_t,
}


def everywhere(rule: Any, world: Any, verb: Any, axis: Any, stacked: Any, settings: Any) -> Any:
    """Apply `forward` or `backward` to all groups: stacked has shape (world, *block)."""
    out: list[Any] = [None] * world
    for group in groups(world, axis):
        results = rule(verb, [stacked[rank] for rank in group], len(group), **settings)
        for rank, result in zip(group, results, strict=True):
            out[rank] = result
    return np.stack(out)


def block_of(world: Any, spec: Any, whole: Any, rank: Any) -> Any:
    """The block of a global array that a rank holds; spec: one entry per dim, axis names slowest first."""
    cut = []
    for entry, length in zip(spec, whole.shape, strict=True):
        index, size = 0, 1
        for name in () if entry is None else (entry,) if isinstance(entry, str) else entry:
            rows = groups(world, name)
            index = index * rows.shape[1] + int(np.argwhere(rows == rank)[0][1])
            size *= rows.shape[1]
        width = length // size
        cut.append(slice(index * width, (index + 1) * width))
    return whole[tuple(cut)]
