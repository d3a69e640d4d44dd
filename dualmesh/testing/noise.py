"""Random arrays whose elements depend on their global position only: the same on every topology and framework.

Seeds that differ by rank are in `dualmesh.runtime.rng`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dualmesh._support.optional_imports import np
from dualmesh.arrays.distribute import local_slices, shard_local
from dualmesh.backend.state import ParallelState
from dualmesh.runtime.scope import resolve_state

if TYPE_CHECKING:
    from numpy.typing import NDArray


def counter_noise(
    key: int, spec: Any, shape: Sequence[int], *, dtype: str = "float32", state: ParallelState | None = None
) -> Any:
    """Return a sharded array of standard normal numbers, the same numbers under every topology. *Local.*

    Element i (row-major position in the global array) is the Box-Muller transform of two hashes of (key, i); no rank
    computes more than it holds.

    Args:
        key: An integer; other keys give other numbers.
        spec: How the array is split.
        shape: The global shape.
        dtype: A floating-point dtype of numpy.
    """
    owner = resolve_state("testing.counter_noise", state)
    owner.require_ready("counter_noise")
    held = [local_slices(spec, shape, rank, state=owner) for rank in owner.local_ranks]
    cover = tuple(slice(min(s.start for s in dim), max(s.stop for s in dim)) for dim in zip(*held, strict=True))
    return shard_local(noise_block(key, cover, shape).astype(dtype), spec, state=owner)


def noise_block(key: int, slices: Sequence[slice], shape: Sequence[int]) -> "NDArray[np.float64]":
    """Return the part of `counter_noise`'s global array that lies in `slices`, float64. *Pure.*"""
    position = np.zeros((), dtype=np.uint64)
    for part, size in zip(slices, shape, strict=True):
        position = position[..., None] * np.uint64(size) + np.arange(part.start, part.stop, dtype=np.uint64)
    seed = _hash(np.asarray(key & 0xFFFFFFFFFFFFFFFF, dtype=np.uint64))
    first, second = (_hash(position * np.uint64(2) + np.uint64(draw) + seed) for draw in (0, 1))
    radius = np.sqrt(-2.0 * np.log(((first >> np.uint64(11)) + np.uint64(1)) * 2.0**-53))
    return np.asarray(radius * np.cos(2.0 * np.pi * ((second >> np.uint64(11)) * 2.0**-53)))


def _hash(x: "NDArray[np.uint64]") -> "NDArray[np.uint64]":
    """Hash 64 bits by the splitmix64 finalizer (Steele, Lea and Flood 2014, "Fast splittable generators")."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
