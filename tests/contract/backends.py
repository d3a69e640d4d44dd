"""The backends under contract. A promised one that is missing fails; it is never skipped."""

import numpy as np

from tests.third_party.installed import toy_world
from tests.worlds import wide_worlds

BACKENDS = ("sim", "torch", "jax", "toy")
DIFFERENTIABLE = ("torch", "jax")


def run(backend, fn, *args, world_size, timeout_s=240.0):
    """Run a function in a backend's world, 64-bit numbers included; return one result per process."""
    return {**wide_worlds(), "toy": toy_world}[backend](fn, *args, world_size=world_size, timeout_s=timeout_s)


def agreed(results):
    """Return the result that all processes gave."""
    for process, result in enumerate(results):
        assert same(results[0], result), f"process 0 found {results[0]!r}, process {process} {result!r}"
    return results[0]


def same(one, other):
    """Tell whether two nested results are equal, arrays bit for bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    return one == other
