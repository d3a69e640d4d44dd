"""`dm.reshard` between states over the same, overlapping and disjoint ranks: values and gradients against numpy."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import ArgumentError, ArrayTypeError, DifferenceError, ShapeError, ShardingError, UnknownStateError
from dualmesh.sharding.partition_spec import slices_of
from dualmesh.testing import assert_same, assert_sharded_as
from tests.jax_backend.processes import processes
from tests.worlds import torch_world, wide_worlds

SLOW_S = 400.0  # eight processes on a busy machine

STATES = {
    "all": ({"dp": 2, "sp": 4}, None),
    "turned": ({"dp": 4, "sp": 2}, (5, 1, 7, 3, 0, 6, 2, 4)),
    "middle": ({"dp": 2, "sp": 2}, (3, 4, 2, 5)),
    "ends": ({"dp": 2, "sp": 3}, (0, 6, 1, 7, 2, 5)),
    "one": ({"dp": 1, "sp": 1}, (7,)),
}
WAYS = [
    (("all", dm.P("dp", "sp")), ("turned", dm.P("sp", "dp"))),
    (("turned", dm.P(("sp", "dp"))), ("all", dm.P(None, "dp"))),
    (("all", dm.P("sp")), ("all", dm.P(("dp", "sp")))),
    (("all", dm.P("dp", "sp")), ("middle", dm.P("sp"))),
    (("middle", dm.P("sp", "dp")), ("ends", dm.P("dp", "sp"))),
    (("ends", dm.P("dp")), ("middle", dm.P("dp", "sp"))),
    (("one", dm.P()), ("ends", dm.P(("sp", "dp")))),
    (("ends", dm.P("sp", "dp")), ("one", dm.P())),
]
SHAPE = (24, 12)
WHOLE = np.arange(288.0).reshape(SHAPE) + 0.25
# Of one magnitude, so that a part of the largest is about as much of each.
WEIGHT = np.random.default_rng(7).uniform(1, 2, SHAPE)


def opened(declared=STATES):
    """Register all states, also where this process is no member; return them by name."""
    states = {
        name: dm.init_parallel_state(spec=dm.TopologySpec(sizes), ranks=ranks, name=name)
        for name, (sizes, ranks) in declared.items()
    }
    for name, (_, ranks) in declared.items():
        if states[name].members != (ranks or states["all"].members):
            raise ValueError(f"{name} is over {states[name].members}, not {ranks}")
    return states


def grids():
    """Return {name: (topology, session ranks in grid order)}, from the declaration alone."""
    found = {}
    for name, (sizes, ranks) in STATES.items():
        places = tuple(range(8)) if ranks is None else ranks
        found[name] = dm.TopologySpec(sizes).resolve(len(places)), places
    return found


def cut(whole, way):
    """Return {session rank: its block} of a whole array."""
    topology, ranks = grids()[way[0]]
    return {rank: whole[slices_of(topology, way[1], whole.shape, place)] for place, rank in enumerate(ranks)}


def copies(state, spec):
    """Return how many ranks hold each element."""
    return state.world_size // state.size(spec.axes)


def wrong_moves(states, ways):
    """Return, per way, what is wrong with the array that arrives and the gradient of sum(WEIGHT * array)."""
    said = []
    for src, dst in ways:
        source, target = states[src[0]], states[dst[0]]
        x = dm.distribute(WHOLE, src[1], state=source) if source.is_member else None
        try:
            if source.backend == "sim":
                assert_sharded_as(dm.reshard(x, src=src, dst=dst), dst[1], state=target, values=WHOLE, rtol=0)
                continue
            y, gradient = differentiated(x, src, dst, source, target, WEIGHT)
            assert_sharded_as(y, dst[1], state=target, values=WHOLE, rtol=0)
            assert_sharded_as(gradient, src[1], state=source, values=WEIGHT, rtol=5e-15)
        except DifferenceError as error:
            said.append(f"{src} {dst} {error}")
    return said


def differentiated(x, src, dst, source, target, weight):
    share = 1 / copies(target, dst[1])
    total = dm.shard_map(
        lambda y, w: dm.ops.all_reduce((y * w).sum() * share, "world", state=target),
        (dst[1], dst[1]),
        dm.P(),
        state=target,
    )

    def objective(x):
        y = dm.reshard(x, src=src, dst=dst)
        if not target.is_member:
            return (0.0 if y is None else y.sum()), y
        return total(y, dm.distribute(weight, dst[1], state=target)), y

    if source.backend == "jax":
        import jax

        gradient, y = jax.grad(objective, has_aux=True)(x)
        return y, gradient
    if x is not None:
        x.requires_grad_()
    value, y = objective(x)
    if y is not None:
        value.backward()
    return y, x.grad if x is not None else None


def joined(results):
    """Return what all processes said together."""
    return [
        tuple({k: v for one in side for k, v in one.items()} for side in zip(*each, strict=True))
        for each in zip(*results, strict=True)
    ]


def moved_globally():
    return wrong_moves(opened(), WAYS)


@pytest.mark.parametrize("backend", ["sim", "jax"])
def test_a_global_array_moves_from_state_to_state_and_its_gradient_comes_back(backend):
    assert wide_worlds()[backend](moved_globally, world_size=8, timeout_s=SLOW_S) == [[]]


def test_a_dtensor_moves_from_state_to_state_and_its_gradient_comes_back(in_torch):
    assert [found["wrong moves"] for found in in_torch] == [[]] * 8


SUMS = [
    (("all", dm.P("dp", partial="sp")), ("middle", dm.P("sp", "dp"))),
    (("ends", dm.P(None, "sp", partial="dp")), ("ends", dm.P("dp"))),
]


def block_ways():
    """Return [(way, {rank: its block}, {rank: weights of what it gets}), ...]; addends of sums differ on every rank."""
    draw = np.random.default_rng(1)

    def drawn(end):
        return {rank: draw.uniform(1, 2, block.shape) for rank, block in cut(WHOLE, end).items()}

    return [(way, drawn(way[0]) if way in SUMS else cut(WHOLE, way[0]), drawn(way[1])) for way in WAYS + SUMS]


def moved_by_blocks(states):
    """Return, per way, this rank's new block and its gradient of the sum over ranks of sum(weight * block)."""
    import torch

    found = []
    rank = torch.distributed.get_rank()
    for (src, dst), given, weight in block_ways():
        x = torch.from_numpy(given[rank]).requires_grad_() if states[src[0]].is_member else None
        y = dm.reshard(x, src=src, dst=dst)
        if y is not None:
            value = (y * torch.from_numpy(weight[rank])).sum() if states[dst[0]].is_member else y.sum()
            value.backward()
        arrived = {rank: y.detach().numpy()} if states[dst[0]].is_member else {}
        found.append((arrived, {} if x is None else {rank: x.grad.numpy()}))
    return found


def placed(blocks, way):
    """Return the sum of all ranks' blocks, each where it lies in the whole array."""
    topology, ranks = grids()[way[0]]
    whole = np.zeros(SHAPE)
    for place, rank in enumerate(ranks):
        whole[slices_of(topology, way[1], SHAPE, place)] += blocks[rank]
    return whole


def test_blocks_move_and_the_gradient_is_the_exact_transpose(in_torch):
    found = joined([one["blocks"] for one in in_torch])
    for ((src, dst), given, weight), (arrived, gradient) in zip(block_ways(), found, strict=True):
        what, summed = f"{src} {dst} rank", src[1].partial
        whole = placed(given, src) if summed else WHOLE
        assert_same(what, cut(whole, dst), arrived, rtol=2e-14 if summed else 0)
        wanted = placed(weight, dst) * (grids()[src[0]][0].size(summed) if summed else 1)
        assert_same(f"{src} {dst} gradient", wanted, placed(gradient, src), rtol=5e-15)


def narrow_sum():
    """Move bfloat16, bool and int16 blocks, and a sum of bfloat16."""
    import torch

    rank = torch.distributed.get_rank()
    ways = {"src": ("all", dm.P(("dp", "sp"))), "dst": ("turned", dm.P(("dp", "sp")))}
    rows = torch.arange(3) + 3 * rank
    moved = [dm.reshard(x, **ways) for x in (rows.bfloat16(), rows % 2 == 0, rows.to(torch.int16))]
    parts = torch.full((2,), 1.0 if rank else 256.0, dtype=torch.bfloat16)
    total = dm.reshard(parts, src=("all", dm.P(partial=("dp", "sp"))), dst=("all", dm.P()))
    return [str(x.dtype) for x in (*moved, total)], [x.tolist() for x in moved], total.tolist()


def test_every_dtype_moves_and_narrow_sums_are_taken_in_32_bits(in_torch):
    order = STATES["turned"][1]
    for rank, (dtypes, moved, total) in enumerate(one["narrow"] for one in in_torch):
        rows = np.arange(3) + 3 * order.index(rank)
        assert dtypes == ["torch.bfloat16", "torch.bool", "torch.int16", "torch.bfloat16"]
        assert moved == [rows.tolist(), (rows % 2 == 0).tolist(), rows.tolist()]
        assert total == [264.0] * 2  # in bfloat16 itself, 256 + 1 is 256


def refused_in_torch(states):
    import torch

    found = []
    ends, middle = ("ends", dm.P("dp")), ("middle", dm.P("dp"))

    def told(x, **ways):
        try:
            dm.reshard(x, **ways)
        except dm.DualmeshError as error:
            return type(error).__name__, str(error)
        return None

    x = torch.ones(4, 5)
    mine = {name: x if states[name].is_member else None for name in states}
    found.append(told(mine["ends"], src=ends, dst=("middle", dm.P(None, "sp"))))
    found.append(told(None, src=ends, dst=("all", dm.P())))
    found.append(told(x, src=middle, dst=("all", dm.P())))
    other = dm.distribute(np.ones((4, 6)), dm.P("dp"), state=states["ends"]) if states["ends"].is_member else None
    found.append(told(other, src=("middle", dm.P()), dst=ends))
    return found


def test_torch_refuses_alike_on_every_rank_and_nobody_waits(in_torch):
    for rank, found in enumerate(one["refused"] for one in in_torch):
        in_middle, in_ends = (rank in STATES[name][1] for name in ("middle", "ends"))
        size, nothing, uninvited, elsewhere = found
        if in_middle or in_ends:
            assert size[0] == "ShapeError"
            assert "dim 1 has size 5, which 'sp' of size 2 does not divide" in size[1]
        assert nothing[0] == ("ArrayTypeError" if in_ends else "ShardingError")
        assert ("found a NoneType" in nothing[1]) == in_ends
        assert (uninvited is None) == in_middle
        assert in_middle or "has nothing to give" in uninvited[1]
        assert elsewhere is None or elsewhere[0] in ("ArrayTypeError", "ShardingError")
        assert elsewhere is not None or not (in_middle or in_ends)


def everything_in_torch():
    states = opened()
    return {
        "wrong moves": wrong_moves(states, WAYS),
        "blocks": moved_by_blocks(states),
        "narrow": narrow_sum(),
        "refused": refused_in_torch(states),
    }


@pytest.fixture(scope="module")
def in_torch():
    """What every rank found in one world."""
    return torch_world(everything_in_torch, world_size=8, timeout_s=SLOW_S)


QUAD = {
    "all": ({"dp": 2, "sp": 2}, None),
    "turned": ({"dp": 4}, (3, 1, 0, 2)),
    "low": ({"dp": 2}, (0, 1)),
    "high": ({"dp": 2}, (3, 2)),
    "mid": ({"dp": 2}, (2, 1)),
}


def over_jax_processes(there, elsewhere):
    """Compare what arrives and its gradient, and return what is said where the devices are others."""
    import jax

    states, said = opened(QUAD), []
    whole = np.arange(64.0).reshape(8, 8)
    for src, dst in there:
        source, target = states[src[0]], states[dst[0]]
        x = dm.distribute(whole, src[1], state=source)
        weight = dm.distribute(whole, dst[1], state=target)
        gradient = jax.grad(lambda x: (dm.reshard(x, src=src, dst=dst) * weight).sum())(x)  # noqa: B023
        assert len(source.local_ranks) == len(target.local_ranks) == 2
        assert_sharded_as(dm.reshard(x, src=src, dst=dst), dst[1], state=target, values=whole, rtol=0)
        assert_sharded_as(gradient, src[1], state=source, values=whole, rtol=0)
    for src, dst in elsewhere:
        source = states[src[0]]
        x = dm.distribute(whole, src[1], state=source) if source.is_member else None
        if source.is_member or states[dst[0]].is_member:
            with pytest.raises((ShardingError, ArrayTypeError)) as refusal:
                dm.reshard(x, src=src, dst=dst)
            said.append(str(refusal.value))
    return said


def test_several_jax_processes_reshard_over_the_same_devices_and_refuse_others_by_name():
    there = [
        (("all", dm.P("dp", "sp")), ("all", dm.P("sp"))),
        (("all", dm.P("dp", "sp")), ("turned", dm.P(None, "dp"))),
        (("turned", dm.P("dp")), ("all", dm.P(("sp", "dp")))),
    ]
    elsewhere = [
        (("all", dm.P("dp")), ("low", dm.P("dp"))),
        (("low", dm.P("dp")), ("high", dm.P("dp"))),
        (("mid", dm.P("dp")), ("all", dm.P("dp"))),
    ]
    for said in processes(over_jax_processes, there, elsewhere, devices=(2, 2)):
        assert len(said) == 3
        assert all("Register both over the same devices" in text for text in said)


def test_both_ends_are_said_in_one_of_two_ways(world):
    state = dm.init_parallel_state(dp_size=8, name="all")
    x = dm.distribute(np.arange(16), dm.P("dp"))
    assert dm.reshard(x, dm.P()).spec == dm.P()
    assert dm.reshard(x, src=dm.P("dp"), dst=(state, dm.P())).block(3).tolist() == list(range(16))
    for bad in ({}, {"spec": dm.P(), "dst": dm.P()}, {"src": dm.P()}, {"src": dm.P(), "dst": "all"}):
        with pytest.raises(ArgumentError, match="reshard: "):
            dm.reshard(x, **bad)
    with pytest.raises(UnknownStateError, match="'al' is not registered"):
        dm.reshard(x, src=dm.P("dp"), dst=("al", dm.P()))
    with pytest.raises(ShapeError, match="dim 0 has size 6"):
        dm.reshard(dm.distribute(np.arange(6), dm.P()), src=dm.P(), dst=dm.P("dp"))
    with pytest.raises(ShardingError, match="partial over dp"):
        dm.reshard(x, src=dm.P("dp"), dst=dm.P(partial="dp"))
    with pytest.raises(ArrayTypeError):
        dm.reshard(np.array("text"), src=dm.P(), dst=dm.P())
