"""`DistributedState` against the answers of the source's own code, on every rank, and what it refuses."""

import dataclasses
import json
import pickle
from pathlib import Path

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.backend.backend import Backend
from dualmesh.backend.group_factory import ListedFabric
from dualmesh.errors import (
    ArgumentError,
    BackendError,
    DualmeshError,
    GroupTimeoutError,
    MembershipError,
    RankError,
    SessionError,
    SpecError,
)
from dualmesh.federated.distributed_state import DistributedState, create_device_mesh
from dualmesh.topology.nodes import Nodes
from dualmesh_sim import SimBackend

XFFL = json.loads((Path(__file__).parent.parent / "cases" / "xffl.json").read_text())
REPAIRED = ("xffl-r00", "xffl-r01")
"""Sizes that differ without HSDP: the source always fails; here they are federations like others."""
HELD = [case for case in XFFL["cases"] if "peer_error" not in case]
REFUSED = [case for case in XFFL["cases"] + XFFL["rejected"] if case not in HELD and case["id"] not in REPAIRED]
NOT_COMPARED = ("setup", "communicating", "new_group_calls", "federated_group_handles", "replica_group_handles")
"""What is no field; the number of calls also counts how the source makes its meshes."""


def each(cases):
    return pytest.mark.parametrize("case", cases, ids=[case["id"] for case in cases])


def in_world(rank, world, **fabric):
    state = DistributedState(fabric=ListedFabric(**fabric))
    state.set_global("gloo", "cpu", "localhost", 29500, rank, world)
    return state


def prepared(case, rank):
    """A state as the source's was before the method of the case."""
    state = in_world(rank, case["world"], running=not case.get("no_dist"))
    if case["method"] not in ("set_global", "set_node"):
        place = [said(case, rank, name) for name in ("node_local_rank", "node_local_size", "node_rank")]
        if None not in place:
            state.set_node(*place, said(case, rank, "node_world_size"))
    if "streams" in case:
        state.set_exec_device("cpu", streams=case["streams"])
    return state


def call(state, case):
    if case["method"] == "set_fsdp":
        state.set_fsdp()
    elif case["method"] == "set_hsdp":
        state.set_hsdp(case["hsdp"])
    elif case["method"] == "set_federated_scaling":
        state.set_federated_scaling(tuple(case["federated_group_size"]), hsdp=case["hsdp"])
    elif case["method"] == "set_node":
        state.set_node(*(case[f"node_{name}"] for name in ("local_rank", "local_size", "rank", "world_size")))
    else:
        state.set_global(case.get("backend", "gloo"), "cpu", "localhost", 29500, case.get("rank", 0), case["world"])


def said(case, rank, name):
    """What the source said of a field on a rank; absent where it differs by group."""
    return case["per_rank"][name][rank] if name in case["per_rank"] else case["const"].get(name, "absent")


def group_of(partition, rank):
    return next(group for group in partition if rank in group)


@each(HELD)
def test_every_field_is_the_sources_on_every_rank(case):
    for rank in range(case["world"]):
        state = prepared(case, rank)
        call(state, case)
        for name in {*case["const"], *case["per_rank"]} - {*NOT_COMPARED}:
            found = getattr(state, name)
            assert said(case, rank, name) == (list(found) if isinstance(found, tuple) else found), (rank, name)


@each(HELD)
def test_every_group_has_the_sources_ranks_and_handles(case):
    for rank in range(case["world"]):
        state = prepared(case, rank)
        call(state, case)
        for name, partition in case["groups"].items():
            handles = getattr(state, name)
            handles = handles if isinstance(handles, tuple) else (handles,)
            assert case["const"].get(f"{name}_handles", 1) == len(handles)
            assert len(handles) == len(set(map(id, handles)))
            for handle in handles:
                assert group_of(partition, rank) == list(handle.ranks)
                assert handle.backend == "gloo"
        if case["const"]["communicating"]:
            numbers = range(state.federated_world_size)
            assert case["const"]["communicating"] == [list(state.federated_topology.communicating(n)) for n in numbers]


@each(HELD)
def test_every_mesh_has_the_sources_ranks_names_and_axes(case):
    for rank in range(case["world"]):
        state = prepared(case, rank)
        call(state, case)
        found = {
            "node": state.is_node_setup(),
            "fsdp": state.is_fsdp_setup(),
            "hsdp": state.is_hsdp_setup(),
            "federated": state.is_federated_scaling_setup(),
        }
        assert case["const"]["setup"] == found
        for name in ("fsdp_mesh", "hsdp_mesh"):
            mesh, expected = getattr(state, name), case[name]
            if expected is None:
                assert mesh is None
                continue
            rows = [list(row) for row in mesh.rows]
            assert expected["names"] == list(mesh.names)
            assert (rows if name == "hsdp_mesh" else rows[0]) in expected["meshes"]
            row, column = np.argwhere(np.array(rows) == rank)[0]
            assert rows[row] in expected["shard_groups"]
            assert expected["shard_rank"][rank] == column
            if name == "hsdp_mesh":
                assert [row[column] for row in rows] in expected["replica_groups"]
                assert expected["replica_rank"][rank] == row


def snapshot(state):
    return {item.name: getattr(state, item.name) for item in dataclasses.fields(state)}


@each(REFUSED)
def test_what_the_source_logs_accepts_or_dies_of_raises_and_changes_nothing(case):
    for rank in range(case["world"]):
        known = case["method"] in ("set_global", "set_node") or None not in case["per_rank"]["node_local_rank"]
        state = prepared(case, rank) if known else in_world(rank, case["world"])
        before = snapshot(state)
        with pytest.raises(DualmeshError):
            call(state, case)
        assert before == snapshot(state)


def test_asymmetric_federations_without_hsdp_are_set_up():
    states = [in_world(rank, 8) for rank in range(8)]
    for state in states:
        state.set_federated_scaling((2, 6))
    assert [(0, 2, 3, 4), (1, 5, 6, 7), (0, 2, 3, 4)] == [state.federated_group[0].ranks for state in states[:3]]
    assert [0, 0, 1, 1, 1, 1, 1, 1] == [state.federated_rank for state in states]
    assert all(state.is_sender and state.receive_from is None and state.replica_group is None for state in states)
    assert ((2, 3, 4, 5, 6, 7),) == states[5].fsdp_mesh.rows
    assert all(state.is_fsdp_setup() and state.is_federated_scaling_setup() for state in states)


def test_hsdp_set_before_holds_inside_federations():
    state = in_world(5, 8)
    state.set_hsdp(2)
    state.set_federated_scaling((4, 4))
    assert ((4, 5), (6, 7)) == state.hsdp_mesh.rows
    assert (2, 2) == state.replica_world_size
    assert (5, 7) == state.replica_group[0].ranks


def test_a_global_fsdp_mesh_gives_way_to_the_federations():
    state = in_world(5, 8)
    state.set_fsdp()
    state.set_federated_scaling((4, 4), hsdp=2)
    assert state.fsdp_mesh is None
    state.set_federated_scaling((4, 4), hsdp=4)
    assert ((4, 5, 6, 7),) == state.hsdp_mesh.rows


def test_a_mesh_of_ones_own_is_kept():
    state, mesh = in_world(0, 4), object()
    state.set_fsdp(mesh)
    assert state.fsdp_mesh is mesh


def test_unset_hsdp_forgets_replicas():
    state = in_world(5, 8)
    before = snapshot(state)
    state.set_hsdp(2)
    assert state.is_hsdp_setup()
    state.unset_hsdp()
    assert before == snapshot(state)


def test_unset_hsdp_leaves_a_federation_its_groups():
    state = in_world(5, 8)
    state.set_federated_scaling((4, 4), hsdp=2)
    group = state.replica_group
    state.unset_hsdp()
    assert not state.is_hsdp_setup()
    assert state.is_federated_scaling_setup()
    assert state.replica_group is group
    assert state.receive_from is not None or state.is_sender


@pytest.mark.parametrize("hsdp", [None, 2])
def test_unset_federated_scaling_forgets_all_that_it_set(hsdp):
    state = in_world(5, 8)
    before = snapshot(state)
    state.set_federated_scaling((4, 4), hsdp=hsdp)
    state.unset_federated_scaling()
    assert before == snapshot(state)
    state.set_hsdp(4)
    assert (2,) == state.replica_world_size


def test_hsdp_of_the_world_is_refused_inside_federations():
    state = in_world(5, 8)
    state.set_federated_scaling((4, 4))
    before = snapshot(state)
    with pytest.raises(SessionError, match=r"federations are set up.*unset_federated_scaling"):
        state.set_hsdp(4)
    assert before == snapshot(state)


# -- the world ---------------------------------------------------------------------------------------------------------


ADDRESS = {"backend": "gloo", "device_type": "cpu", "master_addr": "host", "master_port": 29500}
GLOBAL = {**ADDRESS, "rank": 0, "world_size": 4}


@pytest.mark.parametrize(
    ("name", "value", "error", "match"),
    [
        ("backend", "zzz", ArgumentError, r"backend is 'zzz'. Allowed here: gloo"),
        ("backend", "glo", ArgumentError, r"Did you mean 'gloo'"),
        ("backend", None, ArgumentError, "backend is None"),
        ("device_type", "tpu", ArgumentError, r"device_type is 'tpu'. Allowed here: cpu"),
        ("master_addr", "", ArgumentError, "master_addr is ''"),
        ("master_addr", None, ArgumentError, "master_addr is None"),
        ("master_port", -1, ArgumentError, r"master_port is -1. Ports are 0\.\.65535"),
        ("master_port", 65536, ArgumentError, "master_port is 65536"),
        ("master_port", "29500", ArgumentError, "master_port is '29500'"),
        ("rank", 4, RankError, r"rank 4 is not in the world. Ranks: 0\.\.3"),
        ("rank", -1, RankError, "rank -1"),
        ("rank", None, RankError, "rank None"),
        ("rank", True, RankError, "rank True"),
        ("world_size", 0, ArgumentError, "world_size is 0"),
        ("world_size", -4, ArgumentError, "world_size is -4"),
    ],
)
def test_set_global_refuses_by_name_and_changes_nothing(name, value, error, match):
    state = in_world(3, 8)
    before = snapshot(state)
    with pytest.raises(error, match=match):
        state.set_global(**{**GLOBAL, name: value})
    assert before == snapshot(state)


def test_set_global_sets_the_world():
    state = DistributedState(fabric=ListedFabric())
    state.set_global(**{**GLOBAL, "rank": np.int64(3), "device_type": "cuda:1"})
    assert ("gloo", "host", 29500, 3, 4, "cuda:1") == (
        state.backend,
        state.master_addr,
        state.master_port,
        state.rank,
        state.world_size,
        state.device_type,
    )
    assert type(state.rank) is int


@pytest.mark.parametrize(
    "ask",
    [
        lambda state: state.set_node(0, 1, 0, 1),
        lambda state: state.set_nodes(Nodes.of_sizes([1])),
        lambda state: state.set_fsdp(),
        lambda state: state.set_hsdp(1),
        lambda state: state.set_federated_scaling((1,)),
        lambda state: state.create_process_group([0]),
    ],
)
def test_the_world_comes_first(ask):
    state = DistributedState(fabric=ListedFabric())
    with pytest.raises(SessionError, match=r"rank is not known\. Call set_global"):
        ask(state)


@pytest.mark.parametrize(
    "ask",
    [
        lambda state: state.set_fsdp(),
        lambda state: state.set_hsdp(2),
        lambda state: state.set_federated_scaling((2, 2)),
        lambda state: state.create_process_group([0]),
    ],
)
def test_nothing_is_made_without_a_running_world(ask):
    state = in_world(0, 4, running=False)
    before = snapshot(state)
    with pytest.raises(SessionError, match="world is not running"):
        ask(state)
    assert before == snapshot(state)


def test_hsdp_that_does_not_divide_names_what_would_fit():
    for hsdp in (3, 0, -2, 16, True, "2"):
        with pytest.raises(SpecError, match=rf"hsdp={hsdp!r} does not divide the world of 8 ranks.*fit: 1, 2, 4, 8"):
            in_world(0, 8).set_hsdp(hsdp)


# -- nodes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "match"),
    [
        ((0, 3, 0, 5), r"8 ranks on nodes of 3 make 3, found node_world_size=5.*set_nodes"),
        ((4, 4, 0, 2), r"node_local_rank is 4. Allowed: 0\.\.3"),
        ((-1, 4, 0, 2), "node_local_rank is -1"),
        ((0, 4, 2, 2), r"node_rank is 2. Allowed: 0\.\.1"),
        ((0, 0, 0, 2), "node_local_size is 0"),
        ((0, 4, 0, 0), "node_world_size is 0"),
        ((None, 4, 0, 2), "node_local_rank is None"),
    ],
)
def test_set_node_refuses_by_name_and_changes_nothing(numbers, match):
    state = in_world(0, 8)
    state.set_node(0, 8, 0, 1)
    before = snapshot(state)
    with pytest.raises(ArgumentError, match=match):
        state.set_node(*numbers)
    assert before == snapshot(state)


def test_nodes_of_other_shapes_are_set_from_what_was_found():
    nodes = Nodes.of_hosts("abbabc")
    state = in_world(4, 6)
    state.set_nodes(nodes)
    assert (2, 3, 1, 3) == (state.node_local_rank, state.node_local_size, state.node_rank, state.node_world_size)
    with pytest.raises(ArgumentError, match="hold 6 ranks, the world 4"):
        in_world(0, 4).set_nodes(nodes)


# -- devices and groups ------------------------------------------------------------------------------------------------


def test_devices_and_streams():
    state = in_world(0, 4)
    state.set_exec_device("cuda:1", streams=4)
    state.set_init_device("meta", meta_initialization=True)
    assert ("cuda:1", 4, "meta", True) == (
        state.current_device,
        len(state.streams),
        state.init_device,
        state.meta_initialization,
    )
    state.set_exec_device(0)
    assert state.streams is None


@pytest.mark.parametrize(
    ("ask", "match"),
    [
        (lambda state: state.set_exec_device("tpu"), "current_device is 'tpu'"),
        (lambda state: state.set_exec_device(-1), "current_device is '-1'"),
        (lambda state: state.set_exec_device("cpu", streams=0), "streams is 0"),
        (lambda state: state.set_init_device("tpu", False), "init_device is 'tpu'. Allowed here: cpu, cuda, xpu, meta"),
        (lambda state: state.set_init_device("cpu", None), "meta_initialization is None"),
    ],
)
def test_devices_that_are_not_here_are_refused(ask, match):
    state = in_world(0, 4)
    before = snapshot(state)
    with pytest.raises(ArgumentError, match=match):
        ask(state)
    assert before == snapshot(state)


def test_groups_keep_the_listed_order():
    group = in_world(1, 4).create_process_group([3, 1], "own")
    assert ((3, 1), "gloo", "own") == (group.ranks, group.backend, group.description)
    assert group != in_world(1, 4).create_process_group([3, 1], "own")


@pytest.mark.parametrize(
    ("ranks", "error", "match"),
    [
        ([0, 2], MembershipError, "rank 1 is not among 0, 2"),
        ([1, 1], SpecError, "listed twice"),
        ([1, 4], SpecError, "has 4, outside the world of 4 ranks"),
        ([], SpecError, "empty"),
        (1, SpecError, "ranks is 1"),
    ],
)
def test_groups_that_cannot_be_are_refused(ranks, error, match):
    with pytest.raises(error, match=match):
        in_world(1, 4).create_process_group(ranks)


def test_device_meshes_are_ranks_in_a_shape():
    assert [[[0, 1], [2, 3]], [[4, 5], [6, 7]]] == create_device_mesh((2, 2, 2)).tolist()
    assert [0, 1, 2] == DistributedState.create_device_mesh((3,)).tolist()
    with pytest.raises(ArgumentError, match="size is 0"):
        create_device_mesh((2, 0))


# -- text and values ---------------------------------------------------------------------------------------------------


def test_the_text_shows_what_is_set():
    state = DistributedState(fabric=ListedFabric())
    assert "DistributedState\n  nothing is set" == str(state)
    state = in_world(5, 12)
    state.set_node(1, 4, 1, 3)
    state.set_exec_device("cuda:1", streams=2)
    state.set_federated_scaling((8, 4), hsdp=2)
    assert [
        "DistributedState",
        "world: backend=gloo, master_addr=localhost, master_port=29500, rank=5, world_size=12",
        "node: node_local_rank=1, node_local_size=4, node_rank=1, node_world_size=3",
        "replica: replica_local_rank=1, replica_local_size=2, replica_rank=2, replica_world_size=(4, 2)",
        "federation: federated_local_rank=5, federated_local_size=(8, 4), federated_rank=0, federated_world_size=2",
        "exchange: is_sender=False, receive_from=3",
        "device: device_type=cpu, current_device=cuda:1, init_device=None, meta_initialization=None",
        "hsdp_mesh: [0, 1] [2, 3] [4, 5] [6, 7]",
        "federated_group: [5] (2 handles)",
        "replica_group: [1, 3, 5, 7] (2 handles)",
        "federation group: [0, 1, 2, 3, 4, 5, 6, 7]",
        "streams: 2",
    ] == [line.strip() for line in str(state).splitlines()]


def test_states_with_equal_fields_are_equal_and_can_be_pickled():
    one, other = in_world(5, 8), in_world(5, 8)
    one.set_hsdp(2)
    assert one != other
    other.set_hsdp(2)
    assert one == other == pickle.loads(pickle.dumps(one))


# -- where meshes and groups come from ---------------------------------------------------------------------------------


def test_the_running_world_makes_meshes_and_groups():
    state = DistributedState()
    with dm.session(backend="sim", world_size=8):
        state.set_global("gloo", "cpu", "localhost", 29500, 5, 8)
        state.set_federated_scaling((4, 4), hsdp=2)
        assert (5, 7) == state.replica_group[0].ranks
        assert "[4, 5] [6, 7]" in str(state)


def test_a_backend_without_a_fabric_says_so():
    class Bare(SimBackend):
        name = "bare"
        fabric = Backend.fabric

    with pytest.raises(BackendError, match=r"'bare' makes no meshes and groups.*DistributedState\(fabric=\.\.\.\)"):
        Bare().fabric()


class Counted(ListedFabric):
    """Lists, and which of them are held."""

    def __init__(self):
        super().__init__()
        object.__setattr__(self, "held", [])
        object.__setattr__(self, "fails_at", None)

    def _kept(self, made):
        self.held.append(made)
        return made

    def make_mesh(self, *given):
        return self._kept(super().make_mesh(*given))

    def make_group(self, ranks, backend, description):
        if self.fails_at is not None and len(self.held) >= self.fails_at:
            raise GroupTimeoutError("a rank did not come")
        return self._kept(super().make_group(ranks, backend, description))

    def release(self, made):
        self.held[:] = [one for one in self.held if one is not made]


def counted(**placed):
    fabric = Counted()
    state = DistributedState(fabric=fabric)
    state.set_global(**GLOBAL | {"rank": 5, "world_size": 8} | placed)
    return state, fabric


def test_what_a_state_forgets_or_replaces_is_released_and_what_others_gave_or_asked_for_is_not():
    state, fabric = counted()
    own = state.create_process_group((5, 1))
    state.set_fsdp()
    state.set_fsdp()
    state.set_hsdp(2)
    assert [own, state.fsdp_mesh, state.hsdp_mesh] == fabric.held
    for sizes in ((4, 4), (2, 6)):
        state.set_federated_scaling(sizes)
        kept = [*state.federated_group, *state.replica_group, state.federation, state.hsdp_mesh]
        assert [own, *kept] == fabric.held
    state.unset_hsdp()
    assert [own, *state.federated_group, *state.replica_group, state.federation] == fabric.held
    state.unset_federated_scaling()
    assert [own] == fabric.held
    brought = fabric.make_mesh(((4, 5),), ("shard",), "cpu")
    state.set_fsdp(brought)
    state.unset_federated_scaling()
    assert [own, brought] == fabric.held


@pytest.mark.parametrize("made", range(3))
def test_federations_that_cannot_be_made_leave_nothing_behind(made):
    state, fabric = counted()
    state.set_fsdp()
    before = snapshot(state)
    fabric.fails_at = 1 + made
    with pytest.raises(GroupTimeoutError):
        state.set_federated_scaling((4, 4), hsdp=2)
    assert before == snapshot(state)
    assert [state.fsdp_mesh] == fabric.held
