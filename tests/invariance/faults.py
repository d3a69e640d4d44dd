"""What is broken on purpose in a training run, by the names of the jobs: faults of `dualmesh.testing.inject`."""

from contextlib import nullcontext

from dualmesh.testing import inject


def broken(name):
    """Return a context in which one thing is broken; None breaks nothing."""
    if name is None:
        return nullcontext()
    fault, settings = FAULTS[name]
    return inject(fault, **settings)


VERBS = ("all_gather", "all_to_all", "ragged_all_to_all", "all_reduce", "leave", "take_block", "shift")
FAULTS = {
    **{f"{verb}: wrong factor": ("grad_wrong_factor", {"verb": verb}) for verb in VERBS},
    "shift: wrong way": ("grad_wrong_way", {}),
    "enter: no sum": ("grad_not_summed", {}),
    "ring: stale maximum": ("stale_maximum", {}),
    "token_mean: own total": ("own_total", {}),
    "sum_gradients: left out": ("wrappers_average", {}),
    "sync_gradients: mean": ("gradients_averaged", {}),
}
