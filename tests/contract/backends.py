"""The backends under contract. A promised one that is missing fails; it is never skipped."""

from functools import partial

from dualmesh.testing.contract import agreed as agreed
from tests.third_party.installed import toy_world
from tests.worlds import wide_worlds

BACKENDS = ("sim", "torch", "jax", "toy")
DIFFERENTIABLE = ("torch", "jax")


def run(backend, fn, *args, world_size, timeout_s=240.0):
    """Run a function in a backend's world, 64-bit numbers included; return one result per process."""
    return {**wide_worlds(), "toy": toy_world}[backend](fn, *args, world_size=world_size, timeout_s=timeout_s)


def place(backend):
    """Return a backend's world as the checks of the contract take it."""
    return partial(run, backend)
