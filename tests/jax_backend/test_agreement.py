"""Processes that do not mean the same states get an error in time, nothing is built, and a corrected call works."""

import re
import time

import numpy as np
import pytest

import dualmesh as dm
from tests.jax_backend.processes import processes

TIMEOUT_S = 3.0


def attempted(wrong, timeout_s):
    """Make a wrong attempt, then a right one; return what the first said and what the second answers."""
    import os

    import jax

    os.environ["DUALMESH_TIMEOUT_S"] = str(timeout_s)
    start, said = time.monotonic(), None
    try:
        globals()[wrong](jax.process_index())
    except dm.DualmeshError as error:
        said = (type(error).__name__, str(error))
    finally:
        del os.environ["DUALMESH_TIMEOUT_S"]
    seconds = time.monotonic() - start
    dm.clear_parallel_state()
    dm.init_parallel_state(dp_size=4, name="meeting")  # waits for whoever is late
    dm.clear_parallel_state()
    dm.init_parallel_state(dp_size=2, tp_size=2, name="again")
    total = dm.shard_map(lambda x: dm.ops.all_reduce(x, "world"), dm.P("world"), dm.P())
    return said, seconds, dm.to_numpy(total(np.arange(4.0))).tolist()


def other_sizes(process):
    dm.init_parallel_state(dp_size=4 if process else 2, tp_size=1 if process else 2)


def other_ranks(process):
    dm.init_parallel_state(dp_size=4, ranks=(0, 1, 2, 3) if process else (3, 1, 2, 0))


def never_comes(process):
    if process == 0:
        dm.init_parallel_state(dp_size=4)
    time.sleep(1.5 * TIMEOUT_S * process)


def other_settings(process):
    dm.init_parallel_state(dp_size=4, dp_mode="fsdp2" if process else "ddp")


def other_names(process):
    dm.init_parallel_state(dp_size=4, name=f"state{process}")


@pytest.mark.parametrize(
    ("wrong", "kind", "parts"),
    [
        ("other_sizes", "AgreementError", ["process 0: 1 to build", "process 1: 1 to build", "'tp': 2"]),
        ("other_ranks", "AgreementError", ["process 0: 1 to build", "ranks=(3, 1, 2, 0)"]),
        ("never_comes", "GroupTimeoutError", ["process 1 did not come within 3 s, of 2 processes"]),
        ("other_settings", "AgreementError", ["process 0: ", "dp_mode='ddp'"]),
        ("other_names", "AgreementError", ["process 0: ", "'state0': ", "'state1': "]),
    ],
)
def test_disagreement_is_named_on_every_process_and_can_be_corrected(wrong, kind, parts):
    for process, (said, seconds, total) in enumerate(processes(attempted, wrong, TIMEOUT_S, devices=(2, 2))):
        assert seconds < TIMEOUT_S + 5
        assert total == [6.0]
        if (wrong, process) == ("never_comes", 1):
            assert said is None
            continue
        assert said[0] == kind
        assert all(part in said[1] for part in [*parts, "Nothing was built"])


def opened_otherwise(setting):
    """Open the world with a setting that the other process does not give; return what building a state says."""
    import jax

    dm.init_distributed("jax").close()
    settings = {
        "device_order": {"device_order": jax.devices()[2:] + jax.devices()[:2]},
        "swapped in one process": {"device_order": [jax.devices()[place] for place in (0, 1, 3, 2)]},
        "axis_types": {"axis_types": "explicit"},
    }[setting]
    with dm.session("jax", timeout_s=20.0, **(settings if jax.process_index() else {})) as session:
        with pytest.raises(dm.errors.AgreementError) as said:
            dm.init_parallel_state(dp_size=4)
        assert session.states() == []
    with dm.session("jax", timeout_s=20.0, **settings):
        dm.init_parallel_state(dp_size=4)
        total = dm.shard_map(lambda x: dm.ops.all_reduce(x, "dp"), dm.P("dp"), dm.P())
        return str(said.value), dm.to_numpy(total(np.arange(4.0))).tolist()


@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("device_order", r"process 1: 1 to build .*, device_order=\[\d+, \d+, 0, 1\]"),
        ("swapped in one process", r"process 1: 1 to build .*, device_order=\[0, 1, \d+, \d+\]"),
        ("axis_types", "process 1: 1 to build .*, axis_types='explicit'"),
    ],
)
def test_worlds_that_were_opened_otherwise_are_no_world(setting, part):
    for said, total in processes(opened_otherwise, setting, devices=(2, 2)):
        assert re.search(part, said), said
        assert "process 0: 1 to build" in said
        assert total == [6.0]


def left_alone():
    """Wait for objects that the other process never sends, with a short patience; then meet again."""
    import jax

    state = dm.init_parallel_state(dp_size=4)
    state.store.wait_s = 2.0
    said = None
    if jax.process_index() == 0:
        try:
            dm.host.barrier()
        except dm.DualmeshError as error:
            said = (type(error).__name__, str(error), error.missing)
    else:
        time.sleep(3.0)
        with pytest.raises(dm.errors.GroupTimeoutError):
            dm.host.barrier()
    state.store.wait_s = 20.0
    return said, dm.host.all_gather(jax.process_index(), "world")


def test_whoever_did_not_come_to_an_exchange_is_named():
    (said, first), (_, second) = processes(left_alone, devices=(2, 2))
    assert first == second == [0, 0, 1, 1]
    assert said[0] == "GroupTimeoutError"
    assert "process 1 did not come within 2 s, of processes 0, 1" in said[1]
    assert said[2] == (1,)
