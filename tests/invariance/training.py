"""Training runs in workers: every form over any splits, and how far each is from the oracle."""

import importlib
from typing import Any, NamedTuple

from tests.invariance.comparison import worst
from tests.worlds import torch_world, wide_jax_world

FORMS = ("lifted", "plain", "fsdp2", "jax")


class Job(NamedTuple):
    """One training run."""

    form: str
    split: tuple[tuple[str, int], ...]
    micro_batches: int
    dtype: str
    fault: str | None = None
    """What is broken on purpose, a name of `faults`."""


def job(form: str, split: dict[str, int], micro_batches: int, dtype: str, fault: str | None = None) -> Job:
    """Write down a run."""
    return Job(form, tuple(split.items()), micro_batches, dtype, fault)


def compared(jobs: list[Job], expected: Any, *, timeout_s: float = 900.0) -> dict[Job, tuple[str, float]]:
    """Run jobs of one framework in 8 ranks; return for each the array that is farthest from the oracle, and how far."""
    world, room = (wide_jax_world, "jax_training") if jobs[0].form == "jax" else (torch_world, "torch_training")
    ranks = world(_runs, room, jobs, expected, world_size=8, timeout_s=timeout_s)
    return {one: max((worst(found[one]) for found in ranks), key=_far) for one in jobs}


def _far(found: tuple[str, float]) -> float:
    return float("inf") if found[1] != found[1] else found[1]


def _runs(room: str, jobs: list[Job], expected: Any) -> Any:
    import dualmesh as dm
    from tests.invariance.faults import broken
    from tests.invariance.splits import named, spec_of

    trained = importlib.import_module(f"tests.invariance.{room}").trained_by
    found = {}
    for split in dict.fromkeys(job.split for job in jobs):
        dm.init_parallel_state(spec=spec_of(dict(split)), name=named(dict(split)))
        for one in [job for job in jobs if job.split == split]:
            with broken(one.fault):
                found[one] = trained(one.form)(one.micro_batches, one.dtype, expected)
        dm.clear_parallel_state()  # each group of a live state has a thread that polls
    return found
