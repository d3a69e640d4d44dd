"""`reshard`: a global array handed from one layout to another, within a state or from state to state.

Who sends what to whom is planned in `redistribution`; the backends carry it out.
"""

from typing import Any

from dualmesh.backend.state import ParallelState
from dualmesh.errors import ArgumentError, ShardingError
from dualmesh.runtime.registry import registry
from dualmesh.runtime.scope import resolve_state
from dualmesh.sharding.partition_spec import P, is_spec

FORMS = (
    "reshard: give one spec, dm.reshard(x, dm.P(...)), or both ends, dm.reshard(x, src=('thinker', dm.P(...)), "
    "dst=('talker', dm.P(...)))."
)


def reshard(x: Any, spec: Any = None, *, src: Any = None, dst: Any = None, state: ParallelState | None = None) -> Any:
    """Return the same global value in another layout; differentiable. *Collective over the ranks of both ends.*

    `dm.reshard(x, spec)` lays a global array out anew within the state. With both ends the array goes from one state to
    another, over the same, overlapping or disjoint ranks. `x` is then a global array of the source or, in per-rank code
    of torch, this rank's block of it; what comes back is of the same kind. The gradient of a global array is that of
    its value; of blocks, the exact transpose: what a rank gave away comes back summed.

    On torch a rank outside the source gives None, or what an earlier reshard returned there. A rank of the source that
    is outside the target gets an empty tensor, shape (0,): its sum is the zero that keeps the rank in the backward
    pass. A rank in neither gets None. On JAX the two ends of a reshard inside `jit` must have the same devices.

    Args:
        spec: The new layout, within the state.
        src: How `x` lies: (name or state, spec), or a spec in the state.
        dst: How it shall lie, likewise. A sum that is still to be taken (`partial`) can be a source, no target.
        state: The state of specs given alone; None: the ambient one.

    Raises:
        ArgumentError: Neither form was given, or a mix of both.
        ShapeError: A dim that the axes of one end do not divide.
        ShardingError: The array lies elsewhere, or the ends are of two backends.

    >>> import dualmesh as dm, numpy as np
    >>> with dm.session(backend="sim", world_size=4):
    ...     _ = dm.init_parallel_state(dp_size=4, name="thinker")
    ...     _ = dm.init_parallel_state(spec=dm.TopologySpec({"dp": 2}), ranks=(3, 1), name="talker")
    ...     x = dm.distribute(np.arange(8), dm.P("dp"))
    ...     y = dm.reshard(x, src=("thinker", dm.P("dp")), dst=("talker", dm.P("dp")))
    ...     y.block(1).tolist()
    [4, 5, 6, 7]
    """
    if spec is not None:
        if src is not None or dst is not None:
            raise ArgumentError(FORMS)
        owner = resolve_state("reshard", state)
        owner.require_ready("reshard")
        return owner.arrays.constrain(x, P.of(spec))
    if src is None or dst is None:
        raise ArgumentError(FORMS)
    source, source_spec = _end("src", src, state)
    target, target_spec = _end("dst", dst, state)
    if source.backend != target.backend:
        raise ShardingError(
            f"reshard: {source.label} is of the backend {source.backend!r}, {target.label} of {target.backend!r}. "
            f"Both ends must be of one.",
            source=source,
            target=target,
        )
    source.require_live("reshard")
    target.require_live("reshard")
    if not (source.is_member or target.is_member):
        return None
    return target.arrays.reshard(x, target_spec, source, source_spec)


def _end(what: str, end: Any, state: ParallelState | None) -> tuple[ParallelState, P]:
    """Return the state and the spec of one end."""
    is_pair = type(end) is tuple and len(end) == 2  # a JAX spec may be a tuple of a kind of its own
    if not is_pair and is_spec(end):
        return resolve_state("reshard", state), P.of(end)
    if not is_pair or not isinstance(end[0], str | ParallelState):
        raise ArgumentError(f"reshard: {what}={end!r}. Give (name or state, dm.P(...)), or a dm.P.", end=end)
    name, spec = end
    return registry.get(name) if isinstance(name, str) else name, P.of(spec)
