"""What tests look into on torch: shards of DTensors, blocks and their gradients as they pass, groups left behind.

The kit that uses it is `dualmesh.testing`.
"""

import contextlib
import gc
import glob
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate

from dualmesh.backend.state import ParallelState
from dualmesh.errors import ShardingError
from dualmesh.testing import instruments
from dualmesh_torch import private

SPARE_THREADS = 8
"""Groups of ended worlds that may stay until the next search for what holds them, which takes a second in a process
that compiled. Each has a thread that wakes up a hundred times a second, and dies with its group: once no compiled code
and no cycle of Python objects holds it."""
MOST_THREADS = 24
"""How many such groups a process keeps for good, in compiled code's guards, before a fresh one takes its place: 40 of
them use 4 percent of a core in each of many processes."""


class Instruments(instruments.Instruments):
    """DTensors, autograd hooks and process groups."""

    def __init__(self) -> None:
        self._kept_threads = 0

    def held(self, state: ParallelState, x: Any) -> list[instruments.Held]:
        if not isinstance(x, DTensor):
            raise ShardingError(f"found a {type(x).__qualname__}, which no rank shares. Give a DTensor.", found=type(x))
        if any(isinstance(one, Partial) for one in x.placements):
            raise ShardingError(f"found {x.placements}, a value still to be summed.", found=x.placements)
        block = state.arrays.to_numpy(x.to_local())
        return [instruments.Held(dist.get_rank(), tuple(_positions(x, dim) for dim in range(x.dim())), block)]

    def watched(
        self,
        state: ParallelState,
        x: Any,
        value: Callable[[int, Any], None],
        gradient: Callable[[], Callable[[int, Any], None]] | None,
    ) -> Any:
        rank = state.own_rank()
        value(rank, state.arrays.to_numpy(x))
        if gradient is None or not (x.requires_grad and torch.is_grad_enabled()):
            return x
        ready = gradient

        def passed(cotangent: torch.Tensor) -> None:
            ready()(rank, state.arrays.to_numpy(cotangent))

        passing = x.view_as(x)
        passing.register_hook(passed)
        return passing

    def leave_together(self) -> None:
        if dist.is_initialized():
            dist.barrier()

    def ended(self) -> bool:
        if _polling_threads() > self._kept_threads + SPARE_THREADS:
            torch.compiler.reset()
            gc.collect()
            self._kept_threads = _polling_threads()
        return self._kept_threads > MOST_THREADS

    def leftovers(self) -> dict[str, object]:
        return {"torch process groups": private.group_names(), "torch default dtype": torch.get_default_dtype()}

    def untouched(self) -> dict[str, object]:
        return {"torch process groups": ()}


def _polling_threads() -> int:
    """Return how many threads of gloo this process runs; 0 where the system does not say."""
    names = (Path(task, "comm") for task in glob.glob("/proc/self/task/*"))
    found = 0
    for name in names:
        with contextlib.suppress(OSError):  # it ended meanwhile
            found += name.read_text().startswith("gloo_tcp")
    return found


def _positions(x: DTensor, dim: int) -> tuple[int, ...]:
    """Return which positions of a dim this rank holds: a numbered array is cut as `x` is."""
    sizes = [1] * x.dim()
    sizes[dim] = x.shape[dim]
    numbers = torch.arange(x.shape[dim], device=x.device).reshape(sizes).expand(x.shape)
    whole = DTensor.from_local(numbers, x.device_mesh, [Replicate()] * x.device_mesh.ndim, run_check=False)
    own = whole.redistribute(x.device_mesh, x.placements).to_local()
    return tuple(own.movedim(dim, 0).reshape(own.shape[dim], -1)[:, 0].tolist())
