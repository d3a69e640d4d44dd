"""Nodes from host identities, sizes and what launchers say."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualmesh.errors import LaunchError, MembershipError, SpecError
from dualmesh.runtime.node_variables import dealt_tasks, nodes_from, place_from, tasks_per_node
from dualmesh.topology.nodes import Nodes, Place


def torchrun(rank=0, world=8, local=0, size=4, group=0, groups=2):
    values = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": size}
    values |= {"GROUP_RANK": group, "GROUP_WORLD_SIZE": groups}
    return {name: str(value) for name, value in values.items() if value is not None}


def slurm(tasks="4(x2),3", node=0, local=0, proc=0, **more):
    values = {"SLURM_TASKS_PER_NODE": tasks, "SLURM_NODEID": node, "SLURM_LOCALID": local, "SLURM_PROCID": proc}
    return {name: str(value) for name, value in (values | more).items() if value is not None}


# -- what nodes answer -------------------------------------------------------------------------------------------------


def test_interleaved_hosts_with_unequal_counts():
    nodes = Nodes.of_hosts(["b", "a", "b", "c", "a", "b"])
    assert ((0, 2, 5), (1, 4), (3,)) == nodes.intra_node().groups
    assert (3, 2, 1) == nodes.sizes
    assert [0, 1, 0, 2, 1, 0] == [nodes.node_rank(rank) for rank in range(6)]
    assert [0, 0, 1, 0, 1, 2] == [nodes.local_rank(rank) for rank in range(6)]
    assert [3, 2, 3, 1, 2, 3] == [nodes.local_size(rank) for rank in range(6)]
    assert Place(1, 2, 1, 3) == nodes.place(4)
    assert not nodes.is_uniform
    assert 3 == nodes.node_count
    assert 6 == nodes.world_size


def test_inter_node_groups_join_equal_local_ranks():
    assert ((0, 4), (1, 5), (2, 6), (3, 7)) == Nodes.of_sizes([4, 4]).inter_node().groups
    assert ((0, 1), (2, 3)) == Nodes.of_hosts("abab").inter_node().groups
    assert ((0,), (1,)) == Nodes.of_sizes([2]).inter_node().groups


def test_inter_node_groups_of_unequal_nodes_are_refused_and_leaders_are_there_on_request():
    nodes = Nodes.of_sizes([4, 3, 1])
    with pytest.raises(SpecError, match=r"hold 4, 3, 1 ranks.*`leaders\(\)`"):
        nodes.inter_node()
    assert ((0, 4, 7),) == nodes.leaders().groups
    assert not nodes.leaders().is_member(1)
    assert ["intra_node", "leaders"] == list(nodes.group_spec().axes)
    assert ["intra_node", "leaders", "inter_node"] == list(Nodes.of_sizes([2, 2]).group_spec().axes)


@settings(max_examples=100)
@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_every_rank_is_on_the_node_of_its_host(hosts):
    nodes = Nodes.of_hosts(hosts)
    for rank, host in enumerate(hosts):
        here = [other for other, name in enumerate(hosts) if name == host]
        assert tuple(here) == nodes.intra_node().ranks(rank)
        assert here.index(rank) == nodes.local_rank(rank)
        assert len(here) == nodes.local_size(rank)
        assert list(dict.fromkeys(hosts)).index(host) == nodes.node_rank(rank)
    assert tuple(hosts.index(host) for host in dict.fromkeys(hosts)) == nodes.leaders().groups[0]
    if nodes.is_uniform:
        for local, group in enumerate(nodes.inter_node()):
            assert [local] * nodes.node_count == [nodes.local_rank(rank) for rank in group]
            assert list(range(nodes.node_count)) == [nodes.node_rank(rank) for rank in group]
    places = [nodes.place(rank) for rank in range(len(hosts))]
    assert nodes == Nodes.of_places(places) == pickle.loads(pickle.dumps(nodes))
    assert hash(nodes) == hash(Nodes.of_places(places))
    unnumbered = [place._replace(node_rank=None, node_count=None) for place in places]
    assert nodes == Nodes.of_places(unnumbered, hosts)


@pytest.mark.parametrize(
    ("groups", "match"),
    [([], "no nodes"), ([[0, 2]], "2 ranks are listed, but not 1"), ([[0, 1], [1]], "listed twice")],
)
def test_nodes_hold_every_rank_once(groups, match):
    with pytest.raises(SpecError, match=match):
        Nodes(groups)


def test_ranks_outside_are_refused():
    nodes = Nodes.of_sizes([2, 1])
    for ask in (nodes.node_rank, nodes.local_rank, nodes.local_size, nodes.place):
        with pytest.raises(MembershipError, match="rank 3 is in no group"):
            ask(3)


# -- what all launchers told all ranks ---------------------------------------------------------------------------------


def test_places_may_order_ranks_otherwise_than_their_numbers():
    places = [Place(1, 2, 1, 2), Place(0, 1, 0, 2), Place(0, 2, 1, 2)]
    assert ((1,), (2, 0)) == Nodes.of_places(places).intra_node().groups


@pytest.mark.parametrize(
    ("places", "hosts", "match"),
    [
        ([Place(0, 2, 0, 1), Place(0, 2, 0, 1)], None, r"node 0 has the ranks 0, 1 with the local ranks 0, 0"),
        (
            [Place(0, 2, 0, 2), Place(1, 2, 0, 2), Place(0, 2, 1, 2)],
            None,
            r"node 1 has 1 rank, but ranks 2 were told 2",
        ),
        ([Place(0, 1, 0, 3), Place(0, 1, 2, 3)], None, r"node ranks are 0, 2. They must be 0 to 1"),
        ([Place(0, 1, 0, 2), Place(0, 1, 1, 3)], None, r"there are 2 nodes, but ranks were told 2, 3"),
        ([Place(0, 2), Place(1, 2)], "ab", r"host 'b' has the ranks 1 with the local ranks 1"),
        ([Place(0, 1, 0, 2), Place(0, 1)], None, r"ranks 1 do not know their node"),
        ([Place(0, 1), Place(0, 1)], "a", r"ranks 0, 1 do not know their node, and there is not one host per rank"),
    ],
)
def test_places_that_contradict_each_other_are_refused_by_name(places, hosts, match):
    with pytest.raises(LaunchError, match=match):
        Nodes.of_places(places, hosts)


# -- torchrun ----------------------------------------------------------------------------------------------------------


def test_torchrun_tells_a_process_about_its_own_node_only():
    assert Place(1, 4, 1, 2) == place_from(torchrun(rank=5, local=1, group=1))
    assert nodes_from(torchrun()) is None
    assert Place(1, 4) == place_from(torchrun(rank=5, local=1, group=None, groups=None))


def test_one_node_is_settled():
    assert Nodes.of_sizes([4]) == nodes_from(torchrun(rank=2, local=2, world=4, groups=1))
    assert Nodes.of_sizes([4]) == nodes_from(torchrun(rank=2, local=2, world=4, group=None, groups=None))
    assert nodes_from(torchrun(rank=2, local=1, world=4, groups=1)) is None
    assert Nodes.of_sizes([1]) == nodes_from({}, world_size=1)
    assert nodes_from({}, world_size=2) is None
    assert place_from({}) is None


def test_torchrun_inside_a_slurm_task_wins():
    variables = slurm(tasks="1(x2)", node=1, proc=1) | torchrun(rank=5, local=1, group=1)
    assert Place(1, 4, 1, 2) == place_from(variables)
    assert nodes_from(variables) is None


@pytest.mark.parametrize(
    ("variables", "match"),
    [
        ({"LOCAL_RANK": "0"}, "LOCAL_RANK set, but LOCAL_WORLD_SIZE missing"),
        ({"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE set, but LOCAL_RANK missing"),
        (torchrun(groups=None), "GROUP_RANK set, but GROUP_WORLD_SIZE missing"),
        ({"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}, "LOCAL_RANK, LOCAL_WORLD_SIZE missing"),
        (torchrun(local=4), "LOCAL_RANK=4 is not below LOCAL_WORLD_SIZE=4"),
        (torchrun(group=2), "GROUP_RANK=2 is not below GROUP_WORLD_SIZE=2"),
        (torchrun(world=4), "LOCAL_WORLD_SIZE=4 and GROUP_WORLD_SIZE=2 do not fit a world of 4 ranks"),
        (torchrun(world=8, groups=1), "GROUP_WORLD_SIZE=1 do not fit a world of 8 ranks"),
        (torchrun(world=3, group=None, groups=None), "LOCAL_WORLD_SIZE=4 do not fit a world of 3 ranks"),
        (torchrun(size="four"), "LOCAL_WORLD_SIZE='four' is no number"),
        (torchrun(local="-1"), "LOCAL_RANK='-1' is no number"),
    ],
)
def test_torchrun_variables_that_cannot_be_are_refused_by_name(variables, match):
    with pytest.raises(LaunchError, match=match):
        place_from(variables)


def test_the_running_world_contradicting_the_variables_is_refused():
    with pytest.raises(LaunchError, match="RANK=0, but it is 3 in the running world"):
        place_from(torchrun(), rank=3)
    with pytest.raises(LaunchError, match="WORLD_SIZE=8, but it is 16 in the running world"):
        place_from(torchrun(), world_size=16)
    with pytest.raises(LaunchError, match=r"SLURM_PROCID=0, but it is 3 in the running world"):
        place_from(slurm(), rank=3)
    with pytest.raises(LaunchError, match=r"'4\(x2\),3' are 11 tasks, but the world has 8 ranks"):
        place_from(slurm(), world_size=8)


# -- SLURM -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "counts"), [("4(x2),3", (4, 4, 3)), ("1", (1,)), ("2,2(x3),1", (2, 2, 2, 2, 1)), ("12(x1), 3", (12, 3))]
)
def test_tasks_per_node_are_written_short(text, counts):
    assert counts == tasks_per_node(text)


@pytest.mark.parametrize("text", ["", "4(x2", "4x2", "a", "4,,3", "0", "4(x0)", "-1", "4(2)"])
def test_text_that_is_no_list_of_counts_is_refused(text):
    with pytest.raises(LaunchError, match="no count"):
        tasks_per_node(text)


def test_slurm_settles_all_nodes():
    last = slurm(node=2, local=2, proc=10)
    assert Place(2, 3, 2, 3) == place_from(last)
    assert Nodes.of_sizes([4, 4, 3]) == nodes_from(last) == nodes_from(last, rank=10, world_size=11)
    assert Nodes.of_sizes([4, 4, 3]) == nodes_from(slurm(node=2, local=2, proc=None), rank=10)
    assert Nodes.of_sizes([2]) == nodes_from(slurm(tasks="2", local=1, proc=1))


def test_the_step_counts_before_the_job():
    assert Nodes.of_sizes([2, 1]) == nodes_from(slurm(tasks="8(x4)", SLURM_STEP_TASKS_PER_NODE="2,1"))


@pytest.mark.parametrize(
    ("distribution", "hosts"),
    [
        ("block", [0, 0, 0, 1, 2, 2]),
        ("block:cyclic", [0, 0, 0, 1, 2, 2]),
        ("cyclic", [0, 1, 2, 0, 2, 0]),
        ("cyclic:block,Pack", [0, 1, 2, 0, 2, 0]),
        ("plane=2", [0, 0, 1, 2, 2, 0]),
    ],
)
def test_slurm_distributions_are_dealt_as_slurm_does(distribution, hosts):
    expected = Nodes.of_hosts(hosts)
    for rank in range(6):
        place = expected.place(rank)
        found = slurm("3,1,2", place.node_rank, place.local_rank, rank, SLURM_DISTRIBUTION=distribution)
        assert expected == nodes_from(found)
        assert place == place_from(found)


def test_a_plane_may_be_named_apart():
    found = slurm("2(x2)", SLURM_DISTRIBUTION="plane", SLURM_DIST_PLANESIZE="1")
    assert Nodes.of_hosts([0, 1, 0, 1]) == nodes_from(found)
    with pytest.raises(LaunchError, match="names no plane size"):
        nodes_from(slurm("2(x2)", SLURM_DISTRIBUTION="plane"))


def test_a_distribution_that_is_not_known_is_left_to_asking_the_ranks():
    cyclic = slurm("2(x2)", node=1, local=0, proc=1)
    assert Place(0, 2, 1, 2) == place_from(cyclic)
    assert nodes_from(cyclic) is None
    assert nodes_from(slurm("2(x2)", SLURM_DISTRIBUTION="arbitrary")) is None


@settings(max_examples=60)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.one_of(st.none(), st.integers(1, 5)))
def test_tasks_are_dealt_until_every_node_is_full(sizes, run):
    dealt = dealt_tasks(sizes, run)
    assert sizes == [dealt.count(node) for node in range(len(sizes))]
    if run is None:
        assert sorted(dealt) == list(dealt)


@pytest.mark.parametrize(
    ("variables", "match"),
    [
        (slurm(local=None), "SLURM_LOCALID missing"),
        (slurm(node=None), "SLURM_NODEID missing"),
        (slurm(tasks=None), "SLURM_TASKS_PER_NODE missing"),
        (slurm(proc=None), "SLURM_PROCID is missing"),
        (slurm(node=3), "SLURM_NODEID=3 and SLURM_LOCALID=0 are no place in SLURM_TASKS_PER_NODE"),
        (slurm(node=2, local=3), "SLURM_NODEID=2 and SLURM_LOCALID=3 are no place"),
        (slurm(proc=11), "rank 11 is no task of 11 tasks"),
        (slurm(SLURM_NTASKS=12), "are 11 tasks, but the world has 12 ranks"),
        (slurm(node=1, proc=1, SLURM_DISTRIBUTION="block"), "'block' puts rank 1 on node 0 at 1, but SLURM_NODEID=1"),
        (slurm(node="x"), "SLURM_NODEID='x' is no number"),
    ],
)
def test_slurm_variables_that_cannot_be_are_refused_by_name(variables, match):
    with pytest.raises(LaunchError, match=match):
        place_from(variables)


def test_an_allocation_without_a_task_says_nothing():
    assert place_from({"SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_NTASKS": "8"}) is None
    assert Nodes.of_sizes([1]) == nodes_from(slurm("4(x2)"), world_size=1)
