"""Recordings: two runs are held to each other tap by tap, over worlds, frameworks and process trees."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import DifferenceError, RecordingError
from dualmesh.testing import compare_recordings, load, run_on
from dualmesh.testing.taps import tap

X = np.random.default_rng(3).normal(size=(8, 4))
W = np.random.default_rng(4).normal(size=(4, 4))
SPLITS = {4: {"dp_size": 2, "tp_size": 2}, 8: {"dp_size": 4, "ulysses_size": 2}}


def program(x, w, bad):
    """Two layers on this rank's rows; `bad` adds to one element of the second layer's weight."""
    from array_api_compat import array_namespace

    xp = array_namespace(x)
    hidden = tap("layers.0", xp.tanh(x @ w), dm.P("dp_shard"))
    wrong = tap("layers.1.weight", w * (1 + bad))
    out = tap("layers.1", xp.tanh(hidden @ wrong), dm.P("dp_shard"))
    return dm.ops.all_reduce(xp.sum(out * out), "dp_shard")


def trained(world_size, path, how, bad=0.0, steps=2):
    """Run some steps under a recording or a replay; return the gradient of the last one."""
    from dualmesh.testing import record, replay
    from dualmesh.testing.instruments import instruments_of

    state = dm.init_parallel_state(**SPLITS[world_size])
    x, w = dm.distribute(X, dm.P("dp_shard")), dm.distribute(W, dm.P())
    bad = dm.distribute(np.where(np.arange(16).reshape(4, 4) == 6, bad, 0.0), dm.P())
    lifted = dm.shard_map(program, (dm.P("dp_shard"), dm.P(), dm.P()), dm.P())
    run = instruments_of(state.backend).compiled(dm.value_and_grad(lifted, (1,)))
    run(x, w, bad)  # compiled before the recording begins: inside, its taps must be there all the same
    with {"record": record, "replay": replay}[how](path):
        for _ in range(steps):
            gradient = run(x, w, bad)[1][0]
    return dm.to_numpy(gradient)


def difference_of(*args):
    try:
        trained(*args)
    except DifferenceError as error:
        return str(error), [one.what for one in error.differences]
    return None


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """A recording of torch at world 4, made once."""
    path = tmp_path_factory.mktemp("recordings") / "torch4"
    run_on("torch", trained, 4, path, "record", world_size=4)
    return path


def test_a_recording_has_every_rank_and_gradients_are_those_of_the_global_value(recording):
    assert sorted(file.name for file in recording.iterdir()) == [f"rank{rank}.npz" for rank in range(4)]
    found = load(recording)
    keys = [str(key) for key in found.keys()]
    assert keys[:6] == [
        *("layers.0", "layers.1.weight", "layers.1"),
        *("layers.1, gradient", "layers.1.weight, gradient", "layers.0, gradient"),
    ]
    assert keys[6] == "layers.0, time 2"
    hidden = np.tanh(X @ W)
    out = np.tanh(hidden @ W)
    d_out = 2 * out
    d_weight = hidden.T @ (d_out * (1 - out**2))
    by_name = {str(key): found.whole(key) for key in found.keys()}
    np.testing.assert_allclose(by_name["layers.1"], out, rtol=1e-12)
    np.testing.assert_allclose(by_name["layers.1, gradient"], d_out, rtol=1e-12)
    np.testing.assert_allclose(by_name["layers.1.weight, gradient"], d_weight, rtol=1e-12)
    np.testing.assert_allclose(by_name["layers.0, gradient"], (d_out * (1 - out**2)) @ W.T, rtol=1e-12)


@pytest.mark.parametrize("place", ["jax_x64", "torch"])
def test_a_torch_recording_at_world_4_is_met_at_world_8(recording, place):
    gradients = run_on(place, trained, 8, recording, "replay", world_size=8)
    assert all(gradient.shape == (4, 4) for gradient in gradients)


def test_a_torch_recording_is_met_by_jax_in_another_process_tree(recording):
    code = (
        "from tests.core import test_testing_taps as t; import dualmesh as dm\n"
        "with dm.session(backend='jax', world_size=8): t.trained(8, {path!r}, 'replay', {bad})\n"
    )
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"}
    root = Path(__file__).parent.parent.parent
    for bad, returned in ((0.0, 0), (1e-3, 1)):
        ended = subprocess.run(
            [sys.executable, "-c", code.format(path=str(recording), bad=bad)],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=root,
            env=env,
        )
        assert ended.returncode == returned, ended.stderr
    assert "first difference: layers.1.weight, element (1, 2), rank 0, " in ended.stderr


@pytest.mark.parametrize("place", ["jax_x64", "torch"])
def test_the_first_difference_names_tap_element_rank_values_and_ulps(recording, place):
    for said, whats in run_on(place, difference_of, 8, recording, "replay", 1e-3, world_size=8):
        value = W[1, 2]
        assert (
            f"replay of {recording}: first difference: layers.1.weight, element (1, 2), rank 0, {value} (torch)" in said
        )
        assert f"and {value * 1.001}" in said
        assert "ulps; 1 of 16 elements differ" in said
        assert "8 of 8 ranks differ" in said
        assert "layers.0" not in whats
        assert whats[:2] == ["layers.1.weight", "layers.1"]
        assert "layers.0, gradient" in whats


def test_a_run_that_takes_other_steps_is_told_apart(recording):
    ((said, _),) = run_on("jax_x64", difference_of, 8, recording, "replay", 0.0, 1, world_size=8)
    assert "layers.0, time 2: passed 2 times on torch, 1 time on jax" in said


def replicas_apart(path):
    from dualmesh.testing import record

    state = dm.init_parallel_state(dp_size=2, tp_size=2)

    def each(x):
        x = x + (state.index("world") == 3) * 0.25
        return tap("kept", x, dm.P("dp_shard"))

    with record(path):
        dm.shard_map(each, dm.P("dp_shard"), dm.P("dp_shard"))(dm.distribute(X, dm.P("dp_shard")))


def test_a_rank_that_went_its_own_way_is_found_among_replicas(tmp_path):
    for place in ("sim", "jax_x64", "torch"):
        run_on(place, replicas_apart, tmp_path / place, world_size=4)
    for place in ("sim", "jax_x64", "torch"):
        (one,) = compare_recordings(load(tmp_path / "torch"), load(tmp_path / place))
        assert (one.ranks, one.element, one.values) == ((3,), (4, 0), (X[4, 0], X[4, 0] + 0.25))
        assert "1 of 4 ranks differ" in one.said


def some_pass(path, silent, how="record"):
    """Tap a block on all ranks but some, under a recording or a replay; return what is said."""
    from dualmesh.testing import record, replay

    dm.init_parallel_state(dp_size=2, tp_size=2)

    def each(x):
        index = dm.ops.axis_index("world")
        return x if isinstance(index, int) and index in silent else tap("kept", x, dm.P("dp_shard"))

    lifted = dm.shard_map(each, dm.P("dp_shard"), dm.P("dp_shard"))
    try:
        with {"record": record, "replay": replay}[how](path):
            lifted(dm.distribute(X, dm.P("dp_shard")))
    except dm.DualmeshError as error:
        return str(error)
    return ""


def test_ranks_that_pass_no_tap_are_named(tmp_path):
    for name, silent in (("all", ()), ("some", (1, 3)), ("half", (2, 3))):
        assert run_on("sim", some_pass, tmp_path / name, silent, world_size=4) == [""]
    whole, some, half = (load(tmp_path / name) for name in ("all", "some", "half"))
    for wanted, found in ((whole, some), (some, whole)):
        (one,) = compare_recordings(wanted, found)
        assert (str(one), one.ranks) == ("kept: ranks 1, 3 did not pass it on sim", (1, 3))
    with pytest.raises(RecordingError, match="kept is not whole: ranks 2, 3 did not pass it on sim"):
        half.whole(half.keys()[0])
    assert len(compare_recordings(some, half)) == 2


def test_a_process_that_passes_no_tap_is_named_and_nobody_waits_for_it(tmp_path):
    run_on("sim", some_pass, tmp_path / "sim", (), world_size=4)
    said = run_on("torch", some_pass, tmp_path / "sim", (1,), "replay", world_size=4)
    assert len(set(said)) == 1
    assert "first difference: kept: rank 1 did not pass it on torch" in said[0]
    said = run_on("torch", some_pass, tmp_path / "torch", (1,), world_size=4)
    assert [text[:28] for text in said] == ["", "record: nothing passed a tap", "", ""]
    assert load(tmp_path / "torch").missing(load(tmp_path / "torch").keys()[0]) == (1,)


def staged(path, stages="pp"):
    """Tap in stages of an axis; without a name those of `parallel_spec`."""
    from dualmesh.testing import record

    roles = {"data": "dp", "loss": "dp", "stages": "pipe"}
    own = dm.TopologySpec({"pipe": 2, "dp": 2}, roles=roles)
    named = {
        "pp": dm.parallel_spec(pp_size=2, dp_size=2),
        "pipe": own,
        "p": dm.TopologySpec({"x": 2, "dp": 2}, {"p": "x"}, roles={**roles, "stages": "p"}),
        "no role": dm.TopologySpec({"pp": 2, "dp": 2}, roles={"data": "dp", "loss": "dp"}),
    }
    dm.init_parallel_state(spec=named[stages])
    axis = "pp" if stages == "no role" else stages

    def each(x):
        for stage, name in enumerate(("first", "second")):
            if dm.ops.axis_index(axis) == stage:
                tap(name, x + stage, dm.P("dp"))
        return x

    with record(path):
        dm.shard_map(each, dm.P("dp"), dm.P("dp"))(dm.distribute(X, dm.P("dp")))


def test_an_axis_without_the_role_has_no_stages_whatever_its_name(tmp_path):
    """Half of the ranks pass each tap; where no role says that they are stages, the others are missed."""
    run_on("sim", staged, tmp_path / "run", "no role", world_size=4)
    found = load(tmp_path / "run")
    assert [found.missing(key) for key in found.keys()] == [(2, 3), (0, 1)]


@pytest.mark.parametrize("stages", ["pp", "pipe", "p"])
def test_a_stage_of_a_pipeline_passes_its_own_taps_alone(tmp_path, stages):
    """The role says what is a pipeline: of the usual axes, of one's own, and under a combined name."""
    run_on("sim", staged, tmp_path / "run", stages, world_size=4)
    found = load(tmp_path / "run")
    assert [found.missing(key) for key in found.keys()] == [(), ()]
    assert {key.name: found.whole(key)[0, 0] for key in found.keys()} == {"first": X[0, 0], "second": X[0, 0] + 1}


def global_taps(path, world_size):
    """Tap global arrays, in jit where there is one."""
    from dualmesh.testing import record
    from dualmesh.testing.instruments import instruments_of

    state = dm.init_parallel_state(dp_size=world_size)

    def loss(x):
        y = tap("global", x * x, dm.P("dp_shard"))
        return (tap("whole", y) * 3.0).sum()

    step = instruments_of(state.backend).compiled(dm.value_and_grad(loss))
    with record(path):
        step(dm.distribute(X, dm.P("dp_shard")))


def test_global_arrays_are_tapped_with_their_whole_gradient(tmp_path):
    run_on("torch", global_taps, tmp_path / "torch", 2, world_size=2)
    run_on("jax_x64", global_taps, tmp_path / "jax", 4, world_size=4)
    torch, jax = load(tmp_path / "torch"), load(tmp_path / "jax")
    assert compare_recordings(torch, jax) == compare_recordings(jax, torch) == []
    for run in (torch, jax):
        found = {str(key): run.whole(key) for key in run.keys()}
        np.testing.assert_array_equal(found["global"], X * X)
        np.testing.assert_array_equal(found["whole, gradient"], np.full_like(X, 3.0))
        np.testing.assert_array_equal(found["global, gradient"], np.full_like(X, 3.0))


def test_a_recording_holds_numbers_and_text_only_and_refuses_what_is_none(recording, tmp_path):
    with np.load(recording / "rank0.npz", allow_pickle=False) as held:
        index = json.loads(held["index"].tobytes())
        assert {held[name].dtype.kind for name in held.files} <= {"f", "u"}
    assert (index["backend"], index["world_size"]) == ("torch", 4)
    with pytest.raises(RecordingError, match="no recording"):
        load(tmp_path)
    np.savez(tmp_path / "rank0.npz", index=np.array([{"a": 1}], dtype=object))
    with pytest.raises(RecordingError, match=r"rank0.npz is no recording: .*allow_pickle"):
        load(tmp_path)
    (tmp_path / "rank0.npz").write_bytes((recording / "rank0.npz").read_bytes())
    with pytest.raises(RecordingError, match=r"files of the ranks 0, of worlds of 4 ranks"):
        load(tmp_path)


def test_a_recording_is_never_mixed_with_an_older_one(tmp_path):
    with pytest.raises(RecordingError, match="holds a recording already"):
        run_on("sim", twice, tmp_path / "sim", world_size=4)
    with pytest.raises(RecordingError, match="nothing passed a tap"):
        run_on("sim", without_taps, tmp_path / "empty", world_size=2)


def twice(path):
    from dualmesh.testing import record

    dm.init_parallel_state(dp_size=4)
    for _ in range(2):
        with record(path):
            dm.shard_map(lambda x: tap("x", x), dm.P(), dm.P())(X)


def without_taps(path):
    from dualmesh.testing import record

    dm.init_parallel_state(dp_size=2)
    with record(path):
        pass
