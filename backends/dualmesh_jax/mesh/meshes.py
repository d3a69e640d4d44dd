"""One mesh per device order: which states share it, when it is fixed, what its axes are called.

The integers behind it are in `dualmesh.topology.refinement`; when a mesh becomes JAX's ambient one is decided in
`ambient_mesh`.
"""

import itertools
from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from dualmesh._support.warn import caution
from dualmesh.errors import listed
from dualmesh.topology.layout import Layout
from dualmesh.topology.refinement import Refinement
from dualmesh.topology.topology import Topology

OWN_MESH = (
    "{asked!r} cannot share a mesh with {others} over the same devices: {reason}. It gets a mesh of its own: code that "
    "uses both in one jit computes the right numbers but loses the shardings of what crosses (give out_shardings), and "
    "their axes cannot meet in one spec. {cure}"
)
NO_GRID = "their sizes have no common refinement (the strides form no divisor chain)"
NO_GRID_CURE = "Choose sizes that divide each other, or accept it."
FROZEN = "that mesh is in use already, with the axes {axes}, which do not spell {misfits}"
FROZEN_CURE = "Register all states before first use (init_parallel_states)."

_serials = itertools.count(1)


class SharedMesh:
    """The common refinement of the topologies registered over one device order, fixed at first use.

    Attributes:
        is_explicit: Whether its axes are Explicit, so that shardings are part of types.
        serial: A number that no other shared mesh of this process has.
        mark: The name of an axis of size 1 that it ends with, empty for none. JAX tells meshes apart by the names and
            sizes of their axes only; a mark tells one that is not over all ranks in order from all others.
    """

    def __init__(
        self,
        order: tuple[int, ...],
        devices: Sequence[jax.Device],
        topology: Topology,
        types: AxisType = AxisType.Auto,
        mark: str = "",
    ) -> None:
        self.order = order
        self.mark = mark
        self.devices = tuple(devices)
        self.is_explicit = types is AxisType.Explicit
        self._types = types
        self.serial = next(_serials)
        self._topologies = [topology]

    @cached_property
    def refined(self) -> Refinement:
        """The atoms and their names; asking fixes them."""
        found = Refinement.of(self._topologies)
        if found is None:
            raise RuntimeError(f"{self._topologies!r} have no refinement, though each was checked when it came.")
        return found

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh over all devices of the order; asking fixes its axes."""
        marks = [self.mark] if self.mark else []
        sizes = [*(atom.size for atom in self.refined.atoms), *(1 for _ in marks)]
        return mesh_of(self.devices, sizes, [*self.refined.names, *marks], self._types)

    @cached_property
    def abstract_mesh(self) -> AbstractMesh:
        """The mesh without its devices."""
        abstract: AbstractMesh = self.mesh.abstract_mesh
        return abstract

    @property
    def is_fixed(self) -> bool:
        """Whether its axes are fixed, since somebody asked for them."""
        return "refined" in self.__dict__

    @property
    def topologies(self) -> tuple[Topology, ...]:
        """The topologies that share it, first one first."""
        return tuple(self._topologies)

    def axes(self, layout: Layout) -> tuple[str, ...]:
        """Return the names of the mesh axes that spell a layout of one of the topologies, slowest first. *Local.*"""
        names = self.refined.axes(layout)
        if names is None:
            raise RuntimeError(f"{layout!r} is not on {self.mesh!r}, though its topology was admitted.")
        return names

    def refusal(self, topology: Topology) -> tuple[str, str] | None:
        """Return (reason, cure) why a topology cannot join, or None when it can. *Pure.*"""
        if self.is_fixed:
            misfits = self.refined.misfits(topology)
            if misfits:
                return FROZEN.format(axes=listed(self.refined.names), misfits=listed(misfits)), FROZEN_CURE
            return None
        return None if Refinement.of([*self._topologies, topology]) else (NO_GRID, NO_GRID_CURE)

    def join(self, topology: Topology) -> None:
        """Let a topology share the mesh; `refusal` must have said None. *Local.*"""
        self._topologies.append(topology)


class MeshBook:
    """The shared meshes of one world."""

    def __init__(self, devices: Sequence[jax.Device], types: AxisType = AxisType.Auto) -> None:
        self.devices = tuple(devices)
        self._types = types
        self._by_order: dict[tuple[int, ...], list[SharedMesh]] = {}

    def shared(self, order: tuple[int, ...], topology: Topology) -> SharedMesh:
        """Return the mesh for a topology over session ranks in grid order; warns when it must have its own. *Local.*"""
        known = self._by_order.setdefault(order, [])
        refusals = []
        for mesh in known:
            refusal = mesh.refusal(topology)
            if refusal is None:
                mesh.join(topology)
                return mesh
            refusals.append((mesh, *refusal))
        mark = _mark(order, len(self.devices))
        own = SharedMesh(order, [self.devices[rank] for rank in order], topology, self._types, mark)
        known.append(own)
        if refusals:
            mesh, reason, cure = refusals[0]
            text = OWN_MESH.format(asked=topology, others=listed(map(repr, mesh.topologies)), reason=reason, cure=cure)
            caution(text)
        return own

    def said(self, usual: Sequence[jax.Device]) -> str:
        """Write what meshes depend on beside topologies, where it is not the usual: axis types, devices. *Pure.*"""
        said = "" if self._types is AxisType.Auto else f", axis_types={self._types.name.lower()!r}"
        if self.devices == tuple(usual[: len(self.devices)]):
            return said
        return f"{said}, device_order={[device.id for device in self.devices]}"

    def keep_only(self, used: set[int]) -> None:
        """Forget the meshes whose serial is not among `used`. *Local.*"""
        kept = {order: [mesh for mesh in known if mesh.serial in used] for order, known in self._by_order.items()}
        self._by_order = {order: known for order, known in kept.items() if known}


def _mark(order: tuple[int, ...], world_size: int) -> str:
    """Return a name for ranks in an order that no other order has; empty for all ranks in order."""
    if order == tuple(range(world_size)):
        return ""
    ends = f"ranks_{order[0]}_to_{order[-1]}"
    if order == tuple(range(order[0], order[-1] + 1)):
        return ends
    return f"{ends}_{sha256(repr(order).encode()).hexdigest()[:8]}"


def mesh_of(
    devices: Sequence[jax.Device], shape: Sequence[int], names: Sequence[str], types: AxisType = AxisType.Auto
) -> Mesh:
    """Return a mesh over devices in exactly this order, all axes of one type. *Local.*"""
    grid: Any = np.empty(len(devices), dtype=object)
    grid[:] = devices
    return Mesh(grid.reshape(tuple(shape)), tuple(names), axis_types=(types,) * len(names))
