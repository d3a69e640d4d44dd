"""Links between two states of one simulated world, each side in a thread of its own."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import AgreementError, ArgumentError, GroupTimeoutError, ShardingError, StaleStateError

P = dm.P
SPECS = {"source": {"w": P("tp"), "layers.0.b": P(None, "tp"), "n": P()}, "target": P("dp")}
TARGET = {"w": P(None, "dp"), "layers.0.b": P("dp"), "n": P()}


@pytest.fixture
def states():
    with dm.session(backend="sim", world_size=4):
        source = dm.init_parallel_state(spec=dm.TopologySpec({"tp": 4}), name="trainer")
        target = dm.init_parallel_state(spec=dm.TopologySpec({"dp": 2}), ranks=(3, 1), name="rollout")
        yield source, target


@pytest.fixture
def store():
    with dm.TransferStore() as served:
        yield f"tcp://localhost:{served.port}"


def values(seed):
    draw = np.random.default_rng(seed)
    return {
        "w": draw.normal(size=(8, 4)).astype("float32"),
        "layers": [{"b": draw.integers(-9, 9, (6, 8)).astype("int16")}],
        "n": np.array(seed, "int64"),
    }


def laid_out(tree, specs, state):
    return {
        "w": dm.distribute(tree["w"], specs["w"], state=state),
        "layers": [{"b": dm.distribute(tree["layers"][0]["b"], specs["layers.0.b"], state=state)}],
        "n": dm.distribute(tree["n"], specs["n"], state=state),
    }


def linked(store, states, *, settings=(("source", {}), ("target", {})), specs=None):
    """Return both ends of a link."""
    specs = specs or (SPECS["source"], TARGET)

    def one(number):
        role, given = settings[number]
        common = {"store": store, "timeout_s": 20.0, **given}
        return dm.transfer_link("weights", role=role, state=states[number], specs=specs[number], **common)

    with ThreadPoolExecutor(2) as threads:
        ends = [threads.submit(one, number) for number in (1, 0)]
        found = [end.exception() or end.result() for end in reversed(ends)]
    return found


def passed(source, target, tree, into, version):
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(source.send, tree, version=version)
        got = target.receive(into=into)
        return got, sent.result()


@pytest.mark.parametrize("checksum", [False, True])
def test_trees_arrive_with_their_version_bit_for_bit(states, store, checksum):
    settings = [(role, {"checksum": checksum, "buffer_bytes": 256}) for role in ("source", "target")]
    source, target = linked(store, states, settings=settings)
    with source, target:
        assert (1, 1) == (source.generation, target.generation)
        for version in (3, 7):
            into = laid_out(values(99), TARGET, states[1])
            sent = laid_out(values(version), SPECS["source"], states[0])
            assert (version, version) == passed(source, target, sent, into, version)
            for found, wanted in (
                (into["w"], values(version)["w"]),
                (into["layers"][0]["b"], values(version)["layers"][0]["b"]),
                (into["n"], values(version)["n"]),
            ):
                assert found.state is states[1]
                np.testing.assert_array_equal(found.value(), wanted)


def test_a_part_of_the_tree_leaves_the_rest_and_other_names_are_found(states, store):
    settings = [("source", {}), ("target", {"renames": {"weight": "w"}})]
    source, target = linked(store, states, settings=settings, specs=(SPECS["source"], {"weight": P("dp"), "n": P()}))
    tree = values(5)
    with source, target:
        into = {"weight": dm.distribute(np.zeros((8, 4), "float32"), P("dp"), state=states[1]), "n": "untouched"}
        sent = {"w": dm.distribute(tree["w"], P("tp"), state=states[0])}
        passed(source, target, sent, into, 1)
        np.testing.assert_array_equal(into["weight"].value(), tree["w"])
        assert into["n"] == "untouched"


def test_tied_arrays_and_renames_of_nothing_over_a_link(states, store):
    """One array arrives at two places; a name that no tree held is refused on both sides, and the link goes on."""
    settings = [("source", {}), ("target", {"renames": {"head": "embed", "tokens": "embed"}})]
    source, target = linked(store, states, settings=settings, specs=(P("tp"), P("dp")))
    with source, target:
        for version, sent in ((1, {"embed": np.arange(8.0), "n": np.ones(4)}), (2, {"n": np.full(4, 2.0)})):
            into = {name: dm.distribute(np.zeros(8), P("dp"), state=states[1]) for name in ("head", "tokens")}
            into["n"] = dm.distribute(np.zeros(4), P("dp"), state=states[1])
            tree = {name: dm.distribute(x, P("tp"), state=states[0]) for name, x in sent.items()}
            passed(source, target, tree, into, version)
            np.testing.assert_array_equal(into["n"].value(), sent["n"])
            for name in ("head", "tokens"):
                np.testing.assert_array_equal(into[name].value(), sent.get("embed", np.zeros(8)))


def test_a_rename_of_what_never_comes_is_refused_over_a_link(states, store):
    """The target says which name, and the source that it was refused."""
    settings = [("source", {}), ("target", {"renames": {"head": "embde"}})]
    source, target = linked(store, states, settings=settings, specs=(P("tp"), P("dp")))
    with source, target:
        tree = {"embed": dm.distribute(np.arange(8.0), P("tp"), state=states[0])}
        into = {"embed": dm.distribute(np.zeros(8), P("dp"), state=states[1])}
        sending = source.sending(tree, version=1).start()
        with pytest.raises(ShardingError, match=r"'head' shall be 'embde'.*Did you mean 'embed'"):
            target.receive(into=into)
        with pytest.raises(AgreementError, match="refused version 1"):
            sending.wait()


@pytest.mark.parametrize(
    ("source_specs", "target_specs", "match"),
    [
        ({"w": P("tp")}, {"w": P("dp"), "head": P()}, "target asks for 'head', which the source does not hold"),
        (P("tp"), {"w": P("dp"), "head": P()}, "target asks for 'head', which the source does not hold"),
        (dm.ShardingPlan({"**": P("tp")}), {"w": P("dp"), "head": P()}, "target asks for 'head', which the source"),
        (P("tp"), {"w": P("dp"), "f": dm.Fused(P("dp"), {"q": 8})}, "target asks for 'f', fused of q too, which"),
    ],
)
def test_a_listed_path_that_never_comes_is_refused_over_a_link(states, store, source_specs, target_specs, match):
    """On both sides, as `dm.transfer` does; what `into` holds stays as it was, and the link goes on."""
    source, target = linked(store, states, specs=(source_specs, target_specs))
    with source, target:
        tree = {"w": dm.distribute(np.arange(8.0), P("tp"), state=states[0])}
        into = {name: dm.distribute(np.full(8, 7.0), P("dp"), state=states[1]) for name in ("w", "head", "f")}
        for _ in range(2):  # a tree that was refused does not count as seen
            sending = source.sending(tree, version=1).start()
            with pytest.raises(ShardingError, match=match):
                target.receive(into=into)
            with pytest.raises(AgreementError, match=f"refused version 1: .*{match}"):
                sending.wait()
        assert all(x.value().tolist() == [7.0] * 8 for x in into.values())


def test_later_trees_may_leave_out_what_an_earlier_one_held_or_the_source_lists(states, store):
    """A part of the model is no error once the source has said that it holds the rest."""
    for name, specs in (("seen", P("tp")), ("listed", {"w": P("tp"), "q": P("tp"), "k": P("tp")})):
        target_specs = {"w": P("dp"), "qk": dm.Fused(P("dp"), {"q": 8, "k": 8})}
        source, target = linked(store, states, specs=(specs, target_specs))
        with source, target:
            arrays = {path: n * 10.0 + np.arange(8.0) for n, path in enumerate(("w", "q", "k"))}
            into = {
                path: dm.distribute(np.zeros(size), P("dp"), state=states[1]) for path, size in (("w", 8), ("qk", 16))
            }
            trees = [["w"], ["q", "k"]] if name == "listed" else [["w", "q", "k"], ["w"]]
            for version, paths in enumerate(trees):
                tree = {path: dm.distribute(arrays[path] + version, P("tp"), state=states[0]) for path in paths}
                passed(source, target, tree, into, version)
            np.testing.assert_array_equal(into["w"].value(), arrays["w"] + (name == "seen"))
            q, k = (np.split(arrays[path] + (name == "listed"), 2)[0] for path in ("q", "k"))
            np.testing.assert_array_equal(into["qk"].block(3), np.concatenate([q, k]))


class Layer(NamedTuple):
    w: Any
    b: Any


def test_what_cannot_be_written_to_is_refused_and_nothing_is_lost(states, store):
    """A path through a named tuple is found; an array that lies in one itself is refused, before any is written."""
    source, target = linked(store, states, specs=(P("tp"), P("dp")))
    whole = {"a": np.arange(8.0), "layer.w": 10 + np.arange(8.0), "layer.b.0": 20 + np.arange(8.0)}
    with source, target:
        tree = {path: dm.distribute(x, P("tp"), state=states[0]) for path, x in whole.items()}
        old = dm.distribute(np.zeros(8), P("dp"), state=states[1])
        into = {"a": old, "layer": Layer(old, [old])}
        with pytest.raises(ArgumentError, match=r"'layer.w' lies in a Layer, which cannot be written to"):
            passed(source, target, tree, into, 1)
        assert into["a"] is old
        assert into["layer"].b[0] is old
        passed(source, target, {path: x for path, x in tree.items() if path != "layer.w"}, into, 2)
        np.testing.assert_array_equal(into["a"].value(), whole["a"])
        np.testing.assert_array_equal(into["layer"].b[0].value(), whole["layer.b.0"])


def test_fused_blocks_are_put_together_on_the_way(states, store):
    parts = {"q": np.arange(16.0).reshape(8, 2), "k": 100 + np.arange(8.0).reshape(4, 2)}
    sizes = {"q": 8, "k": 4}
    specs = ({"a.q": P("tp"), "a.k": P("tp")}, {"a.qk": dm.Fused(P("dp"), sizes)})
    source, target = linked(store, states, specs=specs)
    with source, target:
        sent = {"a": {name: dm.distribute(x, P("tp"), state=states[0]) for name, x in parts.items()}}
        into = {"a": {"qk": dm.distribute(np.zeros((12, 2)), P("dp"), state=states[1])}}
        passed(source, target, sent, into, 1)
        for place, rank in enumerate((3, 1)):
            wanted = np.concatenate([np.split(x, 2)[place] for x in parts.values()])
            np.testing.assert_array_equal(into["a"]["qk"].block(rank), wanted)


def test_a_send_may_overlap_with_changes_to_the_tree(states, store):
    source, target = linked(store, states)
    with source, target:
        sent = laid_out(values(1), SPECS["source"], states[0])
        sending = source.sending(sent, version=1).start()
        sent["w"] = dm.distribute(np.zeros((8, 4), "float32"), P("tp"), state=states[0])
        into = laid_out(values(99), TARGET, states[1])
        receiving = target.receiving(into=into).start()
        assert (1, 1) == (receiving.wait(), sending.wait())
        np.testing.assert_array_equal(into["w"].value(), values(1)["w"])


def test_what_is_sent_is_copied_when_it_starts(states, store):
    """The caller may fill its buffer anew while it is under way, and write to what it received."""
    source, target = linked(store, states, specs=(P("tp"), P("dp")))
    with source, target:
        buffer = np.arange(8.0)
        sending = source.sending({"w": buffer}, version=1).start()
        buffer[...] = -1
        into = {"w": dm.distribute(np.zeros(8), P("dp"), state=states[1])}
        assert (1, 1) == (target.receive(into=into), sending.wait())
        assert into["w"].value().tolist() == list(range(8))


@pytest.mark.parametrize(
    ("into", "match"),
    [
        ({"n": np.zeros((), "int64")}, "into has no w, layers.0.b"),
        (
            {
                "w": np.zeros((8, 4), "float16"),
                "layers": [{"b": np.zeros((6, 8), "int16")}],
                "n": np.zeros((), "int64"),
            },
            "'w' is float16 here",
        ),
        (
            {
                "w": np.zeros((8, 5), "float32"),
                "layers": [{"b": np.zeros((6, 8), "int16")}],
                "n": np.zeros((), "int64"),
            },
            r"'w' has shape \(8, 5\) here, and \(8, 4\) in the source, of which a rank here holds \(8, 2\)",
        ),
    ],
)
def test_what_the_target_cannot_take_is_refused_on_both_sides_and_the_link_goes_on(states, store, into, match):
    source, target = linked(store, states)
    with source, target:
        sent = laid_out(values(1), SPECS["source"], states[0])
        with ThreadPoolExecutor(1) as threads:
            sending = threads.submit(source.send, sent, version=1)
            with pytest.raises(ShardingError, match=match):
                target.receive(into=into)
            with pytest.raises(AgreementError, match=f"process 0 of the target refused version 1: .*{match}"):
                sending.result()
        good = laid_out(values(99), TARGET, states[1])
        passed(source, target, sent, good, 2)
        np.testing.assert_array_equal(good["w"].value(), values(1)["w"])


def test_a_peer_that_leaves_or_restarts_is_named(states, store):
    source, target = linked(store, states)
    target.close()
    sent = laid_out(values(1), SPECS["source"], states[0])
    with pytest.raises(StaleStateError, match=r"target 0 left|process 0 of the target left or restarted"):
        source.send(sent, version=1)
    again = linked(store, states)
    with pytest.raises(StaleStateError, match="it was replaced"):
        source.send(sent, version=1)
    with again[0], again[1]:
        into = laid_out(values(99), TARGET, states[1])
        assert (2, 2) == passed(*again, sent, into, 2)
    source.close()


def test_a_side_that_does_not_come_and_settings_that_differ_are_named(states, store):
    with pytest.raises(GroupTimeoutError, match=r"all of the target did not come within 0\.2 s\. Who came: source 0"):
        dm.transfer_link("weights", role="source", state="trainer", specs=P(), store=store, timeout_s=0.2)
    found = linked(store, states, settings=(("source", {"checksum": True}), ("target", {})))
    for error in found:
        assert isinstance(error, AgreementError)
        assert "checksum is True on one side" in str(error)


def test_a_target_that_hears_nothing_says_who_is_silent(states, store):
    source, target = linked(store, states)
    with (
        source,
        target,
        pytest.raises(GroupTimeoutError, match=r"process 0 of the source did not answer within 0\.2 s"),
    ):
        target.receive(into={"w": None}, timeout_s=0.2)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"role": "trainer"}, "role='trainer'. Allowed: source, target"),
        ({"state": 3}, "state=3"),
        ({"store": "here"}, "Give 'tcp://host:port'"),
        ({"specs": 3}, "specs=3"),
        ({"timeout_s": -1}, "is no time"),
        ({"buffer_bytes": 0}, "buffer_bytes"),
        ({"renames": ["w"]}, "renames="),
        ({"renames": {"head": "w"}}, "renames={'head': 'w'} on the source.* Give them on the target"),
        ({"specs": {1: P(), "1": P()}}, "source: two specs have the path '1'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_opened(states, change, match):
    given = {"role": "source", "state": "trainer", "specs": P(), "store": "tcp://localhost:1", **change}
    with pytest.raises(ArgumentError, match=match):
        dm.transfer_link("weights", **given)


def test_each_side_does_its_own_part_only(states, store):
    source, target = linked(store, states)
    with source, target:
        with pytest.raises(ArgumentError, match="this side is the source; only the target can receive"):
            source.receive(into={})
        with pytest.raises(ArgumentError, match="this side is the target; only the source can send"):
            target.send({}, version=1)
