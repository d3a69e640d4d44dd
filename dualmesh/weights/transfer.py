"""`transfer`: whole trees of arrays handed from one state to another, over the same, overlapping or other ranks.

Who sends what to whom is planned in `plan`; one array, with a gradient, is for `reshard`; other worlds are
reached in `transfer_link`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dualmesh._support.optional_imports import array_api_compat
from dualmesh.arrays.transforms import shard_map
from dualmesh.backend.state import ParallelState
from dualmesh.errors import ArgumentError, ArrayTypeError
from dualmesh.interop import handed_over
from dualmesh.runtime.registry import registry
from dualmesh.sharding.param_paths import leaves_by_path, path_tree
from dualmesh.sharding.partition_spec import local_shape
from dualmesh.sharding.tree import leaves, mapped
from dualmesh.topology.resolve import positive
from dualmesh.weights.endpoints import Array, End, Held, end_of, pairs_of
from dualmesh.weights.executor import BUFFER_BYTES


@dataclass(frozen=True)
class TransferJob:
    """What is to be moved, and how."""

    source: ParallelState
    target: ParallelState
    given: End
    taken: End
    buffer_bytes: int
    checksum: bool

    def array_by_array(self, tree: Any, reshard: Callable[..., Any]) -> Any:
        """Return the tree, each array moved by itself, fused ones part by part. *Collective over both ends.*"""
        arrays = leaves_by_path("transfer", tree)
        for path, x in arrays.items():
            if not hasattr(x, "shape"):
                raise ArrayTypeError(f"transfer: {path!r} is a {type(x).__qualname__}. Give arrays.", path=path)
        known = {path: Array(tuple(x.shape), 1) for path, x in arrays.items()}
        parts: dict[str, list[tuple[Held, Any]]] = {}
        for array, given, taken in pairs_of(known, self.given, self.taken):
            part = _take_out(arrays[given.path], given, array.shape, self.source)
            moved = reshard(part, taken.spec, self.source, given.spec)
            parts.setdefault(taken.path, []).append((taken, moved))
        return self.formed({path: _join(some, self.target) for path, some in parts.items()}, path_tree(tree))

    def formed(self, found: dict[str, Any], paths: Any) -> Any:
        """Return arrays by path in the containers they came in; by path where names differ. *Pure.*

        Args:
            found: {path in the target: array}.
            paths: The containers of the source, with paths in place of arrays (`path_tree`).
        """
        if self.taken.renames or set(found) != set(leaves(paths)):
            return found
        return mapped(found.__getitem__, paths)


def _take_out(x: Any, held: Held, shape: tuple[int, ...], state: ParallelState) -> Any:
    """Return a part of a fused array: of each rank's block, the part's block. *Collective over the state.*"""
    if held.dim < 0:
        return x
    size = local_shape(state.topology, held.spec, shape)[held.dim]
    cut = (*[slice(None)] * held.dim, slice(held.start, held.start + size))
    return shard_map(lambda block: block[cut], (held.spec,), held.spec, state)(x)


def _join(parts: list[tuple[Held, Any]], state: ParallelState) -> Any:
    """Return a fused array of its parts: each rank's blocks one after another. *Collective over the state.*"""
    (first, x), *rest = sorted(parts, key=lambda part: part[0].start)
    if first.dim < 0 or not rest:
        return x

    def one(*blocks: Any) -> Any:
        return array_api_compat.array_namespace(blocks[0]).concat(blocks, axis=first.dim)

    return shard_map(one, tuple(first.spec for _ in parts), first.spec, state)(x, *(y for _, y in rest))


def transfer(
    tree: Any,
    *,
    src: ParallelState | str,
    dst: ParallelState | str,
    specs: Any,
    renames: Mapping[str, str] | None = None,
    buffer_bytes: int = BUFFER_BYTES,
    checksum: bool = False,
) -> Any:
    """Return a tree of arrays of one state laid out in another. *Collective over the ranks of both states.*

    Every byte goes once, straight to the ranks that lack it; nothing is gathered, and no gradient passes
    (`dm.reshard` has one). torch: point-to-point messages of bounded size; small arrays share one. JAX and sim: array
    by array, as `dm.reshard`. Where the two states are of two frameworks in the same processes, the tree moves in the
    source's and is then handed over block by block (`dm.interop`); other worlds are reached by `dm.transfer_link`.

    Args:
        tree: Nested containers of global arrays, or in per-rank code of torch of this rank's blocks; any part of a
            model. None on ranks outside the source.
        src: The state in which it lies, or its name.
        dst: The state in which it shall lie.
        specs: How it lies in both, or a pair (in the source, in the target): a `dm.P` for all, {path: `dm.P` or
            `dm.Fused`}, or a `dm.ShardingPlan`. A path is keys joined by dots.
        renames: {path in the target: path in the source}; one array of the source may go to several paths. It goes to
            its own path too only where specs of the target that are given by path name that one.
        buffer_bytes: Memory that messages may use on a rank, beside the arrays.
        checksum: Whether to compare what arrives with what was sent, on the host (torch).

    Returns:
        Such a tree, of arrays in the target's framework; {path: array} where names differ. None on ranks outside it.

    Raises:
        ShapeError: A dim that the axes of one end do not divide.
        ArgumentError: Two arrays of the tree, or two specs, have one path.
        ShardingError: An array without a spec, or that renames would lose; renames of what the source does not have, or
            to what the target does not have; a path that the target lists and that neither the tree nor the source's
            specs have; or a sum still to be taken; on JAX, states over different devices of
            several processes: `dm.transfer_link` reaches those.
        SessionError: The states are of two frameworks whose worlds do not share their processes.
        AgreementError: Ranks of the source gave different trees.
        ChecksumError: What arrived is not what was sent.

    >>> import dualmesh as dm, numpy as np
    >>> with dm.session(backend="sim", world_size=4):
    ...     thinker = dm.init_parallel_state(dp_size=4, name="thinker")
    ...     _ = dm.init_parallel_state(spec=dm.TopologySpec({"tp": 2}), ranks=(3, 1), name="talker")
    ...     tree = {"w": dm.distribute(np.arange(8), dm.P("dp"), state=thinker)}
    ...     moved = dm.transfer(tree, src="thinker", dst="talker", specs=(dm.P("dp"), dm.P("tp")))
    ...     moved["w"].block(1).tolist()
    [4, 5, 6, 7]
    """
    where = "transfer"
    source, target = _state("src", src), _state("dst", dst)
    source.require_live(where)
    target.require_live(where)
    if source.backend != target.backend:
        near = target.on(source.backend)
        moved = transfer(
            tree, src=source, dst=near, specs=specs, renames=renames, buffer_bytes=buffer_bytes, checksum=checksum
        )
        return handed_over(where, moved, source.backend, target.backend, near, copy=True)
    pair = specs if isinstance(specs, tuple) and len(specs) == 2 else (specs, specs)
    job = TransferJob(
        source,
        target,
        end_of(where, "src", (source, pair[0])),
        end_of(where, "dst", (target, pair[1]), renames),
        positive(where, "buffer_bytes", buffer_bytes),
        bool(checksum),
    )
    if not (source.is_member or target.is_member):
        return None
    return target.arrays.transfer(tree, job)


def _state(what: str, given: Any) -> ParallelState:
    found = registry.get(given) if isinstance(given, str) else given
    if not isinstance(found, ParallelState):
        raise ArgumentError(f"transfer: {what}={given!r}. Give a state or its name.", given=given)
    return found
