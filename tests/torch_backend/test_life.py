"""Worlds: adopted, ended by others, begun again; what old handles then say."""

import os
import subprocess
import sys

import dualmesh as dm
from tests.workers import free_port
from tests.worlds import torch_pool


def started(fn, world_size, *args, timeout_s=60.0):
    """Run `fn(rank, world_size, port, *args)` in processes without a session."""
    port = free_port()
    return torch_pool.run(fn, [(rank, world_size, port, *args) for rank in range(world_size)], timeout_s=timeout_s)


def begin(rank, world_size, port):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)


def adopting(rank, world_size, port):
    import torch
    import torch.distributed as dist

    begin(rank, world_size, port)
    state = dm.init_parallel_state(dp_size=world_size)
    session = dm.init_distributed("torch")
    total = dm.ops.all_reduce(torch.tensor(float(rank)), "dp").item()
    session.close()
    alive = dist.is_initialized()
    dist.destroy_process_group()
    return total, session.owned, alive, state.is_live


def test_a_world_that_the_trainer_started_is_adopted_and_stays_the_trainers():
    assert started(adopting, 3) == [(3.0, False, True, False)] * 3


def recreating(rank, world_size, port, other_port):
    import numpy as np
    import torch
    import torch.distributed as dist

    def refusal(fn):
        try:
            fn()
        except dm.StaleStateError as error:
            return "'base'" in str(error)
        return None

    states, totals = [], []
    for place in (port, other_port):
        begin(rank, world_size, place)
        state = dm.init_parallel_state(dp_size=2, dp_shard_size=2)
        states.append(state)
        x = dm.distribute(np.arange(4.0), dm.P("dp_shard"))
        totals.append(dm.to_numpy(x + x).tolist())
        totals.append(dm.ops.all_reduce(torch.ones(1), "dp").item())
        if len(states) == 1:
            dist.destroy_process_group()
            stale = [
                refusal(lambda: dm.ops.all_reduce(torch.ones(1), "dp", state=states[0])),
                refusal(lambda: states[0].mesh),
                refusal(lambda: states[0].fsdp_mesh),
                refusal(lambda: states[0].device_mesh["dp"]),
                refusal(lambda: states[0].group("dp")),
                refusal(lambda: states[0].dp_group),
                refusal(lambda: states[0].fsdp_group),
                refusal(lambda: dm.shard_map(torch.neg, dm.P(), dm.P(), state=states[0])(torch.ones(1))),
                refusal(lambda: dm.host.barrier(state=states[0])),
            ]
    fresh = states[0] is not states[1]
    sizes = states[0].size("dp")
    dm.clear_parallel_state()
    dist.destroy_process_group()
    return totals, stale, fresh, sizes


def test_a_world_begun_again_builds_fresh_states_and_old_ones_are_refused_where_used():
    for totals, stale, fresh, size in started(recreating, 2, free_port()):
        assert totals == [[0.0, 2.0, 4.0, 6.0], 2.0] * 2
        assert stale == [True] * 9
        assert fresh
        assert size == 2


def cleared_around(rank, world_size, port):
    """Live four times on one store; clear before and after the world's end, twice, by name and all."""
    import torch
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
    totals = []
    for life in ("before", "after", "by name", "never"):
        dist.init_process_group("gloo", store=dist.PrefixStore(life, store), rank=rank, world_size=world_size)
        dm.init_parallel_states({"a": dm.TopologySpec({"x": world_size}), "b": dm.parallel_spec(tp_size=world_size)})
        totals.append(dm.ops.all_reduce(torch.tensor(rank + 1.0), "x").item())
        if life == "by name":
            dm.clear_parallel_state("a")
            totals.append(dm.ops.all_reduce(torch.tensor(rank + 1.0), "tp").item())
        if life == "before":
            dm.clear_parallel_state()
            dm.clear_parallel_state()
        alive = dist.is_initialized()
        dist.barrier()
        dist.destroy_process_group()
        if life == "after":
            dm.clear_parallel_state()
            dm.clear_parallel_state()
        totals.append(alive)
    dm.clear_parallel_state()
    return totals


def test_states_are_cleared_before_and_after_the_world_ends_twice_and_by_name():
    assert started(cleared_around, 2) == [[3.0, True, 3.0, True, 3.0, 3.0, True, 3.0, True]] * 2


def raising(rank, world_size, port):
    import torch
    import torch.distributed as dist

    begin(rank, world_size, port)
    dm.init_parallel_states({"a": dm.TopologySpec({"x": 2}), "b": dm.TopologySpec({"x": 2}, roles={"data": "x"})})
    said = None
    try:
        with dm.use_parallel_state("b"):
            if rank == 0:
                raise ValueError("the body's own")
    except ValueError as error:
        said = str(error)
    # Nothing was communicated on the way out, so the next collective meets its partner.
    found = said, dm.scope_name(), dm.ops.all_reduce(torch.tensor(rank + 1.0), "x").item()
    dm.clear_parallel_state()
    dist.destroy_process_group()
    return found


def test_an_exception_on_one_rank_leaves_a_scope_first_and_without_communicating():
    assert started(raising, 2) == [("the body's own", "a", 3.0), (None, "a", 3.0)]


def same_store(rank, world_size, port):
    import torch
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
    totals = []
    for life in range(3):
        # Without a prefix torch's own default group finds the addresses of the life before, now and then.
        own = dist.PrefixStore(f"life {life}", store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=world_size)
        dm.init_parallel_state(spec=dm.TopologySpec({"a": world_size}))
        totals.append(dm.ops.all_reduce(torch.ones(1), "a").item())
        dm.clear_parallel_state()
        dist.destroy_process_group()
    return totals


def test_lives_on_one_store_do_not_meet_each_others_addresses():
    assert started(same_store, 2) == [[2.0] * 3] * 2


def alone():
    import numpy as np
    import torch

    with dm.session(backend="torch") as session:
        state = dm.init_parallel_state(dp_size=1)
        lifted = dm.shard_map(lambda x: dm.ops.all_reduce(x * x, "dp"), dm.P("dp"), dm.P("dp"))
        x = torch.arange(3.0, requires_grad=True)
        lifted(x).sum().backward()
        found = [session.world_size, state.mesh.size(), dm.to_numpy(lifted(np.arange(3.0))).tolist(), x.grad.tolist()]
    return found


def test_one_process_without_a_launcher_is_a_world_of_one():
    assert torch_pool.run(alone, [()]) == [[1, 1, [0.0, 1.0, 4.0], [0.0, 2.0, 4.0]]]


def without_jax():
    import subprocess
    import sys

    code = (
        "import sys; sys.modules['jax'] = None; import dualmesh_torch, dualmesh as dm\n"
        "with dm.session(backend='torch'): dm.init_parallel_state(dp_size=1)\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in ('jax', 'jaxlib')))"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout.strip()


def test_the_backend_works_without_jax():
    assert without_jax() == "['jax']"


def beginning_again(rank, world_size, port):
    """Return the sums of three lives of a world at one address; a rank is late where another has gone on."""
    import time

    import torch

    sums = []
    for life in range(3):
        time.sleep(0.2 if rank == life else 0.0)
        address = f"tcp://127.0.0.1:{port}"
        with dm.session("torch", rank=rank, world_size=world_size, init_method=address, timeout_s=30.0):
            dm.init_parallel_state(dp_size=world_size)
            sums.append(dm.ops.all_reduce(torch.tensor([float(rank + life)]), "dp").item())
    return sums


def test_a_world_begins_again_and_again_at_the_same_address_though_its_ranks_are_not_in_step():
    """Rank 0, which holds the store, is late in the first life, the others in those after it."""
    assert started(beginning_again, 3) == [[3.0, 6.0, 9.0]] * 3


def coming_late(rank, world_size, port):
    """Return what a rank is told while rank 2 is missing, and the sum once it has come."""
    import time

    import torch

    address, said = f"tcp://127.0.0.1:{port}", None
    arguments = {"rank": rank, "world_size": world_size, "init_method": address}
    if rank == 2:
        time.sleep(3.0)
    else:
        try:
            dm.init_distributed("torch", timeout_s=1.0, **arguments)
        except dm.DualmeshError as error:
            said = type(error).__name__, error.missing, "No world was started" in str(error)
    with dm.session("torch", timeout_s=30.0, **arguments):
        dm.init_parallel_state(dp_size=world_size)
        return said, dm.ops.all_reduce(torch.tensor([float(rank)]), "dp").item()


def test_who_does_not_come_to_the_start_of_a_world_is_named_and_the_next_attempt_meets():
    said = ("GroupTimeoutError", (2,), True)
    assert started(coming_late, 3) == [(said, 3.0), (said, 3.0), (None, 3.0)]


RESTARTED = """
import os, sys, torch, dualmesh as dm
rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
for life in range(2):
    with dm.session("torch"):
        dm.init_parallel_state(dp_size=-1)
        total = dm.ops.all_reduce(torch.tensor([1.0 + rank]), "dp").item()
        os.write(1, f"attempt {attempt}, life {life}, rank {rank}: {total}\\n".encode())
        if attempt == "0" and rank == 1 and life == 1:
            sys.exit(3)
"""


def test_torchrun_restarts_workers_whose_worlds_begin_again_in_its_store(tmp_path):
    """The second attempt finds the first one's addresses, of sockets that are closed, in the launcher's store."""
    (tmp_path / "trainer.py").write_text(RESTARTED)
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    ended = subprocess.run(
        [*launch, "trainer.py"],
        **{"cwd": tmp_path, "env": os.environ | {"DUALMESH_TIMEOUT_S": "20"}, "capture_output": True, "text": True},
        **{"timeout": 120, "check": False},
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    lives = [(attempt, life, rank) for attempt in range(2) for life in range(2) for rank in range(2)]
    wanted = [f"attempt {attempt}, life {life}, rank {rank}: 3.0" for attempt, life, rank in lives]
    assert sorted(line for line in ended.stdout.splitlines() if line.startswith("attempt")) == wanted
