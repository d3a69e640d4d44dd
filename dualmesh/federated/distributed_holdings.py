"""`Holdings`: the meshes and groups that a distributed state made, each released once the state keeps it no longer.

What they are for is in `distributed_state`; what makes and ends them is a `Fabric`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dualmesh.backend.group_factory import Fabric, device_kind
from dualmesh.topology.federated_topology import FederatedTopology


class Holdings:
    """What one distributed state made, in the order made. What the user brought, or asked for to keep, is not here."""

    def __init__(self) -> None:
        self._made: list[tuple[Fabric, Any]] = []

    def __len__(self) -> int:
        return len(self._made)

    def group(self, fabric: Fabric, ranks: tuple[int, ...], backend: str | None, description: str) -> Any:
        """Return a new group. *Collective over its ranks.*"""
        return self._kept(fabric, fabric.make_group(ranks, backend or "", description))

    def groups(
        self, fabric: Fabric, ranks: tuple[int, ...], backend: str | None, what: str, count: int
    ) -> tuple[Any, ...]:
        """Return one new group per stream. *Collective over its ranks.*"""
        return tuple(self.group(fabric, ranks, backend, f"{what}, instance {number}") for number in range(count))

    def mesh(self, fabric: Fabric, topology: FederatedTopology, rank: int, device_type: Any) -> Any:
        """Return the mesh of a rank's federation: axis "shard", or "replica" and "shard". *Collective over it.*"""
        names = ("shard",) if topology.shard_size is None else ("replica", "shard")
        return self._kept(fabric, fabric.make_mesh(topology.mesh(rank), names, device_kind(device_type)))

    def release_but(self, *kept: Any) -> None:
        """Release all but some. *Local.*"""
        wanted = {id(one) for one in kept}
        ended = [(fabric, one) for fabric, one in self._made if id(one) not in wanted]
        self._made = [(fabric, one) for fabric, one in self._made if id(one) in wanted]
        for fabric, one in ended:
            fabric.release(one)

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Release what a block made, if the block raises."""
        before = [one for _, one in self._made]
        try:
            yield
        except BaseException:
            self.release_but(*before)
            raise

    def _kept(self, fabric: Fabric, made: Any) -> Any:
        self._made.append((fabric, made))
        return made
