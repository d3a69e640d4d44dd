"""The atoms that several topologies over the same ranks share, and what each atom may be called.

A framework with one mesh for many topologies (JAX) builds that mesh from these atoms; digits and strides are in
`layout`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dualmesh.topology.layout import Digit, Layout, on_grid, refinement
from dualmesh.topology.topology import Topology


@dataclass(frozen=True)
class Refinement:
    """One grid on which every axis of several topologies is a tuple of whole atoms, slowest first.

    >>> import dualmesh as dm
    >>> dense = dm.TopologySpec({"dp": 2, "tp": 4}).resolve(8)
    >>> refined = Refinement.of([dense, dm.TopologySpec({"fsdp": 4, "tp": 2}).resolve(8)])
    >>> refined.names, refined.axes(dense.layout("tp"))
    (('dp', 'atom_2x2', 'atom_2x1'), ('atom_2x2', 'atom_2x1'))
    """

    atoms: tuple[Digit, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, topologies: Sequence[Topology]) -> "Refinement | None":
        """Return the coarsest refinement of topologies over as many ranks, or None if there is none. *Pure.*"""
        size = topologies[0].size("world")
        layouts = (layout for topology in topologies for layout in topology.layouts.values())
        atoms = refinement(layouts, size)
        if atoms is None:
            return None
        atoms = atoms or (Digit(1, 1),)
        return cls(atoms, _names(atoms, topologies))

    def axes(self, layout: Layout) -> tuple[str, ...] | None:
        """Return the names of the atoms that spell a layout, slowest first, or None. *Pure.*"""
        positions = on_grid(layout, self.atoms)
        return None if positions is None else tuple(self.names[position] for position in positions)

    def misfits(self, topology: Topology) -> tuple[str, ...]:
        """Return the axes of a topology that these atoms do not spell, or would call by another axis' name. *Pure.*"""
        return tuple(name for name, layout in topology.layouts.items() if not self._fits(name, layout))

    def _fits(self, name: str, layout: Layout) -> bool:
        axes = self.axes(layout)
        return axes is not None and (name not in self.names or axes == (name,))


def _names(atoms: Sequence[Digit], topologies: Sequence[Topology]) -> tuple[str, ...]:
    """Name each atom after an axis that means exactly this atom wherever it exists, else neutrally."""
    taken = {name for topology in topologies for name in topology.layouts}
    names: list[str] = []
    for position, atom in enumerate(atoms):
        for name in _base_axes_first(topologies):
            owners = [topology.layouts[name] for topology in topologies if name in topology.layouts]
            if all(on_grid(layout, atoms) == (position,) for layout in owners):
                names.append(name)
                break
        else:
            neutral = f"atom_{atom.size}x{atom.stride}"
            while neutral in taken:
                neutral += "_"
            names.append(neutral)
    return tuple(names)


def _base_axes_first(topologies: Iterable[Topology]) -> Iterator[str]:
    """Yield every axis name, each topology's grid before its combined axes and views."""
    topologies = tuple(topologies)
    for topology in topologies:
        yield from topology.base_axes
    for topology in topologies:
        yield from topology.axis_names
