"""Whatever is broken on purpose, the comparison with the oracle says so."""

import pytest

from tests.invariance import reference
from tests.invariance.training import compared, job

ULYSSES, RING, TENSOR = (
    {"dp_shard": 2, "ulysses": 2, "tp": 2, "ep": 2},
    {"dp_shard": 2, "cp": 4, "ep": 8},
    {"dp_replicate": 2, "cp": 2, "tp": 2, "ep": 2},
)
ON_TORCH = [
    ("lifted", ULYSSES, "all_gather: wrong factor"),
    ("lifted", ULYSSES, "all_reduce: wrong factor"),
    ("plain", ULYSSES, "all_to_all: wrong factor"),
    ("plain", ULYSSES, "ragged_all_to_all: wrong factor"),
    ("plain", ULYSSES, "leave: wrong factor"),
    ("plain", ULYSSES, "enter: no sum"),
    ("plain", ULYSSES, "take_block: wrong factor"),
    ("plain", RING, "shift: wrong factor"),
    ("plain", RING, "shift: wrong way"),
    ("plain", RING, "ring: stale maximum"),
    ("plain", TENSOR, "token_mean: own total"),
    ("plain", TENSOR, "sync_gradients: mean"),
    ("fsdp2", TENSOR, "sum_gradients: left out"),
]
ON_JAX = [
    ("jax", ULYSSES, "all_gather: wrong factor"),
    ("jax", RING, "shift: wrong way"),
    ("jax", ULYSSES, "ragged_all_to_all: wrong factor"),
    ("jax", TENSOR, "token_mean: own total"),
]


@pytest.mark.parametrize("cases", [ON_TORCH, ON_JAX], ids=["torch", "jax"])
def test_every_fault_is_seen(cases):
    jobs = [job(form, split, 2, "float64", fault) for form, split, fault in cases]
    found = compared(jobs, reference.trained())
    unseen = {one.fault: by for one, (_, by) in found.items() if not by > 1e-4}
    assert unseen == {}
