"""The state before any init: one process, every axis of size 1, as VeOmni says.

It never acts as the identity in a world of several processes: there every group and collective is refused.
"""

import os
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from dualmesh._support.optional_imports import array_api_compat, np
from dualmesh._support.warn import caution
from dualmesh.backend import discovery
from dualmesh.backend.arrays import Arrays
from dualmesh.backend.state import ParallelState
from dualmesh.backend.state_plan import StatePlan, World
from dualmesh.backend.transforms import Programs
from dualmesh.errors import NoStateError
from dualmesh.sharding.partition_spec import P, check_axes
from dualmesh.sharding.tree import leaves
from dualmesh.topology.parallel_spec import parallel_spec
from dualmesh.topology.topology import Axis

BEFORE_INIT = (
    "get_parallel_state() before any init_parallel_state(): this is a single-process state, every axis has size 1. "
    "Call dm.init_parallel_state(...) first if that is not meant."
)


class SingleProcessState(ParallelState):
    """One process, size 1 along every axis; meshes and shardings need a registered state."""

    backend = "none"

    def __init__(self) -> None:
        topology = parallel_spec().resolve(1)
        plan = StatePlan(topology, None, "none", "cpu")
        super().__init__(plan, World(1, (0,), "cpu", 1, lambda: True))
        self.arrays = _SingleProcessArrays()
        self.programs = _SingleProcessPrograms()

    def require_live(self, where: str) -> None:
        """Refuse in a world of several processes."""
        found = find_several_processes()
        if found is not None:
            raise NoStateError(
                f"{where}: no parallel state is registered, but {found}. Call dm.init_parallel_state(...) first, on "
                f"every rank.",
                found=found,
            )

    def _group_for(self, axis: Axis) -> tuple[int, ...]:
        self.size(axis)
        self.require_live("group")
        return (0,)

    def __getattr__(self, name: str) -> Any:
        if name in ("collectives", "host", "models"):
            raise self._unregistered(name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def _unregistered(self, what: str) -> NoStateError:
        return NoStateError(f"{what}: no parallel state is registered. Call dm.init_parallel_state(...) first.")

    @property
    def mesh(self) -> Any:
        """Refused: there is no mesh before init."""
        raise self._unregistered("mesh")

    @property
    def fsdp_mesh(self) -> Any:
        """Refused: there is no mesh before init."""
        raise self._unregistered("fsdp_mesh")

    def submesh(self, *axes: str) -> Any:
        """Refused: there is no mesh before init."""
        raise self._unregistered("submesh")

    def axes(self, axis: Axis) -> tuple[str, ...]:
        """Return (): every axis has size 1."""
        self.size(axis)
        return ()

    def pspec(self, *entries: Any, partial: str | Iterable[str] = ()) -> P:
        """Return the spec itself."""
        spec = P(*entries, partial=partial)
        check_axes(self.topology, spec)
        return spec

    def sharding(self, spec: P) -> Any:
        """Refused: there is no mesh before init."""
        raise self._unregistered("sharding")


class _SingleProcessArrays(Arrays):
    """One process holds everything."""

    def distribute(self, array: Any, spec: P) -> Any:
        return _copied(array)

    def to_numpy(self, x: Any) -> Any:
        return np.array(x)

    def shard_local(self, block: Any, spec: P) -> Any:
        return _copied(block)

    def constrain(self, x: Any, spec: P) -> Any:
        return x

    def reshard(self, x: Any, spec: P, source: ParallelState, source_spec: P) -> Any:
        return x


def _copied(array: Any) -> Any:
    """Return an array in memory of its own, in its framework; what is no array becomes numpy's. *Local.*"""
    if not array_api_compat.is_array_api_obj(array):
        return np.array(array)
    return array_api_compat.array_namespace(array).asarray(array, copy=True)


class _SingleProcessPrograms(Programs):
    """Blocks are global arrays, so every lifting is the identity."""

    def shard_map(
        self,
        fn: Callable[..., Any],
        in_specs: Any,
        out_specs: Any,
        axes: tuple[str, ...] | None,
        check_replicated: bool,
    ) -> Callable[..., Any]:
        return fn

    def value_and_grad(self, fn: Callable[..., Any], argnums: tuple[int, ...]) -> Callable[..., tuple[Any, Any]]:
        raise NoStateError(
            "value_and_grad: no parallel state is registered, so the framework is not known. Call "
            "dm.init_parallel_state(...) first."
        )

    def remat(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return fn

    def sum_gradients(self, model: Any, **_: Any) -> None:
        return None

    def sync_gradients(self, params: Any, axis: Axis) -> Any:
        return params

    def global_norm(self, tree: Any, order: float, axis: Axis | None) -> Any:
        flat = [array_api_compat.array_namespace(x).reshape(x, (-1,)) for x in leaves(tree)]
        if not flat:
            return np.zeros(())
        xp = array_api_compat.array_namespace(flat[0])
        return xp.linalg.vector_norm(xp.concat(flat), ord=order)


def find_several_processes() -> str | None:
    """Say where a world of several processes was seen, or return None. *Local.*"""
    for name, backend in discovery.loaded().items():
        world = backend.world()
        if world is not None and world.process_count > 1:
            return f"{name} runs {world.process_count} processes"
    launched = os.environ.get("WORLD_SIZE", "")
    if launched.isdigit() and int(launched) > 1:
        return f"the launcher set WORLD_SIZE={launched}"
    return None


@cache
def single_process_state() -> SingleProcessState:
    """Return the one single-process state; the first call warns. *Local.*"""
    caution(BEFORE_INIT)
    return SingleProcessState()
