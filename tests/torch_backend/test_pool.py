"""How many groups there are, and that they are the right ones."""

import pytest

import dualmesh as dm
from dualmesh.topology import communicators
from tests.torch_backend.fake import fake_world
from tests.worlds import torch_world


def registrations(n):
    """Return dicts of specs for a world of n, a multiple of 8; each dict is registered at once."""
    roles = {"data": "rows", "params": ("rows", "seq"), "loss": ("seq", "rows"), "sequence": "seq"}
    return {
        "two named states": {
            "thinker": dm.parallel_spec(dp_replicate_size=2, dp_shard_size=n // 4, ulysses_size=2, ep_size=2),
            "talker": dm.parallel_spec(dp_size=n, dp_shard_size=n),
        },
        "every axis": {"base": dm.parallel_spec(dp_shard_size=n // 8, ulysses_size=2, cp_size=2, tp_size=2)},
        "pipeline": {"base": dm.parallel_spec(pp_size=2, dp_replicate_size=2, dp_shard_size=n // 4)},
        "one axis is the world": {"a": dm.TopologySpec({"a": n}), "b": dm.parallel_spec(tp_size=n)},
        "megatron": {"base": dm.presets.megatron(tp=2, ep=2, dp=n // 4)},
        "torchtitan": {"base": dm.presets.torchtitan(dp_replicate=2, dp_shard=n // 4, tp=2)},
        "free axes": {"base": dm.TopologySpec({"rows": n // 4, "seq": 2, "heads": 2}, roles=roles)},
        "lists": {"base": dm.RankGroups([tuple(range(1, n // 2)), (n - 1, 0), (n // 2,)])},
        "lists beside a grid": {  # both have an axis whose digits are one of n / 2 and stride 1
            "lists": dm.RankGroups([tuple(range(0, n, 2))]),
            "grid": dm.TopologySpec({"rows": 2, "columns": n // 2}),
        },
    }


def distinct_by_hand(states, rank):
    """Return what a rank is in: the list of every axis in its lane, and that of the loss in lane "data"."""
    found = set()
    for state in states.values():
        topology = state.topology
        wanted = [(axis, communicators.lane_of(topology, axis)) for axis in topology.axis_names]
        wanted += [(topology.role("loss"), "data")] if "loss" in topology.spec.roles else []
        for axis, lane in wanted:
            if topology.is_member(axis, rank):
                ranks = topology.ranks(axis, rank)
                found.add((ranks, lane if len(ranks) > 1 else "data"))
    return found


def counts(world_size):
    """Return, per registration, (keys in the pool are right, groups that torch made, how many were wanted)."""
    from torch import distributed
    from torch.distributed import distributed_c10d

    from dualmesh.backend import discovery

    found = {}
    for name, specs in registrations(world_size).items():
        before = len(distributed_c10d._world.pg_map)
        states = dm.init_parallel_states(specs)
        pool = discovery.load("torch").pool
        wanted = distinct_by_hand(states, pool.rank)
        made = len(distributed_c10d._world.pg_map) - before
        defaults = sum(group.name == pool.default.group_name for group in dm.groups_in_use())
        same = {key[:2] for key in pool.keys()} == wanted and all(
            tuple(distributed_c10d.get_process_group_ranks(state.group(axis))) == state.ranks(axis)
            for state in states.values()
            for axis in state.axis_names
            if state.topology.is_member(axis, pool.rank)
        )
        found[name] = (same, len(pool), made + defaults, len(wanted), defaults)
        distributed.barrier()  # who clears at once closes connections that slower ranks still make
        dm.clear_parallel_state()
    return found


def check(found):
    for name, (same, pooled, made, wanted, defaults) in found.items():
        assert same, name
        assert pooled == made == wanted, name
        assert defaults <= 1, "the default group stands for the world in one lane"
    assert found["two named states"][4] == 1


@pytest.mark.parametrize("world_size", [64, 512, 4096, 16_384])
@pytest.mark.parametrize("place", [0, 0.6])
def test_a_rank_holds_its_distinct_lists_and_lanes_and_no_more(world_size, place):
    check(fake_world(counts, world_size, rank=int(place * world_size), world_size=world_size))


def test_each_rank_of_a_real_world_holds_its_distinct_lists_and_lanes_and_no_more():
    for found in torch_world(counts, 8, world_size=8, timeout_s=300):
        check(found)


def test_the_distinct_lists_of_a_known_topology():
    """Each axis by hand: rank 3 of 2 replicas x 2 shards x 2 ulysses."""
    topology = dm.parallel_spec(dp_replicate_size=2, dp_shard_size=2, ulysses_size=2).resolve(8)
    assert communicators.distinct(topology, 3) == (
        ((0, 1, 2, 3), "param"),  # dp_shard_sp
        ((0, 1, 2, 3, 4, 5, 6, 7), "data"),  # world, and the loss
        ((0, 1, 2, 3, 4, 5, 6, 7), "param"),  # dp_sp
        ((1, 3), "param"),  # dp_shard
        ((1, 3, 5, 7), "param"),  # dp
        ((2, 3), "data"),  # ulysses, sp
        ((3,), "data"),  # cp, tp, pp
        ((3, 7), "param"),  # dp_replicate
    )


@pytest.mark.parametrize(
    ("axis", "lane"),
    [
        *(("dp", "param"), ("ep_fsdp", "param"), ("ep_replicate", "param"), ("ep", "data"), ("sp", "data")),
        *(
            (("dp_replicate", "dp_shard"), "param"),
            (("dp_shard", "ulysses"), "data"),
            ("world", "data"),
            ("cp", "data"),
        ),
    ],
)
def test_lanes_follow_who_issues_the_collective(axis, lane):
    topology = dm.parallel_spec(dp_replicate_size=2, dp_shard_size=2, ulysses_size=2, ep_size=2).resolve(8)
    assert communicators.lane_of(topology, axis) == lane


def test_lanes_of_free_axes_follow_roles():
    roles = {"data": ("rows",), "params": ("rows", "seq"), "loss": ("seq", "rows"), "sequence": ("seq",)}
    topology = dm.TopologySpec({"rows": 2, "seq": 2, "heads": 2}, roles=roles).resolve(8)
    found = {axis: communicators.lane_of(topology, axis) for axis in ("rows", "seq", "heads", ("rows", "seq"))}
    assert found == {"rows": "param", "seq": "data", "heads": "data", ("rows", "seq"): "param"}


def test_an_axis_that_is_sequence_and_loss_stays_in_the_data_lane():
    topology = dm.TopologySpec({"seq": 4}, roles={"loss": "seq", "sequence": "seq"}).resolve(4)
    assert communicators.lane_of(topology, "seq") == "data"


def test_planning_asks_nothing_of_the_world():
    topology = dm.parallel_spec(dp_shard_size=2**17, ulysses_size=2, tp_size=4).resolve(2**20)
    small = {axis: need for axis, need in communicators.memberships(topology, 5).items() if axis in ("sp", "tp", "cp")}
    assert [need.ranks for need in small.values()] == [(5,), (4, 5, 6, 7), (1, 5)]


def sharing():
    import torch.distributed as dist

    from dualmesh.backend import discovery

    one = dm.init_parallel_state(dp_size=2, ulysses_size=2, name="one")
    pool = discovery.load("torch").pool
    first = len(pool)
    two = dm.init_parallel_state(spec=dm.TopologySpec({"x": 2, "y": 2}), name="two")
    own = dm.init_parallel_state(spec=dm.TopologySpec({"x": 2, "y": 2}), name="own", own_groups=True)
    found = {
        "same list, same group": one.group("sp") is two.group("y"),
        "lanes differ": one.group("dp_sp") is not one.group("world"),
        "size 1 shares": one.group("tp") is one.group("pp"),
        "own": own.group("y") is not two.group("y"),
        "own meshes differ": own.mesh != two.mesh,
        "never the default": own.group("world") is not dist.group.WORLD,
    }
    shared, before = two.group("y").group_name, len(pool)
    dm.clear_parallel_state("one")
    found["lives while another uses it"] = shared in {group.name for group in dm.groups_in_use()}
    found["dies with its last user"] = len(pool) < before and len(pool) == len({*two._held, *own._held})
    dm.clear_parallel_state()
    found["all are let go of"] = len(pool) == 0 and first > 0
    found["the default lives"] = dist.is_initialized() and dist.get_world_size() == 4
    return found


def test_groups_are_shared_by_list_and_lane_and_let_go_of():
    for found in torch_world(sharing, world_size=4):
        assert all(found.values()), found


def two_own_states_in_two_threads():
    import threading
    import time

    import torch

    specs = {name: dm.TopologySpec({"x": 4}) for name in ("one", "other")}
    states = dm.init_parallel_states(specs, own_groups=True)
    rank = states["one"].own_rank()
    sums = {}

    def work(name, unit):
        if (name == "one") != (rank % 2 == 0):  # ranks differ in which of the two goes first
            time.sleep(0.3)
        x = torch.tensor([unit * (rank + 1.0), unit * (rank + 2.0)])
        sums[name] = [dm.ops.all_reduce(x, "x", state=states[name]).tolist() for _ in range(3)]

    threads = [threading.Thread(target=work, args=each, daemon=True) for each in (("one", 1.0), ("other", 100.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return sums


def test_own_groups_under_two_names_do_not_mix():
    for found in torch_world(two_own_states_in_two_threads, world_size=4):
        assert found == {"one": [[10.0, 14.0]] * 3, "other": [[1000.0, 1400.0]] * 3}


def own_groups_over_ranks_that_built_unlike_many():
    import torch

    rank = torch.distributed.get_rank()
    if rank < 2:
        dm.init_parallel_state(spec=dm.TopologySpec({"x": 2}), ranks=(0, 1), name="pair", own_groups=True)
    state = dm.init_parallel_state(spec=dm.TopologySpec({"x": 4}), name="all", own_groups=True)
    return dm.ops.all_reduce(torch.tensor(float(rank + 1)), "x", state=state).item()


def test_own_groups_of_ranks_that_built_other_states_before_meet():
    assert torch_world(own_groups_over_ranks_that_built_unlike_many, world_size=4) == [10.0] * 4


def after_clear():
    import torch

    totals = []
    for _ in range(4):
        state = dm.init_parallel_state(dp_size=2, ulysses_size=2)
        totals.append(dm.ops.all_reduce(torch.tensor(float(state.own_rank())), "sp").item())
        dm.clear_parallel_state()
    return totals


def test_clear_and_init_again_under_the_same_names():
    assert torch_world(after_clear, world_size=4) == [[1.0] * 4, [1.0] * 4, [5.0] * 4, [5.0] * 4]


def trainers_own_group_first():
    import torch
    import torch.distributed as dist

    dist.new_group([0, 1])
    state = dm.init_parallel_state(spec=dm.TopologySpec({"a": 2, "b": 2}))
    x = torch.tensor(float(state.own_rank()))
    return dm.ops.all_reduce(x, "a").item(), dm.ops.all_reduce(x, "b").item()


def test_a_group_of_the_trainers_own_does_not_disturb_the_names():
    found = torch_world(trainers_own_group_first, world_size=4, timeout_s=60)
    assert found == [(2.0, 1.0), (4.0, 1.0), (2.0, 5.0), (4.0, 5.0)]


def wrapped_over_the_sequence_axis():
    import torch
    from torch.nn.parallel import DistributedDataParallel

    state = dm.init_parallel_state(dp_size=1, ulysses_size=2)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(6))

        def forward(self, x, used):
            for layer in [self.layers[i] for i in used]:
                x = dm.ops.all_reduce(torch.tanh(layer(x)), "sp")
            return x.sum()

    rank = state.own_rank()
    net = DistributedDataParallel(
        Net(), process_group=state.group("dp_sp"), find_unused_parameters=True, bucket_cap_mb=0.0001
    )
    for _ in range(3):
        net(torch.ones(2, 8) + rank, [0, 1, 2, 3] if rank else [5, 4, 1, 0]).backward()
    return [float(p.grad.abs().sum()) for p in net.parameters()]


def test_wrapping_over_a_sequence_axis_with_unused_parameters_does_not_hang():
    one, two = torch_world(wrapped_over_the_sequence_axis, world_size=2, timeout_s=60)
    assert one == two


def orders():
    import torch

    state = dm.init_parallel_state(spec=dm.TopologySpec({"a": 4}), ranks=(2, 0, 3, 1), name="turned")
    x = torch.tensor([float(state.own_rank())])
    import torch.distributed as dist

    return (
        state.index("a"),
        dm.ops.all_gather(x, "a").tolist(),
        dist.get_process_group_ranks(state.group("a")),
        dm.host.broadcast(state.own_rank(), "a", src=0),
        state.mesh.mesh.tolist(),
        state.mesh.get_local_rank("a"),
    )


def test_the_listed_order_is_the_index_order_everywhere():
    found = torch_world(orders, world_size=4)
    for rank, (index, gathered, ranks, source, mesh, local) in enumerate(found):
        assert index == local == (2, 0, 3, 1).index(rank)
        assert gathered == [2.0, 0.0, 3.0, 1.0]
        assert ranks == mesh == [2, 0, 3, 1]
        assert source == 2


def partial_states():
    import torch

    found = {}
    for name, ranks in {"left": (0, 1), "right": (3, 2), "middle": (1, 2)}.items():
        state = dm.init_parallel_state(spec=dm.TopologySpec({"a": 2}), ranks=ranks, name=name)
        x = torch.tensor(10.0 ** state.world.local_ranks[0])
        try:
            found[name] = dm.ops.all_reduce(x, "a", state=state).item()
        except dm.DualmeshError as error:
            found[name] = type(error).__name__
    return found


def test_disjoint_and_overlapping_states_ask_nothing_of_others():
    none = "MembershipError"
    assert torch_world(partial_states, world_size=4) == [
        {"left": 11.0, "right": none, "middle": none},
        {"left": 11.0, "right": none, "middle": 110.0},
        {"left": none, "right": 1100.0, "middle": 110.0},
        {"left": none, "right": 1100.0, "middle": none},
    ]


def without_private_names():
    import torch

    from dualmesh_torch import private

    has = private.has_member_groups
    private.has_member_groups = lambda: False
    try:
        state = dm.init_parallel_state(spec=dm.TopologySpec({"a": 2, "b": 2}))
        x = torch.tensor(float(state.own_rank()))
        sums = dm.ops.all_reduce(x, "a").item(), dm.ops.all_reduce(x, "b").item()
        try:
            dm.init_parallel_state(spec=dm.TopologySpec({"a": 2}), ranks=state.ranks("b")[::-1], name="turned")
        except dm.DualmeshError as error:
            return *sums, "cannot keep the order" in str(error)
    finally:
        private.has_member_groups = has


def test_a_torch_without_the_private_constructor_still_works_or_says_what_it_cannot():
    found = torch_world(without_private_names, world_size=4)
    assert found == [(2.0, 1.0, True), (4.0, 1.0, True), (2.0, 5.0, True), (4.0, 5.0, True)]


def refusals():
    found = []
    for settings in ({"group_options": {"colour": 1}}, {"device_type": "cuda"}, {"group_options": {"timeout_s": -1}}):
        try:
            dm.init_parallel_state(dp_size=2, **settings)
        except dm.DualmeshError as error:
            found.append(type(error).__name__)
    from dualmesh.backend import discovery

    state = dm.init_parallel_state(dp_size=2, group_options={"timeout_s": 17})
    group = state.group("dp")
    import torch

    timeout = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return found, len(discovery.load("torch").pool), timeout


def test_a_refused_option_makes_no_group_and_an_allowed_one_reaches_every_group():
    for found, _, timeout in torch_world(refusals, world_size=2):
        assert found == ["ArgumentError", "BackendError", "ArgumentError"]
        assert timeout == 17


def bound_to_a_device():
    """Make groups where the default group is bound; return what torch's constructor saw, and what is bound after."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    default, made, seen = dist.group.WORLD, distributed_c10d._new_process_group_helper, []
    device = torch.device("cuda", 0)

    def recorded(*args, device_id=None, **settings):
        seen.append((default.bound_device_id, device_id))
        if len(seen) == 2:
            raise RuntimeError("on purpose")
        return made(*args, **settings)

    default.bound_device_id = device
    distributed_c10d._new_process_group_helper = recorded
    after = []
    try:
        dm.init_parallel_state(spec=dm.TopologySpec({"a": 2}))
        after.append(default.bound_device_id)
        try:
            dm.init_parallel_state(spec=dm.TopologySpec({"a": 2}), own_groups=True, name="own")
        except dm.DualmeshError as error:
            after.append((default.bound_device_id, "on purpose" in str(error)))
    finally:
        distributed_c10d._new_process_group_helper = made
        default.bound_device_id = None
    return seen == [(None, device)] * 2, after == [device, (device, True)]


def test_the_bound_device_is_hidden_while_members_make_a_group_and_given_back():
    """Else torch would split the default communicator, for which it needs all ranks of the world."""
    assert torch_world(bound_to_a_device, world_size=2) == [(True, True)] * 2
