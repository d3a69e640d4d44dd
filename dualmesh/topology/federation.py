"""`FederatedSpec`: a world cut into federations that train one model each, as declared.

Who holds what and speaks to whom is in `federated_topology`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

from dualmesh._support.checks import items_in
from dualmesh._support.plain_data import read_fields, stands_as, write_fields
from dualmesh.errors import SpecError, counted, listed
from dualmesh.topology.federated_topology import FederatedTopology
from dualmesh.topology.layout import divisors
from dualmesh.topology.resolve import positive, refuse, whole
from dualmesh.topology.spec import plain

_COMPARED = 8
"""Sizes that a message offers to change."""


@dataclass(frozen=True, init=False)
class FederatedSpec:
    """Sizes of the federations and of the model replicas inside them. Frozen and hashable.

    Args:
        group_sizes: Ranks in each federation, in rank order; one integer cuts the world into federations of that size.
        shard_size: Ranks that one replica of the model is sharded over (HSDP); None: the whole federation (FSDP).

    >>> topology = FederatedSpec((8, 4), shard_size=2).resolve(12)
    >>> topology.communicating(0), topology.federated_group(3), topology.receive_from(5)
    ((0, 3), (3, 11), 3)
    """

    group_sizes: tuple[int, ...] | int = stands_as(
        "group_sizes", lambda sizes: list(sizes) if isinstance(sizes, tuple) else sizes
    )
    shard_size: int | None = stands_as("shard_size", left_out=None)

    def __init__(self, group_sizes: Iterable[int] | int, shard_size: int | None = None) -> None:
        object.__setattr__(self, "group_sizes", _sizes(group_sizes))
        object.__setattr__(self, "shard_size", plain(shard_size))

    def resolve(self, world_size: int) -> "FederatedTopology":
        """Validate for a world. *Pure.*

        Raises:
            ArgumentError: The world size is no positive integer.
            SpecError: The sizes do not fit; `problems` lists every reason.
        """
        world_size = positive("FederatedSpec.resolve", "world_size", world_size)
        problems: list[str] = []
        sizes = _expand_sizes(self.group_sizes, world_size, problems)
        problems += _shard_problems(self.shard_size, sizes)
        refuse("FederatedSpec", problems, group_sizes=self.group_sizes, shard_size=self.shard_size, world=world_size)
        return FederatedTopology(FederatedSpec(sizes, self.shard_size))

    def to_dict(self) -> dict[str, Any]:
        """Return the spec as plain data for YAML, TOML or JSON. *Pure.*"""
        return write_fields(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "FederatedSpec":
        """Build a spec from what `to_dict` gives. *Pure.*

        Raises:
            SpecError: The data is no mapping, has no group sizes, or has a key that a spec does not know.
        """
        return read_fields("FederatedSpec.from_dict", cls, data)


def _sizes(group_sizes: Any) -> tuple[int, ...] | int:
    number = whole(group_sizes)
    if number is not None:
        return number
    sizes = items_in(group_sizes)
    if sizes is not None:
        return tuple(plain(size) for size in sizes)
    raise SpecError(
        f"FederatedSpec: group_sizes is {group_sizes!r}. Give a list of sizes, for example (4, 8), or one size.",
        group_sizes=group_sizes,
    )


def _expand_sizes(given: tuple[int, ...] | int, world_size: int, problems: list[str]) -> tuple[int, ...]:
    """Return a checked size per group, or () where there is a problem."""
    if isinstance(given, int):
        if 1 <= given < world_size and world_size % given == 0:
            return (given,) * (world_size // given)
        fits = [size for size in divisors(world_size) if size < world_size]
        problems.append(
            f"group_sizes={given} does not cut a world of {counted(world_size, 'rank')} into several federations. "
            f"What would fit: {listed(fits)}; or give a list of sizes that sum to {world_size}."
        )
        return ()
    bad = [f"federation {number} has size {size!r}" for number, size in enumerate(given) if (whole(size) or 0) < 1]
    if bad:
        problems.append(f"{listed(bad)}. Sizes are integers of at least 1.")
    elif not given:
        problems.append(f"group_sizes is empty. Give sizes that sum to {world_size}.")
    elif sum(given) != world_size:
        problems.append(
            f"group_sizes=({listed(given)}) sum to {sum(given)}, but the world has {counted(world_size, 'rank')}. "
            f"{_what_would_fit(given, world_size - sum(given))}"
        )
    return () if bad else given


def _what_would_fit(sizes: tuple[int, ...], missing: int) -> str:
    fits = [
        f"size {size + missing} for federation {number}"
        for number, size in enumerate(sizes[:_COMPARED])
        if size + missing >= 1
    ]
    if missing > 0:
        fits.append(f"one more federation of {missing}")
    return f"What would fit, one changed: {listed(fits)}." if fits else "No single federation can be changed to fit."


def _shard_problems(shard_size: Any, sizes: tuple[int, ...]) -> Iterator[str]:
    if shard_size is None:
        return
    number = whole(shard_size)
    if number is None or number < 1:
        yield f"shard_size is {shard_size!r}. It must be an integer of at least 1, or None."
        return
    bad = [f"federation {place} has {counted(size, 'rank')}" for place, size in enumerate(sizes) if size % number]
    if bad:
        yield (
            f"shard_size={number} does not divide every federation: {listed(bad)}. What would fit: "
            f"{listed(divisors(gcd(*sizes)))}."
        )
