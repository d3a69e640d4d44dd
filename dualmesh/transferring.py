"""`transfer`: whole trees of arrays handed from one state to another, over the same, overlapping or other ranks.

Who sends what to whom is planned in `transfer_plan`; one array, with a gradient, is for `resharding`; other worlds are
reached in `transfer_link`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dualmesh.errors import ArgumentError, ArrayTypeError, ShardingError
from dualmesh.partition_spec import P
from dualmesh.paths import with_paths
from dualmesh.registry import registry
from dualmesh.resolution import positive
from dualmesh.state import ParallelState
from dualmesh.transfer_ends import End, Fused, end_of
from dualmesh.transfer_run import BUFFER_BYTES
from dualmesh.tree import mapped

FUSED_HERE = (
    "transfer: {path!r} is fused. The backend {backend!r} moves array by array, as its own resharding does, and knows "
    "no fused blocks: split it first, or send it over a dm.transfer_link."
)


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
        """Return the tree, each array moved by itself. *Collective over both ends.*"""
        paths = iter([path for path, _ in with_paths(tree)])
        back = {old: new for new, old in self.taken.renames.items()}

        def moved(x: Any) -> Any:
            path = next(paths)
            if not hasattr(x, "shape"):
                raise ArrayTypeError(f"transfer: {path!r} is a {type(x).__qualname__}. Give arrays.", path=path)
            specs = [
                end.spec_of(place, tuple(x.shape))
                for end, place in ((self.given, path), (self.taken, back.get(path, path)))
            ]
            if any(isinstance(spec, Fused) for spec in specs):
                raise ShardingError(FUSED_HERE.format(path=path, backend=self.source.backend), path=path)
            return reshard(x, P.of(specs[1]), self.source, P.of(specs[0]))

        return self.named(mapped(moved, tree))

    def named(self, tree: Any) -> Any:
        """Return a tree under the names of the target: as it is, or where some were renamed, {path: array}. *Pure.*"""
        if not self.taken.renames:
            return tree
        back = {old: new for new, old in self.taken.renames.items()}
        return {back.get(path, path): x for path, x in with_paths(tree)}


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
    by array, as `dm.reshard`.

    Args:
        tree: Nested containers of global arrays, or in per-rank code of torch of this rank's blocks; any part of a
            model. None on ranks outside the source.
        src: The state in which it lies, or its name.
        dst: The state in which it shall lie.
        specs: How it lies in both, or a pair (in the source, in the target): a `dm.P` for all, {path: `dm.P` or
            `dm.Fused`}, or a `dm.ShardingPlan`. A path is keys joined by dots.
        renames: {path in the target: path in the source}.
        buffer_bytes: Memory that messages may use on a rank, beside the arrays.
        checksum: Whether to compare what arrives with what was sent, on the host (torch).

    Returns:
        Such a tree, of arrays in the target; {path: array} where names differ. None on ranks outside it.

    Raises:
        ShapeError: A dim that the axes of one end do not divide.
        ShardingError: An array without a spec, or a sum still to be taken; states of two backends.
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
    if source.backend != target.backend:
        raise ShardingError(
            f"{where}: {source.label} is of the backend {source.backend!r}, {target.label} of {target.backend!r}. Both "
            f"must be of one: hand arrays over with dm.interop, or use a dm.transfer_link.",
            source=source,
            target=target,
        )
    source.require_live(where)
    target.require_live(where)
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
