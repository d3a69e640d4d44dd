"""`dm.reshard` between states over the same, overlapping and disjoint ranks: values and gradients against numpy."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import ArgumentError, ArrayTypeError, ShapeError, ShardingError, UnknownStateError
from dualmesh.partition_spec import slices_of
from tests.jax_backend.processes import processes
from tests.jax_backend.worker import in_jax
from tests.worlds import held, torch_world, wide_worlds

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
WEIGHT = np.random.default_rng(7).normal(size=SHAPE)


def opened():
    """Register all states, also where this process is no member; return them by name."""
    return {
        name: dm.init_parallel_state(spec=dm.TopologySpec(sizes), ranks=ranks, name=name)
        for name, (sizes, ranks) in STATES.items()
    }


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


def moved_globally(ways, whole, weight):
    """Return, per way, what ranks then hold, and what they hold of the gradient of sum(weight * array)."""
    states = opened()
    found = []
    for src, dst in ways:
        source, target = states[src[0]], states[dst[0]]
        x = dm.distribute(whole, src[1], state=source) if source.is_member else None
        if source.backend == "sim":
            found.append((held(dm.reshard(x, src=src, dst=dst), target), {}))
            continue
        found.append(differentiated(x, src, dst, source, target, weight))
    return found


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
        return held(y, target), held(gradient, source)
    if x is not None:
        x.requires_grad_()
    value, y = objective(x)
    if y is not None:
        value.backward()
    return held(y, target), held(x.grad if x is not None else None, source)


def joined(results):
    """Return what all processes said together."""
    return [
        tuple({k: v for one in side for k, v in one.items()} for side in zip(*each, strict=True))
        for each in zip(*results, strict=True)
    ]


@pytest.mark.parametrize("backend", ["sim", "torch", "jax"])
def test_a_global_array_moves_from_state_to_state_and_its_gradient_comes_back(backend):
    found = joined(wide_worlds()[backend](moved_globally, WAYS, WHOLE, WEIGHT, world_size=8, timeout_s=SLOW_S))
    for (src, dst), (arrived, gradient) in zip(WAYS, found, strict=True):
        for got, wanted in ((arrived, cut(WHOLE, dst)), (gradient, cut(WEIGHT, src))):
            if got is gradient and backend == "sim":
                continue
            assert got.keys() == wanted.keys(), (src, dst)
            for rank, block in wanted.items():
                np.testing.assert_allclose(got[rank], block, rtol=1e-14, atol=0, err_msg=f"{src} {dst} {rank}")


SUMS = [
    (("all", dm.P("dp", partial="sp")), ("middle", dm.P("sp", "dp"))),
    (("ends", dm.P(None, "sp", partial="dp")), ("ends", dm.P("dp"))),
]


def moved_by_blocks(ways, blocks, weights):
    """Return, per way, this rank's new block and its gradient of the sum over ranks of sum(weight * block)."""
    import torch

    states, found = opened(), []
    rank = torch.distributed.get_rank()
    for (src, dst), given, weight in zip(ways, blocks, weights, strict=True):
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


def test_blocks_move_and_the_gradient_is_the_exact_transpose():
    draw = np.random.default_rng(1)
    ways = WAYS + SUMS
    blocks = [cut(WHOLE, src) for src, _ in WAYS]
    for src, _ in SUMS:  # addends differ on every rank
        blocks.append({rank: draw.normal(size=block.shape) for rank, block in cut(WHOLE, src).items()})
    for addends in blocks[len(WAYS) :]:  # copies of an addend are equal: the ranks of neither dim nor sum
        assert len(addends) > 1
    weights = [{rank: draw.normal(size=block.shape) for rank, block in cut(WHOLE, dst).items()} for _, dst in ways]
    found = joined(torch_world(moved_by_blocks, ways, blocks, weights, world_size=8, timeout_s=SLOW_S))
    for (src, dst), given, weight, (arrived, gradient) in zip(ways, blocks, weights, found, strict=True):
        whole = placed(given, src) if src[1].partial else WHOLE
        for rank, block in cut(whole, dst).items():
            np.testing.assert_allclose(arrived[rank], block, rtol=1e-13, err_msg=f"{src} {dst} {rank}")
        wanted = placed(weight, dst) * (grids()[src[0]][0].size(src[1].partial) if src[1].partial else 1)
        np.testing.assert_allclose(placed(gradient, src), wanted, rtol=0, atol=1e-13, err_msg=f"{src} {dst}")


def narrow_sum():
    """Move bfloat16, bool and int16 blocks, and a sum of bfloat16."""
    import torch

    opened()
    rank = torch.distributed.get_rank()
    ways = {"src": ("all", dm.P(("dp", "sp"))), "dst": ("turned", dm.P(("dp", "sp")))}
    rows = torch.arange(3) + 3 * rank
    moved = [dm.reshard(x, **ways) for x in (rows.bfloat16(), rows % 2 == 0, rows.to(torch.int16))]
    parts = torch.full((2,), 1.0 if rank else 256.0, dtype=torch.bfloat16)
    total = dm.reshard(parts, src=("all", dm.P(partial=("dp", "sp"))), dst=("all", dm.P()))
    return [str(x.dtype) for x in (*moved, total)], [x.tolist() for x in moved], total.tolist()


def test_every_dtype_moves_and_narrow_sums_are_taken_in_32_bits():
    order = STATES["turned"][1]
    for rank, (dtypes, moved, total) in enumerate(torch_world(narrow_sum, world_size=8, timeout_s=SLOW_S)):
        rows = np.arange(3) + 3 * order.index(rank)
        assert dtypes == ["torch.bfloat16", "torch.bool", "torch.int16", "torch.bfloat16"]
        assert moved == [rows.tolist(), (rows % 2 == 0).tolist(), rows.tolist()]
        assert total == [264.0] * 2  # in bfloat16 itself, 256 + 1 is 256


def refused_in_torch():
    import torch

    states, found = opened(), []
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
    return [state.is_member for state in states.values()], found


def test_torch_refuses_alike_on_every_rank_and_nobody_waits():
    for rank, (_, found) in enumerate(torch_world(refused_in_torch, world_size=8, timeout_s=SLOW_S)):
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


@in_jax()
def test_inside_jit_both_ends_have_the_same_devices():
    import jax

    spec = dm.TopologySpec({"dp": 2, "sp": 4})
    states = dm.init_parallel_states({"a": spec, "b": dm.TopologySpec({"dp": 4, "sp": 2})})
    dm.init_parallel_state(spec=dm.TopologySpec({"dp": 2, "sp": 2}), ranks=(0, 1, 2, 3), name="half")
    x = dm.distribute(np.arange(64.0).reshape(8, 8), dm.P("dp", "sp"), state=states["a"])
    ways = {"src": ("a", dm.P("dp", "sp")), "dst": ("b", dm.P("dp"))}
    for run in (lambda x: dm.reshard(x, **ways), jax.jit(lambda x: dm.reshard(x, **ways) * 1)):
        y = run(x)
        assert y.sharding.is_equivalent_to(states["b"].sharding(dm.P("dp")), 2)
        np.testing.assert_array_equal(y, np.arange(64.0).reshape(8, 8))
    gradient = jax.jit(jax.grad(lambda x: (dm.reshard(x, **ways) ** 2).sum()))(x)
    np.testing.assert_array_equal(gradient, 2 * np.arange(64.0).reshape(8, 8))
    with pytest.raises(ShardingError, match=r"inside jit, from State 'a' over .* to State 'half' over"):
        jax.jit(lambda x: dm.reshard(x, src=("a", dm.P()), dst=("half", dm.P())))(x)
    with pytest.raises(ShardingError, match=r"lies on .*but State 'half' is over"):
        dm.reshard(x, src=("half", dm.P()), dst=("a", dm.P()))
    with pytest.raises(ArgumentError, match="reshard: called inside shard_map"):
        dm.shard_map(lambda x: dm.reshard(x, **ways), dm.P("dp"), dm.P("dp"), state=states["a"])(x)


PAIR = {"all": ({"dp": 2, "sp": 1}, None), "one": ({"dp": 1}, (1,))}


def compiled_in_torch():
    """Return, for blocks and for DTensors, the value and gradient eagerly and compiled, and what fullgraph says."""
    import torch

    states = {
        name: dm.init_parallel_state(spec=dm.TopologySpec(sizes), ranks=ranks, name=name)
        for name, (sizes, ranks) in PAIR.items()
    }
    ways, rank = {"src": ("all", dm.P("dp")), "dst": ("one", dm.P())}, torch.distributed.get_rank()
    whole = np.arange(12.0).reshape(4, 3)

    def fn(x):
        y = dm.reshard(torch.sin(x), **ways)
        return (y * y).sum() * 3

    found = []
    for given in (
        torch.from_numpy(whole[2 * rank : 2 * rank + 2]),
        dm.distribute(whole, dm.P("dp"), state=states["all"]),
    ):
        for run in (fn, torch.compile(fn, backend="aot_eager")):
            x = given.clone().requires_grad_()
            value = run(x)
            value.backward()
            gradient = x.grad.to_local() if hasattr(x.grad, "to_local") else x.grad
            found.append((float(value.to_local() if hasattr(value, "to_local") else value), gradient.numpy()))
    torch._dynamo.reset()
    try:
        torch.compile(fn, backend="aot_eager", fullgraph=True)(given)
    except Exception as error:
        return found, str(error)
    return found, None


def test_torch_runs_reshard_between_two_compiled_pieces_and_fullgraph_says_so():
    whole = np.arange(12.0).reshape(4, 3)
    for rank, (found, said) in enumerate(torch_world(compiled_in_torch, world_size=2, timeout_s=SLOW_S)):
        for value, gradient in found:
            np.testing.assert_allclose(value, 3 * (np.sin(whole) ** 2).sum() if rank == 1 else 0, rtol=1e-13)
            wanted = 6 * np.sin(whole) * np.cos(whole)
            np.testing.assert_allclose(gradient, wanted[2 * rank : 2 * rank + 2], rtol=1e-12, atol=1e-14)
        assert "dm.reshard from state to state asks the ranks of both ends" in said


QUAD = {
    "all": ({"dp": 2, "sp": 2}, None),
    "turned": ({"dp": 4}, (3, 1, 0, 2)),
    "low": ({"dp": 2}, (0, 1)),
    "high": ({"dp": 2}, (3, 2)),
    "mid": ({"dp": 2}, (2, 1)),
}


def over_jax_processes(there, elsewhere):
    """Return, per way, blocks and gradient blocks; then what is said where the devices are others."""
    import jax

    states = {
        name: dm.init_parallel_state(spec=dm.TopologySpec(sizes), ranks=ranks, name=name)
        for name, (sizes, ranks) in QUAD.items()
    }
    whole, found, said = np.arange(64.0).reshape(8, 8), [], []
    for src, dst in there:
        source, target = states[src[0]], states[dst[0]]
        x = dm.distribute(whole, src[1], state=source)
        weight = dm.distribute(whole, dst[1], state=target)
        gradient = jax.grad(lambda x: (dm.reshard(x, src=src, dst=dst) * weight).sum())(x)  # noqa: B023
        found.append((held(dm.reshard(x, src=src, dst=dst), target), held(gradient, source)))
    for src, dst in elsewhere:
        source = states[src[0]]
        x = dm.distribute(whole, src[1], state=source) if source.is_member else None
        if source.is_member or states[dst[0]].is_member:
            with pytest.raises((ShardingError, ArrayTypeError)) as refusal:
                dm.reshard(x, src=src, dst=dst)
            said.append(str(refusal.value))
    return found, said


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
    answers = processes(over_jax_processes, there, elsewhere, devices=(2, 2))
    whole = np.arange(64.0).reshape(8, 8)
    for place, (src, dst) in enumerate(there):
        for side, (name, spec) in enumerate((dst, src)):
            sizes, ranks = QUAD[name]
            topology, order = dm.TopologySpec(sizes).resolve(4), ranks or (0, 1, 2, 3)
            blocks = {rank: block for found, _ in answers for rank, block in found[place][side].items()}
            assert blocks.keys() == {0, 1, 2, 3}
            for rank, block in blocks.items():
                wanted = whole[slices_of(topology, spec, (8, 8), order.index(rank))]
                np.testing.assert_array_equal(block, wanted, err_msg=f"{src} {dst} {rank}")
    for _, said in answers:
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
