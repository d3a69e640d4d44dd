"""Faults made in a process of each backend that forks their ranks."""

from collections.abc import Sequence

from tests.faults import jax_faults, torch_faults
from tests.faults.fault import Outcome
from tests.workers import Pool

BACKENDS = {"torch": torch_faults.FAULTS, "jax": jax_faults.FAULTS}
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_POOLS = {
    "torch": Pool(_ONE_THREAD),
    "jax": Pool(_ONE_THREAD | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}),
}


def made_in(backend: str, names: Sequence[str], at_once: int = 6) -> dict[str, dict[int, Outcome]]:
    """Return how every rank of the named faults ended."""
    return _POOLS[backend].run(_made, [(backend, list(names), at_once)], timeout_s=1500)[0]


def _made(backend: str, names: list[str], at_once: int) -> dict[str, dict[int, Outcome]]:
    import importlib

    importlib.import_module(f"dualmesh_{backend}")
    from tests.faults.nursery import made

    return made(BACKENDS[backend], names, at_once)
