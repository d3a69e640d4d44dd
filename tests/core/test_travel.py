"""States that are pickled and copied."""

import copy
import pickle
import subprocess
import sys

import pytest

import dualmesh as dm
from dualmesh.errors import StaleStateError
from dualmesh.remembered import RememberedState


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
    remembered = RememberedState(("actor",), state.plan, state.session_words, ("another process", 0))
    with pytest.raises(StaleStateError, match=r"'actor' came by pickle from another process \(sim, 8 ranks.*by_name"):
        eval(use, {"dm": dm, "state": remembered})


@pytest.mark.usefixtures("world")
def test_a_remembered_state_travels_on_with_its_origin():
    state = dm.init_parallel_state(spec=SPECS["grid"], name="actor")
    remembered = RememberedState(("actor",), state.plan, "torch, 8 ranks", ("another process", 0))
    assert copy.deepcopy(remembered) is remembered
    again = pickle.loads(pickle.dumps(remembered))
    assert (again.names, again.plan, again.session_words) == (["actor"], state.plan, "torch, 8 ranks")
    assert elsewhere(remembered, "print(type(state).__name__, state.size('dp'))") == "RememberedState 4"
