"""States that are pickled and copied."""

import copy
import multiprocessing
import pickle
import subprocess
import sys

import pytest

import dualmesh as dm
from dualmesh.backend import pickling
from dualmesh.backend.detached_state import DetachedState
from dualmesh.errors import MembershipError, StaleStateError


class Trainer:
    def __init__(self, state):
        self.state = state
        self.steps = [1, 2]


SPECS = {
    "grid": dm.parallel_spec(dp_shard_size=4, ulysses_size=2, ep_size=4),
    "groups": dm.GroupSpec({"node": [[5, 0, 1], [2, 3]]}),
}


def elsewhere(state, code):
    """Return what another process prints that unpickles a state and runs some code on it."""
    started = f"import pickle, sys, dualmesh as dm\nstate = pickle.loads(sys.stdin.buffer.read())\n{code}"
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", started], input=pickle.dumps(state), capture_output=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr.decode()
    return ended.stdout.decode().strip()


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_copies_and_pickles_within_the_process_are_the_live_state(spec):
    state = dm.init_parallel_state(spec=spec)
    for kept in (copy.copy(state), copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert kept is state
    trainer = copy.deepcopy(Trainer(state))
    assert trainer.state is state
    assert trainer.steps == [1, 2]
    assert copy.deepcopy({"states": [state]})["states"][0] is state


@pytest.mark.usefixtures("world")
def test_a_cleared_state_is_still_itself_and_never_its_successor():
    sent = pickle.dumps(old := dm.init_parallel_state(dp_size=8))
    dm.clear_parallel_state()
    dm.init_parallel_state(dp_size=8)
    assert pickle.loads(sent) is old


@pytest.mark.usefixtures("world")
def test_another_process_gets_sizes_and_ranks_and_no_framework():
    state = dm.init_parallel_state(spec=SPECS["grid"], name="actor", ranks=(7, 6, 5, 4, 3, 2, 1, 0))
    asked = "state.size('ep'), state.ranks('ep', 7), state.index('dp_shard', 0), state.names"
    found = elsewhere(state, f"print(({asked}, state.is_member, state.is_live, 'torch' in sys.modules))")
    assert found == str((4, (7, 6, 5, 4), 3, ["actor"], False, False, False))


@pytest.mark.usefixtures("world")
def test_another_process_gets_rank_groups():
    state = dm.init_parallel_state(spec=SPECS["groups"])
    asked = "state.size('node', 3), state.ranks('node', 0), state.topology.has_rank(4)"
    found = elsewhere(state, f"print(({asked}))")
    assert found == str((2, (5, 0, 1), False))


@pytest.mark.parametrize(
    "use",
    [
        "state.group('ep')",
        "state.mesh",
        "state.submesh('ep')",
        "state.index('ep')",
        "state.collectives",
        "dm.ops.all_reduce(1.0, 'ep', state=state)",
        "dm.host.barrier(state=state)",
        "dm.distribute([1.0], dm.P(), state=state)",
        "dm.shard_map(abs, dm.P(), dm.P(), state=state)(1.0)",
        "state.dp_rank",
    ],
)
@pytest.mark.usefixtures("world")
def test_another_process_is_refused_what_needs_the_session(use):
    state = dm.init_parallel_state(spec=SPECS["grid"], name="actor")
    remembered = DetachedState(("actor",), state.plan, state.session_label, ("another process", 0))
    with pytest.raises(StaleStateError, match=r"'actor' came by pickle from another process \(sim, 8 ranks.*by_name"):
        eval(use, {"dm": dm, "state": remembered})


@pytest.mark.usefixtures("world")
def test_a_remembered_state_travels_on_with_its_origin():
    state = dm.init_parallel_state(spec=SPECS["grid"], name="actor")
    remembered = DetachedState(("actor",), state.plan, "torch, 8 ranks", ("another process", 0))
    assert copy.deepcopy(remembered) is remembered
    again = pickle.loads(pickle.dumps(remembered))
    assert (again.names, again.plan, again.session_label) == (["actor"], state.plan, "torch, 8 ranks")
    assert elsewhere(remembered, "print(type(state).__name__, state.size('dp'))") == "DetachedState 4"


ASKED = ("global_rank", "data_index", "data_size", "is_member", "local_ranks", "dp_rank")


def told(state):
    """Return what a state says of the rank that asks; a worker runs it."""
    asked = {name: getattr(state, name) for name in ASKED}
    return {**asked, "index": state.index("tp"), "ranks": state.ranks("dp"), "writer": state.is_writer()}


def detached(state, ranks, holders, size=8):
    return DetachedState(("base",), state.plan, "torch", ("elsewhere", 0), pickling.Held(ranks, size, holders))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.usefixtures("world")
def test_a_worker_of_the_sender_knows_the_senders_rank(method):
    """However a worker is started, and whether it is started with the state or gets it later."""
    spec = dm.TopologySpec({"dp": 2, "tp": 3}, roles={"data": "dp"})
    state = dm.init_parallel_state(spec=spec, ranks=(7, 6, 5, 4, 3, 2))
    sent = detached(state, (3,), (pickling.identify_process(),))
    due = {
        "global_rank": 3,
        "data_index": 1,
        "data_size": 2,
        "is_member": True,
        "local_ranks": (3,),
        "dp_rank": 1,
        "index": 1,
        "ranks": (6, 3),
        "writer": False,
    }
    assert told(sent) == due
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply(told, (sent,)) == due
    assert told_by_a_process_started_with(sent, method) == due


def told_by_a_process_started_with(state, method):
    """Return what a process says that is started with a state, as a data loader starts its workers with its data."""
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=put_told, args=(queue, state))
    process.start()
    try:
        return queue.get(timeout=60)
    finally:
        process.join(60)


def put_told(queue, state):
    queue.put(told(state))


@pytest.mark.usefixtures("world")
def test_a_worker_of_a_process_without_a_rank_of_the_state_is_no_member():
    state = dm.init_parallel_state(spec=dm.TopologySpec({"dp": 2}), ranks=(0, 1))
    sent = detached(state, (5,), (pickling.identify_process(),))
    assert (sent.is_member, sent.local_ranks, sent.global_rank, sent.world.size) == (False, (), 5, 8)
    with pytest.raises(MembershipError, match=r"rank 5\) is no member"):
        sent.index("dp")


@pytest.mark.usefixtures("world")
def test_a_process_that_is_no_worker_of_the_sender_is_refused_its_rank():
    """Also one that has the sender's process number, in another run."""
    state = dm.init_parallel_state(spec=dm.TopologySpec({"dp": 8}))
    host, pid, started = pickling.identify_process().split("/")
    for holder in ("other", f"{host}/{pid}/{int(started) - 1}", f"else{host}/{pid}/{started}"):
        sent = detached(state, (3,), (holder,))
        assert (sent.is_member, sent.local_ranks) == (False, ())
        for ask in (lambda sent=sent: sent.global_rank, sent.own_rank, lambda sent=sent: sent.index("dp")):
            with pytest.raises(StaleStateError, match="came by pickle from another process"):
                ask()
