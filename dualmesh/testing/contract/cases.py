"""Which collectives run, over which axes of which world, on which blocks: plain data that travels to workers."""

from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import numpy as np

from dualmesh.testing.contract.oracle import COMBINED, TOPOLOGIES, VIEWS, groups, sent_rows


@dataclass(frozen=True)
class Case:
    """One call of `dm.ops`: `shape` is the shape of every rank's block."""

    verb: str
    axis: Any
    settings: tuple[tuple[str, Any], ...]
    shape: tuple[int, ...]
    dtype: str = "float64"
    memory: str = field(default="contiguous", kw_only=True)
    """How the block that the op gets lies in memory: contiguous, transposed, strided, expanded."""

    @property
    def has_gradient(self) -> bool:
        op = dict(self.settings).get("op", "sum")
        return self.verb != "axis_index" and op in ("sum", "mean") and self.dtype in ("float32", "float64")

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.settings)
        return f"{self.verb}({self.axis!r}, {settings}) of {self.memory} {self.dtype}{self.shape}"

    def blocks(self, world: int) -> np.ndarray:
        """Blocks of all ranks, (world, *shape): every element and every rank differs."""
        values = _values(crc32(str(self).encode()), (world, *self.shape), self.dtype)
        return np.broadcast_to(values[:, :1], values.shape) if self.memory == "expanded" else values

    def gradient(self, blocks: np.ndarray) -> np.ndarray:
        """The gradient of what was laid out in memory, from that of what the op got."""
        if self.memory != "expanded":
            return blocks
        gradient = np.zeros_like(blocks)
        gradient[:, 0] = blocks.sum(1)
        return gradient


def cotangent(case: Case, shape: tuple[int, ...]) -> np.ndarray:
    """A random weight for every element of the result of a case."""
    return _values(crc32(str(case).encode()) + 1, shape, "float64").astype(case.dtype)


def _values(seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    random = np.random.default_rng(seed)
    kind = np.dtype(dtype).kind
    if kind == "b":
        return random.random(shape) < 0.5
    if kind in "iu":
        return random.integers(0, 30, shape).astype(dtype)
    real = random.permutation(int(np.prod(shape, dtype=int))).reshape(shape) / 64 - 3 + random.random(shape) / 128
    return (real + 1j * np.flip(real) if kind == "c" else real).astype(dtype)


def axes_of(world: int) -> list[Any]:
    """Every kind of axis that a world has: single, of size 1, combined, against grid order, view, world."""
    tuples: dict[int, list[Any]] = {
        4: [("b", "a")],
        6: [("b", "a")],
        8: [("c", "a"), ("a", "c"), ("b", "a", "c"), ("c", "b")],
    }
    view: dict[str, Any] = VIEWS.get(world, {"axes": ()})
    return [*TOPOLOGIES[world], *COMBINED.get(world, ()), *view["axes"], *tuples.get(world, ()), "world"]


def case(
    verb: str, axis: Any, shape: tuple[int, ...], dtype: str = "float64", *, memory: str = "contiguous", **k: Any
) -> Case:
    """Write down a case."""
    return Case(verb, axis, tuple(k.items()), shape, dtype, memory=memory)


def grid(world: int) -> list[Case]:
    """Every verb with every setting over every axis."""
    sizes = {axis: groups(world, axis).shape[1] for axis in axes_of(world)}
    listed = next((axis for axis in sizes if not isinstance(axis, str)), None)
    laid = [case for axis in ("a", "world", listed) if axis in sizes for case in _laid_over(axis, sizes[axis])]
    return [case for axis, n in sizes.items() for case in _over(axis, n)] + laid


def _over(axis: Any, n: int) -> list[Case]:
    shape = (n, 2 * n, 3 * n)
    cases = [case("all_reduce", axis, (2, 3), op=op) for op in ("sum", "mean", "max", "min")]
    cases += [case("all_reduce", axis, (), op="sum")]
    cases += [case("all_gather", axis, (2, 3, 4), dim=dim) for dim in (0, 1, -1)]
    cases += [case("reduce_scatter", axis, shape, dim=dim, op="sum") for dim in (0, -1)]
    cases += [case("reduce_scatter", axis, shape, dim=-2, op="mean")]
    pairs = [(0, 1), (1, 0), (-1, 0), (0, -1), (1, 1)]
    cases += [case("all_to_all", axis, shape, split_dim=split, concat_dim=concat) for split, concat in pairs]
    cases += [case("broadcast", axis, (2, 3), src=src) for src in sorted({0, n - 1})]
    cases += [case("shift", axis, (2, 3), offset=offset) for offset in (1, -1, n + 1)]
    cases += [case("shift", axis, (2, 3), offset=offset, wrap=False) for offset in (1, -1)]
    backwards = tuple((i, n - 1 - i) for i in range(n))
    cases += [case("permute", axis, (2, 3), pairs=pairs) for pairs in (backwards, ((0, n - 1),), ())]
    cases += [case("take_block", axis, shape, dim=dim) for dim in (0, -2)]
    cases += [case("enter", axis, (2, 3)), case("leave", axis, (2, 3)), case("axis_index", axis, (2,))]
    cases += [_ragged(axis, [[(2 * i + j) % 3 for j in range(n)] for i in range(n)], 2)]
    cases += [_ragged(axis, [[i if j == 0 else 0 for j in range(n)] for i in range(n)], 3)]
    return cases


def _laid_over(axis: Any, n: int) -> list[Case]:
    """Blocks that do not lie densely in memory; along one axis of every kind of group."""
    laid: list[tuple[str, dict[str, Any]]] = [
        ("all_gather", {"dim": 0}),
        ("all_to_all", {"split_dim": 2, "concat_dim": 0}),
        ("broadcast", {"src": 0}),
    ]
    laid += [("reduce_scatter", {"dim": 1}), ("all_reduce", {"op": "sum"}), ("shift", {"offset": 1})]
    laid += [("take_block", {"dim": 1}), ("permute", {"pairs": ((0, n - 1),)})]
    around = tuple(tuple((n - 1) * (j == (i + 1) % n) for j in range(n)) for i in range(n))
    if axis == "a":  # these move blocks as all_reduce and all_to_all do, which are laid out along the others too
        laid += [("leave", {}), ("ragged_all_to_all", {"counts": around, "rows": n})]
    kinds = ("transposed", "strided", "expanded")
    shape = (n, 2 * n, 3 * n)
    return [case(verb, axis, shape, memory=kind, **settings) for verb, settings in laid for kind in kinds]


def _ragged(axis: Any, counts: list[list[int]], width: int, dtype: str = "float64") -> Case:
    """An exchange of counts[i][j] rows from i to j, some of them 0; no index sends or receives all that it could."""
    table = tuple(map(tuple, counts))
    rows = max(map(sum, zip(*counts, strict=True))) + 1
    return case("ragged_all_to_all", axis, (sent_rows(table), width), dtype, counts=table, rows=rows)


DTYPES = (
    *("bool", "int8", "uint8", "int16", "int32", "int64", "float16", "float32", "float64"),
    *("complex64", "complex128"),
)


def dtypes() -> list[Case]:
    """Every dtype through every verb that defines it, and arrays without elements, on a world of 4."""
    cases = []
    for dtype in DTYPES:
        moves: list[tuple[str, dict[str, Any]]] = [
            ("all_gather", {"dim": 1}),
            ("all_to_all", {"split_dim": 0, "concat_dim": 1}),
            ("broadcast", {"src": 1}),
        ]
        moves += [("permute", {"pairs": ((1, 0),)}), ("shift", {"offset": 1}), ("take_block", {"dim": 0})]
        kind = np.dtype(dtype).kind
        ops: dict[str, tuple[str, ...]] = {
            "b": (),
            "i": ("sum", "max", "min"),
            "u": ("sum", "max"),
            "f": ("sum", "mean", "max"),
            "c": ("sum", "mean"),
        }
        moves += [("enter", {}), ("leave", {})] if kind != "b" else []
        moves += [("all_reduce", {"op": op}) for op in ops[kind]]
        moves += [("reduce_scatter", {"dim": 0, "op": op}) for op in ops[kind] if op in ("sum", "mean")]
        cases += [case(verb, "a", (2, 3), dtype, **settings) for verb, settings in moves]
        cases += [_ragged("a", [[1, 0], [2, 1]], 2, dtype)]
    empty: list[tuple[str, dict[str, Any]]] = [
        ("all_gather", {"dim": 0}),
        ("all_reduce", {"op": "sum"}),
        ("reduce_scatter", {"dim": 0}),
    ]
    empty += [("all_to_all", {"split_dim": 0, "concat_dim": 1}), ("broadcast", {"src": 0}), ("shift", {"offset": 1})]
    return cases + [case(verb, "a", (0, 3), **settings) for verb, settings in empty]
