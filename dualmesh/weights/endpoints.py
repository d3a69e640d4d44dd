"""What each end of a transfer holds: which arrays lie under which path, and how fused blocks are made of them.

Who sends what is in `plan`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dualmesh._support.checks import items_in
from dualmesh.arrays.plan import ShardingPlan
from dualmesh.backend.state import ParallelState
from dualmesh.errors import ArgumentError, ShapeError, ShardingError, did_you_mean, listed
from dualmesh.runtime.registry import registry
from dualmesh.sharding.partition_spec import P, dim_layouts, is_spec
from dualmesh.sharding.redistribution import Placed, Slices
from dualmesh.topology.group_topology import GroupTopology
from dualmesh.topology.resolve import positive, whole
from dualmesh.topology.topology import Topology


class Array(NamedTuple):
    """What a plan knows of an array."""

    shape: tuple[int, ...]
    itemsize: int
    dtype: str = ""

    @classmethod
    def of(cls, where: str, path: Any, given: Any) -> "Array":
        """Return an array for (shape, bytes of an element), or these and the name of its dtype. *Pure.*"""
        pair = items_in(given)
        sizes = items_in(pair[0]) if pair is not None and len(pair) in (2, 3) else None
        if pair is None or sizes is None or not isinstance(path, str):
            raise ArgumentError(f"{where}: {path!r}: {given!r}. Give {{path: (shape, bytes of an element)}}.")
        shape = tuple(positive(where, f"size of {path!r}", size, least=0) for size in sizes)
        return cls(shape, positive(where, f"bytes of {path!r}", pair[1]), *map(str, pair[2:]))


@dataclass(frozen=True, init=False)
class Fused:
    """An array in which every rank holds its blocks of several others one after another, as one matrix multiply reads.

    Args:
        spec: How each of the arrays is split.
        parts: {name: size along the dim}, in order, for example {"q": 4096, "k": 1024, "v": 1024}. The arrays are named
            as the fused one, with its last key replaced.
        dim: Along which dim they follow one another.

    >>> fused = Fused(P("tp"), {"gate": 8, "up": 8})
    >>> fused.names("mlp.gate_up"), fused.size
    (('mlp.gate', 'mlp.up'), 16)
    """

    spec: P
    parts: tuple[tuple[str, int], ...]
    dim: int

    def __init__(self, spec: Any, parts: Mapping[str, int], dim: int = 0) -> None:
        where = "Fused"
        if not isinstance(parts, Mapping) or not parts or not all(isinstance(name, str) and name for name in parts):
            raise ArgumentError(f"{where}: parts={parts!r}. Give {{name: size along the dim}}.", parts=parts)
        number = whole(dim)
        if number is None or number < 0:
            raise ArgumentError(f"{where}: dim={dim!r}. Give 0 or more.", dim=dim)
        sizes = tuple((name, positive(where, f"size of {name!r}", size)) for name, size in parts.items())
        object.__setattr__(self, "spec", P.of(spec))
        object.__setattr__(self, "parts", sizes)
        object.__setattr__(self, "dim", number)

    @property
    def size(self) -> int:
        """The size of the fused array along the dim."""
        return sum(size for _, size in self.parts)

    def names(self, path: str) -> tuple[str, ...]:
        """Return the paths of the arrays fused at a path. *Pure.*"""
        before, dot, _ = path.rpartition(".")
        return tuple(f"{before}{dot}{name}" for name, _ in self.parts)


class Held(NamedTuple):
    """Where a rank's block of an array lies: the block at a path, or a part of that."""

    path: str
    spec: P
    dim: int = -1
    start: int = 0
    """In the rank's own block."""

    def moved(self, slices: Slices) -> Slices:
        """Return where slices of the array's block lie in the block at the path. *Pure.*"""
        if self.dim < 0 or not self.start:
            return slices
        cut = slices[self.dim]
        shifted = slice(cut.start + self.start, cut.stop + self.start)
        return (*slices[: self.dim], shifted, *slices[self.dim + 1 :])


@dataclass(frozen=True)
class End:
    """One end of a transfer: a topology on ranks, and the spec of every path."""

    what: str
    topology: Topology
    ranks: tuple[int, ...] | None
    specs: Any
    renames: Mapping[str, str] = field(default_factory=dict)
    """{path here: path in the source}."""

    def placed(self, spec: P) -> Placed:
        """Return a spec over the ranks. *Pure.*"""
        if spec.partial:
            raise ShardingError(
                f"plan_transfer: {self.what} has {spec!r}, a sum still to be taken over {listed(spec.partial)}. Take "
                f"it first (dm.constrain).",
                spec=spec,
            )
        return Placed(self.topology, spec, self.ranks)

    @property
    def members(self) -> Sequence[int]:
        """The ranks, in grid order."""
        return self.placed(P()).members

    def spec_of(self, path: str, shape: tuple[int, ...]) -> Any:
        """Return the `P` or `Fused` of a path. *Pure.*"""
        if is_spec(self.specs):
            return P.of(self.specs)
        if isinstance(self.specs, ShardingPlan):
            return self.specs.spec_of(path, shape)
        if path not in self.specs:
            raise ShardingError(
                f"plan_transfer: {self.what} has no spec for {path!r}. Its paths: {listed(self.specs)}.", path=path
            )
        return self.specs[path]

    @property
    def is_listed(self) -> bool:
        """Whether specs are given path by path."""
        return isinstance(self.specs, Mapping)

    def known_names(self) -> set[str]:
        """Return the arrays that specs given path by path name, those that are fused too; else none. *Pure.*"""
        fused = self.fused()
        plain = set(self.specs) - set(fused) if self.is_listed else set()
        return plain | {name for path, one in fused.items() for name in one.names(path)}

    def paths_of(self, name: str, *, is_fused: bool = False) -> list[str]:
        """Return where an array of the source goes by itself: where renames say, else its own path. *Pure.*

        Where specs are given path by path and name its own path too, it goes there as well: tied arrays.

        Args:
            is_fused: Whether it goes into a fused array, and so needs no path of its own.
        """
        fused = self.fused()
        parts = {part for path, one in fused.items() for part in one.names(path)}
        own = set(self.specs) - set(fused) if self.is_listed else set()
        # What a fused array takes may be asked for by itself as well, by a spec of its own.
        found = [new for new, old in self.renames.items() if old == name and (new not in parts or new in own)]
        if name in self.renames:
            return found
        is_elsewhere = bool(found) or is_fused or name in parts
        if is_elsewhere and name not in own:
            return found
        return [name, *found]

    def fused(self) -> dict[str, Fused]:
        """Return the fused paths that the specs name. *Pure.*"""
        named = self.specs if isinstance(self.specs, Mapping) else {}
        return {path: spec for path, spec in named.items() if isinstance(spec, Fused)}


def end_of(where: str, what: str, given: Any, renames: Mapping[str, str] | None = None) -> End:
    """Return an end for (topology, state or name, specs), or (topology, specs, ranks). *Pure.*"""
    items = items_in(given)
    if items is None or len(items) not in (2, 3):
        raise ArgumentError(f"{where}: {what}={given!r}. Give (topology or state, specs), or with ranks.", given=given)
    place, specs, *rest = items
    if isinstance(place, str):
        place = registry.get(place)
    ranks: tuple[int, ...] | None = tuple(rest[0]) if rest and rest[0] is not None else None
    if isinstance(place, ParallelState):
        on = place.placed(P())
        place, ranks = on.topology, on.ranks
    if not isinstance(place, Topology) or isinstance(place, GroupTopology):
        raise ArgumentError(
            f"{where}: {what}: {place!r} is no grid. Give a topology, a state or its name.", given=given
        )
    if not (is_spec(specs) or isinstance(specs, ShardingPlan)):
        specs = _mapping(where, what, specs)
    return End(what, place, ranks, specs, renames_of(where, renames))


def renames_of(where: str, renames: Any) -> dict[str, str]:
    """Return {path here: path in the source}, checked. *Pure.*"""
    if renames is None:
        return {}
    if isinstance(renames, Mapping) and all(isinstance(name, str) for pair in renames.items() for name in pair):
        return dict(renames)
    raise ArgumentError(f"{where}: renames={renames!r}. Give {{path here: path in the source}}.", renames=renames)


def pairs_of(arrays: Mapping[str, Array], source: End, target: End) -> Iterator[tuple[Array, Held, Held]]:
    """Yield every array with where it lies at both ends, in the order of the source's. *Pure.*

    One array may go to several paths of the target (tied embeddings). Every array goes somewhere, and nothing is asked
    for that the source does not have.

    Raises:
        ShardingError: An array that would be lost, a path without a spec or without an array, two arrays of one name.
    """
    here: dict[str, tuple[Array, Held]] = {}
    for name, array, held in _held_arrays(source, arrays):
        if name in here:
            raise ShardingError(f"plan_transfer: {source.what} holds {name!r} twice: as a path, and fused.", path=name)
        here[name] = array, held
    check_names("plan_transfer", {*here, *source.known_names()}, target)
    sizes = {name: array for name, (array, _) in here.items()}
    places: dict[str, list[Held]] = {name: [] for name in here}
    for path, fused in target.fused().items():
        names = [target.renames.get(name, name) for name in fused.names(path)]
        if not any(name in here for name in names):
            continue  # a partial update leaves it out
        for name, (_, held) in zip(
            names, _parts(target, path, fused, [_one(sizes, name, path) for name in names]), strict=True
        ):
            places[name].append(held)
    for name, (array, given) in here.items():
        for path in target.paths_of(name, is_fused=bool(places[name])):
            places[name].append(Held(path, _plain(target, path, target.spec_of(path, array.shape))))
        if not places[name]:
            raise ShardingError(
                f"plan_transfer: {name!r} of the source goes nowhere: renames gives its path to "
                f"{target.renames[name]!r}. Name another path for it in renames, or leave it out of the tree.",
                path=name,
            )
        for taken in places[name]:
            yield array, given, taken


def check_names(where: str, known: Iterable[str], target: End, cure: str = "") -> None:
    """Refuse renames of what the source does not have, to what the target does not have, and specs of neither. *Pure.*

    Args:
        where: Who asks.
        known: The arrays of the source, fused ones apart: those that its tree holds, and those that its specs list, as
            a tree may be any part of a model.
        target: The end that takes them.
        cure: What else may be done.

    Raises:
        ShardingError: A name that would be ignored.
    """
    known = sorted(known)
    held = f"which the source does not hold. It holds: {listed(known)}."
    for new, old in target.renames.items():
        if old not in known:
            raise ShardingError(
                f"{where}: renames: {new!r} shall be {old!r}, {held}{did_you_mean(old, known)}{cure}", path=old
            )
        if target.is_listed and new not in target.known_names():
            raise ShardingError(
                f"{where}: renames: {target.what} has no spec for {new!r}. Its paths: {listed(target.specs)}."
                f"{did_you_mean(new, target.known_names())}",
                path=new,
            )
    fused = target.fused()
    for path in target.specs if target.is_listed else ():
        names = fused[path].names(path) if path in fused else (path,)
        absent = [name for name in (target.renames.get(name, name) for name in names) if name not in known]
        if not absent:
            continue
        asks = f"{path!r}, fused of {listed(absent)} too" if path in fused else repr(path)
        raise ShardingError(
            f"{where}: {target.what} asks for {asks}, {held}{did_you_mean(absent[0], known)} Leave its spec out, or "
            f"say by renames={{path in the target: path in the source}} which is which; a source that sends a part of "
            f"its arrays lists the specs of all, path by path.{cure}",
            path=path,
        )


def _held_arrays(end: End, arrays: Mapping[str, Array]) -> Iterator[tuple[str, Array, Held]]:
    """Yield name, array and place of all that the source holds, fused ones taken apart."""
    for path, array in arrays.items():
        spec = end.spec_of(path, array.shape)
        if not isinstance(spec, Fused):
            yield path, array, Held(path, _plain(end, path, spec))
            continue
        if len(array.shape) <= spec.dim or array.shape[spec.dim] != spec.size:
            raise ShapeError(
                f"plan_transfer: {end.what}: {path!r} of shape {array.shape} is fused of {dict(spec.parts)} along dim "
                f"{spec.dim}, which make {spec.size}.",
                path=path,
                shape=array.shape,
            )
        every = [_with_size(array, spec.dim, size) for _, size in spec.parts]
        for (name, held), part in zip(_parts(end, path, spec, every), every, strict=True):
            yield name, part, held


def _parts(end: End, path: str, fused: Fused, arrays: Sequence[Array]) -> list[tuple[str, Held]]:
    """Return where the arrays fused at a path lie in a rank's block."""
    found, start = [], 0
    for name, (part, size), array in zip(fused.names(path), fused.parts, arrays, strict=True):
        if len(array.shape) <= fused.dim or array.shape[fused.dim] != size:
            raise ShapeError(
                f"plan_transfer: {end.what}: {path!r} is fused of {part!r} with {size} along dim {fused.dim}, but "
                f"{name!r} has shape {array.shape}.",
                path=path,
                shape=array.shape,
            )
        found.append((name, Held(path, fused.spec, fused.dim, start)))
        layout = dim_layouts(end.topology, fused.spec, array.shape, what=f"{end.what}: {name!r}")[fused.dim]
        start += size // (layout.size if layout else 1)
    return found


def _one(arrays: Mapping[str, Array], name: str, path: str) -> Array:
    if name not in arrays:
        raise ShardingError(
            f"plan_transfer: dst: {path!r} is fused of {name!r} too, which the source does not hold. It holds: "
            f"{listed(arrays)}.",
            path=path,
        )
    return arrays[name]


def _plain(end: End, path: str, spec: Any) -> P:
    if isinstance(spec, Fused):
        raise ShardingError(f"plan_transfer: {end.what}: {path!r} is fused there, and one array here.", path=path)
    return P.of(spec)


def _with_size(array: Array, dim: int, size: int) -> Array:
    return array._replace(shape=(*array.shape[:dim], size, *array.shape[dim + 1 :]))


def _mapping(where: str, what: str, specs: Any) -> dict[str, Any]:
    if not isinstance(specs, Mapping):
        raise ArgumentError(f"{where}: {what}: specs={specs!r}. Give a dm.P, {{path: dm.P}} or a dm.ShardingPlan.")
    found: dict[str, Any] = {}
    for key, spec in specs.items():
        path = str(key)
        if path in found:
            raise ArgumentError(
                f"{where}: {what}: two specs have the path {path!r}, as keys are read as text. Leave one of them out.",
                path=path,
            )
        if not (is_spec(spec) or isinstance(spec, Fused)):
            raise ShardingError(
                f"{where}: {what}: the spec of {path!r} is {spec!r}. Give a dm.P or a dm.Fused for every path, whose "
                f"keys are joined by dots.",
                path=path,
                spec=spec,
            )
        found[path] = spec if isinstance(spec, Fused) else P.of(spec)
    return found


def to_data(specs: Any) -> Any:
    """Return specs by path, or one for all, as plain data. *Pure.*

    >>> from_data(to_data({"w": P("tp", None)}))
    {'w': P('tp', None)}
    """
    if isinstance(specs, Mapping):
        return {"paths": {path: to_data(spec) for path, spec in specs.items()}}
    if isinstance(specs, Fused):
        return {"fused": to_data(specs.spec), "parts": [list(part) for part in specs.parts], "dim": specs.dim}
    return {"entries": [list(e) if isinstance(e, tuple) else e for e in specs.entries], "partial": list(specs.partial)}


def from_data(data: Mapping[str, Any]) -> Any:
    """Return what `to_data` made plain. *Pure.*"""
    if "paths" in data:
        return {path: from_data(spec) for path, spec in data["paths"].items()}
    if "fused" in data:
        return Fused(from_data(data["fused"]), {name: size for name, size in data["parts"]}, data["dim"])
    return P(*data["entries"], partial=data["partial"])
