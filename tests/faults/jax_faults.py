"""The faults of JAX processes, two of two devices each. A body runs as every process."""

import os
import time

import numpy as np

import dualmesh as dm
from tests.faults.fault import Fault

SHORT_S = 2.0
FAULTS: dict[str, Fault] = {}


def fault(what, kind, *parts, **settings):
    """Register the decorated body as a fault."""

    def registered(body):
        FAULTS[body.__name__] = Fault(what, body, kind, parts, world=2, backend="jax", **settings)
        return body

    return registered


def state_of(wait_s=None, **sizes):
    """Register a state; its programs wait as long as said for other processes."""
    state = dm.init_parallel_state(**(sizes or {"dp_size": 2, "tp_size": 2}))
    if wait_s is not None:
        state.store.wait_s = wait_s
    return state


def total(size=4, axis="dp"):
    """Return a program over all processes, and what it takes."""
    program = dm.shard_map(lambda x: dm.ops.all_reduce(x, axis), dm.P(axis), dm.P())
    return program, dm.distribute(np.arange(float(size)), dm.P(axis))


# -- processes that are not there ----------------------------------------------------------------------------------


@fault("process 1 ends its session, without an error, where process 0 builds a state", "LostPeerError", "'late'",
       "process 1 left the session and will not come, of 2 processes", leaves=True, at={1: ("", ())})  # fmt: skip
def leaves_early(process):
    state_of()
    if process == 0:
        dm.init_parallel_state(dp_size=4, name="late")


# -- states that are not the same ----------------------------------------------------------------------------------


@fault("process 1 gives other sizes", "AgreementError", "process 0: 1 to build", "process 1: 1 to build", "'base'")
def other_sizes(process):
    state_of(dp_size=4 if process else 2, tp_size=1 if process else 2)


@fault("process 1 has another version of dualmesh", "AgreementError", "process 1: 1 to build by dualmesh 0.0.9")
def other_version(process):
    from dualmesh.backend import state_plan

    if process:
        state_plan.__version__ = "0.0.9"
    state_of()


@fault("process 1 lists the ranks in another order", "AgreementError", "ranks=(3, 1, 2, 0)", "'base'")
def other_rank_order(process):
    state_of(dp_size=4, ranks=(3, 1, 2, 0) if process else (0, 1, 2, 3))


@fault("process 1 never registers the state", "GroupTimeoutError", "process 1 did not come within 2 s, of 2 processes",
       "'base'", timeout_s=SHORT_S, at={1: ("", ())})  # fmt: skip
def never_registers(process):
    if process:
        time.sleep(SHORT_S + 1)
    else:
        state_of()


@fault("process 1 dies before it registers", "GroupTimeoutError", "process 1 did not come within 2 s", "'base'",
       timeout_s=SHORT_S, at={1: ("dies", ())})  # fmt: skip
def dies_before(process):
    if process:
        os._exit(7)
    state_of()


# -- programs that do not match ------------------------------------------------------------------------------------

HERE = "jax_faults.py:"


@fault("debug mode: process 1 has another shape", "AgreementError", "debug mode", "State 'base'", "float32[4]",
       "float32[8]", HERE, "processes 0, 1", debug=True)  # fmt: skip
def other_shape(process):
    state_of()
    program, x = total(8 if process else 4)
    program(x)


@fault("debug mode: process 1 calls two programs in the other order", "AgreementError", "debug mode", "State 'base'",
       "first", "second", HERE, debug=True)  # fmt: skip
def other_order(process):
    state_of()

    def first(x):
        return dm.ops.all_reduce(x, "dp")

    def second(x):
        return dm.ops.all_gather(x, "dp")

    _, x = total()
    for fn in (first, second)[:: -1 if process else 1]:
        dm.shard_map(fn, dm.P("dp"), dm.P())(x)


@fault("debug mode: process 1 leaves a program out", "GroupTimeoutError", "debug mode", "State 'base'", HERE,
       "process 1 did not come within 2 s", debug=True, timeout_s=SHORT_S, at={1: ("", ())})  # fmt: skip
def leaves_out(process):
    state_of()
    program, x = total()
    if process:
        time.sleep(SHORT_S + 1)
    else:
        program(x)


ENDED = ("State 'base': shard_map of total", HERE, "exit code 70")


@fault("process 0 never comes to a program; the one that waits is ended", "GroupTimeoutError", *ENDED,
       "has waited for 2 s, and process 0 is not in it", timeout_s=SHORT_S, exit_code=70,
       at={0: ("", ())})  # fmt: skip
def never_comes(process):
    state_of(SHORT_S)
    program, x = total()
    program(x)
    if process:
        program(x)
    else:
        time.sleep(SHORT_S + 3)


@fault("process 1 gives a program another shape and waits; it is ended", "GroupTimeoutError", *ENDED, "float32[8]",
       "process 0 is not in it", timeout_s=SHORT_S, exit_code=70, at={0: ("", ())})  # fmt: skip
def waits_for_another_shape(process):
    state_of(SHORT_S)
    program, x = total(8 if process else 4)
    program(x)
    if process:
        program(x)
    else:
        time.sleep(SHORT_S + 3)


# -- processes that die or do not come -----------------------------------------------------------------------------


@fault("process 1 dies before a program that ran before", "LostPeerError", "State 'base'", "processes 0, 1",
       "ranks 0, 1, 2, 3", "No word from process 1", timeout_s=SHORT_S, at={1: ("dies", ())})  # fmt: skip
def dies_in_use(process):
    state_of()
    program, x = total()
    program(x)
    if process:
        os._exit(7)
    time.sleep(0.3)
    program(x)


def dies_between(run, ranks):
    """Return a body in which process 1 dies before the others run something over all ranks once more."""

    def body(process):
        dm.init_parallel_state(dp_size=ranks)
        program, x = total(ranks)
        run(program, x)
        if process:
            os._exit(7)
        time.sleep(0.3)
        run(program, x)

    return body


def call(program, x):
    program(x)


def call_gradient(program, x):
    dm.value_and_grad(lambda x: program(x).sum())(x)


for devices in (1, 2, 4):
    for run in (call, call_gradient):
        body = dies_between(run, 2 * devices)
        body.__name__ = f"{run.__name__}: dies, {devices}"
        what = {"call": "a program", "call_gradient": "dm.value_and_grad"}[run.__name__]
        fault(f"process 1 dies before {what} over all ranks, {devices} in each process", "LostPeerError",
              "State 'base'", "processes 0, 1", "No word from process 1", devices=devices, timeout_s=SHORT_S,
              at={1: ("dies", ())})(body)  # fmt: skip


@fault("process 1 does not come to host.barrier", "GroupTimeoutError", "host.barrier", "process 1 did not come within",
       timeout_s=SHORT_S, at={1: ("", ())})  # fmt: skip
def away_from_barrier(process):
    state_of(SHORT_S)
    if process:
        time.sleep(SHORT_S + 1)
    else:
        dm.host.barrier()


@fault("process 1 dies before host.all_gather", "GroupTimeoutError", "host.all_gather", "process 1 did not come",
       timeout_s=SHORT_S, at={1: ("dies", ())})  # fmt: skip
def dies_before_objects(process):
    state_of(SHORT_S)
    if process:
        os._exit(7)
    dm.host.all_gather(process)


@fault("process 1 raises an error of the user's own inside a scope", "GroupTimeoutError", "host.barrier",
       "process 1 did not come", timeout_s=SHORT_S, at={1: ("ValueError", ("the user's own",))})  # fmt: skip
def raises_in_scope(process):
    state_of(SHORT_S)
    with dm.use_parallel_state("base"):
        if process:
            raise ValueError("the user's own")
        dm.host.barrier()


# -- states that are no more, worlds that cannot start -------------------------------------------------------------


@fault("a state is used after it was cleared", "StaleStateError", "State 'base'", "was cleared")
def after_clear(process):
    state = state_of()
    dm.clear_parallel_state()
    dm.distribute(np.arange(4.0), dm.P("dp"), state=state)


@fault("a function lifted by shard_map for a given state is called after its session", "StaleStateError",
       "State 'base'")  # fmt: skip
def program_after_session(process):
    state = state_of()
    program = dm.shard_map(lambda x: dm.ops.all_reduce(x, "dp"), dm.P("dp"), dm.P(), state=state)
    program(np.arange(4.0))
    dm.init_distributed("jax").close()
    program(np.arange(4.0))


@fault("process 1 never starts", "SessionError", "process 1 of 2 did not come within 2 s", has_world=False,
       timeout_s=SHORT_S, at={1: ("", ())})  # fmt: skip
def never_starts(process):
    if process:
        return
    address = os.environ["FAULT_ADDRESS"]
    dm.init_distributed("jax", rank=0, world_size=2, init_method=address, timeout_s=SHORT_S)


@fault("the port is in use", "SessionError", "cannot listen on port", has_world=False, timeout_s=SHORT_S,
       at={1: ("", ())})  # fmt: skip
def port_in_use(process):
    import socket

    if process:
        return
    address = os.environ["FAULT_ADDRESS"]
    with socket.create_server(("", int(address.rpartition(":")[2]))):
        dm.init_distributed("jax", rank=0, world_size=2, init_method=address, timeout_s=SHORT_S)


@fault("RANK is set, WORLD_SIZE is not", "LaunchError", "WORLD_SIZE", "missing", has_world=False)
def half_set(process):
    os.environ.update(RANK=str(process), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    os.environ.pop("WORLD_SIZE", None)
    dm.init_distributed("jax")
