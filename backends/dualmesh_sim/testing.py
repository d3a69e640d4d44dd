"""What tests look into on simulated ranks: their blocks, at rest and as they pass.

The kit that uses it is `dualmesh.testing`.
"""

from collections.abc import Callable
from typing import Any

from dualmesh._support.optional_imports import np
from dualmesh.backend.state import ParallelState
from dualmesh.errors import ShardingError
from dualmesh.sharding.partition_spec import slices_of
from dualmesh.testing import instruments
from dualmesh_sim.arrays import SimArray


class Instruments(instruments.Instruments):
    """Simulated arrays."""

    differentiates = False

    def held(self, state: ParallelState, x: Any) -> list[instruments.Held]:
        if not isinstance(x, SimArray):
            raise ShardingError(f"found a {type(x).__qualname__}. Give a SimArray.", found=type(x))
        found = []
        for rank in x.state.members:
            cuts = slices_of(x.state.topology, x.spec, x.shape, x.state.grid_rank(rank))
            positions = tuple(tuple(range(cut.start, cut.stop)) for cut in cuts)
            found.append(instruments.Held(rank, positions, np.array(x.block(rank))))
        return found

    def watched(
        self,
        state: ParallelState,
        x: Any,
        value: Callable[[int, Any], None],
        gradient: Callable[[], Callable[[int, Any], None]] | None,
    ) -> Any:
        value(state.own_rank(), np.array(x))
        return x
