"""A part of the faults in every run, one of each kind; all of them by `python -m tests.faults`."""

import pytest

from tests.faults.__main__ import PAGE
from tests.faults.fault import wrong
from tests.faults.runs import BACKENDS, made_in

EVERY_RUN = {
    "torch": [
        *("other_version", "other_members", "other_sizes_of_a_part", "registers_late", "dies_in_building"),
        *("other_shape", "other_order_of_axes", "other_recompute", "other_backward", "debug_on_one"),
        *("all_reduce: dies", "shift: does not come", "async_ all_reduce: dies", "store_dies_in_use"),
        *(
            "raises_in_scope",
            "store_is_frozen",
            "rank 3 leaves",
            "rank 0 leaves",
            "in_another_world",
            "same_rank_twice",
            "port_in_use",
        ),
    ],
    "jax": [
        *("other_shape", "leaves_out", "leaves_early", "never_comes"),
        *("dies_in_use", "call: dies, 4", "call_gradient: dies, 2"),
    ],
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_faults_end_in_time_in_the_right_error_on_every_rank_and_leave_no_process(backend):
    """State, axis and ranks are in the message wherever the fault has them."""
    faults = BACKENDS[backend]
    bad = [
        f"{name}: {one}"
        for name, outcomes in made_in(backend, EVERY_RUN[backend], at_once=8).items()
        for one in wrong(faults[name], outcomes)
    ]
    assert bad == [], "\n".join(bad)


def test_there_are_forty_faults_and_the_table_has_all_of_them():
    """The table is written by the run that makes them."""
    table = PAGE.read_text()
    assert sum(map(len, BACKENDS.values())) >= 40
    for faults in BACKENDS.values():
        for fault in faults.values():
            assert f"| {fault.backend} | {fault.what} | {fault.world} |" in table
