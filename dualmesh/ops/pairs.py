"""The tensor-parallel pair: identity one way, sum the other way.

For per-rank code whose objective counts a loss once that every index of the axis computes alike. Inside
`dm.shard_map` it is not needed: `all_reduce` alone is right there.
"""

from typing import Any

from dualmesh.backend.state import ParallelState
from dualmesh.ops.checks import KINDS, admit_array, check_reduction
from dualmesh.topology.topology import Axis


def enter(x: Any, axis: Axis, *, state: ParallelState | None = None) -> Any:
    """Enter a tensor-parallel region: return `x` as it is; its gradient is summed over the axis.

    *Local; its gradient is collective.* `x` is equal on every index, and each uses it for its part of the work, so the
    gradient of `x` is the sum of what the parts give. Example, two indices, y_r = w_r x: forward x = 3 gives 3 and 3;
    cotangents 5 and 7 of the two copies give 12 on both.

    Raises:
        ArrayTypeError: The dtype has no sum.
    """
    owner, axis, size, kind = admit_array("ops.enter", x, axis, state, unequal=True)
    check_reduction("ops.enter", "sum", kind, KINDS)
    return x if size == 1 else owner.collectives.enter(x, axis)


def leave(x: Any, axis: Axis, *, state: ParallelState | None = None) -> Any:
    """Leave a tensor-parallel region: return the sum over the axis; its gradient passes as it is.

    *Collective; its gradient is local.* Every index goes on with the same sum and computes the same loss from it, of
    which the objective counts one, so each part's gradient is the cotangent itself. Example, two indices: forward 1
    and 2 gives 3 and 3; a cotangent of 5 on both gives 5 on both (where `all_reduce` would give 10).

    Raises:
        ArrayTypeError: The dtype has no sum.
    """
    owner, axis, size, kind = admit_array("ops.leave", x, axis, state, unequal=True)
    check_reduction("ops.leave", "sum", kind, KINDS)
    return x if size == 1 else owner.collectives.leave(x, axis)
