"""Plans of whole trees, carried out in numpy and held to a lower bound that is computed from the definition alone."""

from collections import Counter

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import ArgumentError, ShapeError, ShardingError
from dualmesh.sharding.partition_spec import local_shape, slices_of
from dualmesh.weights.plan import Piece, plan_transfer

P = dm.P
GRIDS = [{"a": 2}, {"a": 3}, {"a": 4}, {"a": 2, "b": 2}, {"a": 2, "b": 3}, {"a": 3, "b": 1}, {"a": 2, "b": 2, "c": 2}]


def topology(sizes):
    return dm.TopologySpec(sizes).resolve(int(np.prod(list(sizes.values()))))


def some_spec(draw, names, ndim):
    """Return a spec that uses some axes, each once, in any order."""
    chosen = list(draw.permutation(names))[: draw.integers(0, len(names) + 1)]
    entries = [[] for _ in range(ndim)]
    for name in chosen:
        entries[draw.integers(ndim)].append(str(name))
    return P(*map(tuple, entries))


def some_end(draw, ranks_to, paths):
    sizes = GRIDS[draw.integers(len(GRIDS))]
    grid = topology(sizes)
    ranks = tuple(int(r) for r in draw.permutation(ranks_to)[: grid.world_size])
    return grid, {path: some_spec(draw, list(sizes), ndim) for path, ndim in paths.items()}, ranks


def held_by(end, path, shape):
    """Return {rank: mask of the global array}, read off the definition."""
    grid, specs, ranks = end
    found = {}
    for place, rank in enumerate(ranks):
        found[rank] = np.zeros(shape, bool)
        found[rank][slices_of(grid, specs[path], shape, place)] = True
    return found


def blocks_of(end, arrays):
    grid, specs, ranks = end
    return {
        rank: {path: x[slices_of(grid, specs[path], x.shape, place)].copy() for path, x in arrays.items()}
        for place, rank in enumerate(ranks)
    }


def carried_out(plan, blocks, taken):
    """Carry out a plan from one side's blocks into another's, empty ones; return how often each element arrived."""
    times = {rank: {path: np.zeros(x.shape, int) for path, x in own.items()} for rank, own in taken.items()}
    for rank in plan.members:
        moves = [(rank, piece) for piece in plan.kept(rank)]
        moves += [(message.sender, piece) for message in plan.receives(rank) for piece in message.pieces]
        for sender, piece in moves:
            part = blocks[sender][piece.source][piece.source_slices]
            assert part.nbytes == piece.nbytes > 0
            taken[rank][piece.target][piece.target_slices] = part
            times[rank][piece.target][piece.target_slices] += 1
    return times


def check_messages(plan, message_bytes):
    """Both ends of every pair list the same messages, in one order, none above the bound."""
    sent = [message for rank in plan.members for message in plan.sends(rank)]
    received = [message for rank in plan.members for message in plan.receives(rank)]
    assert sorted(map(str, sent)) == sorted(map(str, received))
    assert all(message.nbytes == sum(p.nbytes for p in message.pieces) <= message_bytes for message in sent)
    orders = [message.order for message in sent]
    assert len(set(orders)) == len(orders)


def test_bytes_moved_equal_the_lower_bound_on_500_random_pairs():
    """For each receiver exactly the bytes that it needs and does not hold, whatever topologies, ranks and shapes."""
    for seed in range(500):
        draw = np.random.default_rng(seed)
        shapes = {f"w{i}": tuple(int(n) for n in draw.choice([24, 48], draw.integers(1, 3))) for i in range(3)}
        arrays = {path: draw.integers(0, 2**15, shape).astype("int16") for path, shape in shapes.items()}
        paths = {path: len(shape) for path, shape in shapes.items()}
        source, target = (some_end(draw, range(12), paths) for _ in range(2))
        message_bytes = int(draw.integers(2, 600))
        known = {path: (shape, 2) for path, shape in shapes.items()}
        plan = plan_transfer(known, src=_given(source), dst=_given(target), message_bytes=message_bytes)
        bound, taken = Counter(), {}
        for path, shape in shapes.items():
            has, needs = held_by(source, path, shape), held_by(target, path, shape)
            for rank, mask in needs.items():
                bound[rank] += 2 * int((mask & ~has.get(rank, np.zeros(shape, bool))).sum())
        for rank in plan.members:
            assert plan.bytes_received(rank) == bound[rank], (seed, rank)
        if seed % 5:
            continue
        expected = blocks_of(target, arrays)
        taken = {rank: {path: np.full_like(x, -1) for path, x in own.items()} for rank, own in expected.items()}
        times = carried_out(plan, blocks_of(source, arrays), taken)
        for rank, own in expected.items():
            for path, x in own.items():
                np.testing.assert_array_equal(taken[rank][path], x, err_msg=f"{seed} {rank} {path}")
                assert (times[rank][path] == 1).all()
        check_messages(plan, message_bytes)


def _given(end):
    grid, specs, ranks = end
    return grid, specs, ranks


TP, DP = topology({"tp": 4}), topology({"dp": 2, "tp": 2})


def test_copies_take_turns_so_that_all_send_alike():
    source = topology({"dp": 4, "tp": 2})
    arrays = {f"w{i}": ((8, 8), 4) for i in range(16)}
    for target, ranks in ((topology({"a": 1}), (20,)), (topology({"a": 3}), (20, 21, 22)), (DP, (30, 31, 32, 33))):
        specs = P(None, "tp") if target is DP else P()
        plan = plan_transfer(arrays, src=(source, P("tp")), dst=(target, specs, ranks))
        loads = [plan.bytes_sent(rank) for rank in range(8)]
        assert max(loads) <= 1.26 * min(loads), loads
        assert sum(loads) == sum(plan.bytes_received(rank) for rank in ranks)


def test_a_receiver_takes_from_the_copy_that_shares_its_slower_digits():
    grid = topology({"node": 2, "tp": 4})
    plan = plan_transfer({"w": ((16,), 4)}, src=(grid, P("tp")), dst=(grid, P()))
    for rank in range(8):
        assert {message.sender // 4 for message in plan.receives(rank)} == {rank // 4}


def test_small_arrays_share_messages_and_large_ones_are_cut():
    arrays = {**{f"small{i}": ((4,), 4) for i in range(50)}, "large": ((64, 64), 4)}
    plan = plan_transfer(arrays, src=(TP, P("tp")), dst=(topology({"a": 1}), P(), (9,)), message_bytes=1024)
    check_messages(plan, 1024)
    messages = plan.receives(9)
    assert sum(message.nbytes for message in messages) == 50 * 16 + 64 * 64 * 4
    assert len(messages) == 4 * (1 + 4)
    assert max(len(message.pieces) for message in messages) >= 50
    tiny = plan_transfer({"w": ((2, 3, 5), 4)}, src=(TP, P()), dst=(topology({"a": 1}), P(), (9,)), message_bytes=4)
    assert [message.nbytes for message in tiny.receives(9)] == [4] * 30


QKV = {"q": 8, "k": 4, "v": 4}


def fused(parts, shards):
    """Return what each of some shards holds of a fused array: its blocks one after another."""
    return [np.concatenate([np.split(x, shards)[i] for x in parts]) for i in range(shards)]


@pytest.mark.parametrize("way", ["fused to parts", "parts to fused", "fused to fused"])
def test_fused_blocks_are_taken_apart_and_put_together_by_spec(way):
    draw = np.random.default_rng(3)
    parts = {f"attn.{name}": draw.normal(size=(size, 6)) for name, size in QKV.items()}
    whole = {"attn.qkv": dm.Fused(P("tp"), QKV)}
    separate = dict.fromkeys(parts, P(None, "tp"))
    if way == "fused to parts":
        src, dst = (TP, whole), (DP, separate, (5, 0, 1, 7))
    elif way == "parts to fused":
        src, dst = (DP, separate), (TP, whole, (3, 9, 1, 0))
    else:
        src, dst = (TP, whole), (DP, whole, (2, 3, 8, 9))
    if src[1] is whole:
        arrays = {"attn.qkv": ((16, 6), 8)}
        blocks = {rank: {"attn.qkv": x} for rank, x in enumerate(fused(parts.values(), 4))}
    else:
        arrays = {path: (x.shape, 8) for path, x in parts.items()}
        blocks = blocks_of((*src, range(4)), parts)
    plan = plan_transfer(arrays, src=src, dst=dst, message_bytes=100)
    if dst[1] is whole:
        shards = dst[0].size("tp")
        expected = {
            rank: {"attn.qkv": fused(parts.values(), shards)[dst[0].index("tp", place)]}
            for place, rank in enumerate(dst[2])
        }
    else:
        expected = blocks_of(dst, parts)
    taken = {rank: {path: np.zeros_like(x) for path, x in own.items()} for rank, own in expected.items()}
    times = carried_out(plan, blocks, taken)
    for rank, own in expected.items():
        for path, x in own.items():
            np.testing.assert_array_equal(taken[rank][path], x)
            assert (times[rank][path] == 1).all()


def test_experts_go_by_the_axis_of_a_view():
    spec = dm.TopologySpec({"dp_shard": 4}, views={"expert": dm.View(over=("dp_shard",), axes={"ep_fsdp": 2, "ep": 2})})
    grid, x = spec.resolve(4), np.arange(8 * 8.0).reshape(8, 8)
    source, target = (grid, {"experts": P("ep", "ep_fsdp")}, range(4)), (TP, {"experts": P(None, "tp")}, range(2, 6))
    plan = plan_transfer({"experts": (x.shape, 8)}, src=source, dst=target)
    expected = blocks_of(target, {"experts": x})
    taken = {rank: {"experts": np.zeros_like(own["experts"])} for rank, own in expected.items()}
    carried_out(plan, blocks_of(source, {"experts": x}), taken)
    for rank, own in expected.items():
        np.testing.assert_array_equal(taken[rank]["experts"], own["experts"])


@pytest.mark.parametrize(
    ("dst", "renames", "expected"),
    [
        ({"e": P(), "h": P("tp"), "o": P()}, {"h": "e"}, {("e", "e"), ("e", "h"), ("o", "o")}),
        ({"t": P(), "h": P("tp"), "o": P()}, {"h": "e", "t": "e"}, {("e", "t"), ("e", "h"), ("o", "o")}),
        (P(), {"h": "e", "t": "e"}, {("e", "t"), ("e", "h"), ("o", "o")}),
        (P(), {"h": "e", "e": "e"}, {("e", "e"), ("e", "h"), ("o", "o")}),
        (P(), {"e": "o", "o": "e"}, {("e", "o"), ("o", "e")}),
        ({"e": P(), "o": P()}, {"e": "o", "o": "e"}, {("e", "o"), ("o", "e")}),
        (P(), {"o": "e", "x": "o"}, {("e", "o"), ("o", "x")}),
        ({"f": dm.Fused(P("tp"), {"e": 8, "o": 8}), "h": P()}, {"h": "e"}, {("e", "f"), ("o", "f"), ("e", "h")}),
        (
            {"f": dm.Fused(P("tp"), {"e": 8, "o": 8}), "e": P()},
            {"o": "o"},
            {("e", "f"), ("o", "f"), ("e", "e")},
        ),
        (
            {"f": dm.Fused(P("tp"), {"e": 8, "x": 8}), "x": P()},
            {"x": "o"},
            {("e", "f"), ("o", "f"), ("o", "x")},
        ),
        (dm.ShardingPlan({"**": P("tp")}), {"h": "e"}, {("e", "h"), ("o", "o")}),
    ],
)
def test_one_array_may_go_to_several_paths_and_every_array_goes_somewhere(dst, renames, expected):
    """Tied embeddings, swaps and chains of names; the blocks that arrive are those of the source."""
    arrays = {"e": np.arange(8.0), "o": 100 + np.arange(8.0)}
    known = {path: (x.shape, x.itemsize) for path, x in arrays.items()}
    plan = plan_transfer(known, src=(TP, P("tp")), dst=(TP, dst), renames=renames)
    assert {(given.path, taken.path) for _, given, taken in plan.pairs} == expected
    room = {
        rank: {path: np.full(shape, np.nan) for path, (shape, _) in plan.target_blocks().items()} for rank in range(4)
    }
    given = {rank: {path: np.split(x, 4)[rank] for path, x in arrays.items()} for rank in range(4)}
    carried_out(plan, given, room)
    assert not any(np.isnan(block).any() for own in room.values() for block in own.values())


@pytest.mark.parametrize(
    ("src", "dst", "renames", "match"),
    [
        (P(), P(), {"o": "e"}, "'o' of the source goes nowhere: renames gives its path to 'e'"),
        (P(), {"o": P(), "e": P()}, {"o": "e"}, "'o' of the source goes nowhere"),
        (P(), P(), {"x": "embde"}, "'x' shall be 'embde', which the source does not hold. It holds: e, o"),
        (P(), {"e": P(), "o": P()}, {"x": "e"}, "dst has no spec for 'x'"),
        (P(), {"e": P()}, {}, "dst has no spec for 'o'"),
        ({"e": P(), "o": P()}, {"e": P(), "o": P(), "head": P()}, {}, "dst asks for 'head', which the source does not"),
        ({"e": dm.Fused(P(), {"o": 8}), "o": P()}, P(), {}, "src holds 'o' twice"),
        (P(), {"e": P(), "o": P(), "heda": P()}, {}, "dst asks for 'heda', which the source does not hold. It holds"),
        (dm.ShardingPlan({"**": P()}), {"e": P(), "o": P(), "head": P()}, {}, "dst asks for 'head', which"),
        (P(), {"e": P(), "o": P(), "qkv": dm.Fused(P(), QKV)}, {}, "asks for 'qkv', fused of q, k, v too, which"),
        (
            {"e": P(), "o": P(), "q": P(), "k": P()},
            {"e": P(), "o": P(), "qkv": dm.Fused(P(), QKV)},
            {},
            "asks for 'qkv', fused of v too, which",
        ),
        (
            P(),
            {"e": P(), "o": P(), "f": dm.Fused(P(), {"x": 8, "y": 8})},
            {"x": "e"},
            "asks for 'f', fused of y too, which",
        ),
    ],
)
def test_what_would_lose_or_invent_an_array_is_refused(src, dst, renames, match):
    """By name, before anything moves."""
    arrays = {"e": ((8,), 8), "o": ((8,), 8)}
    with pytest.raises(ShardingError, match=match):
        plan_transfer(arrays, src=(TP, src), dst=(TP, dst), renames=renames)


def test_renames_partial_updates_and_plans_of_shardings():
    specs = dm.ShardingPlan({"**.w": P("tp")})
    plan = plan_transfer(
        {"model.a.w": ((8,), 4)}, src=(TP, specs), dst=(TP, {"a.weight": P()}), renames={"a.weight": "model.a.w"}
    )
    assert plan.kept(0) == (Piece("model.a.w", (slice(0, 2),), "a.weight", (slice(0, 2),), 8),)
    some = {"attn.qkv": dm.Fused(P("tp"), QKV), "other": P()}
    every = {"attn.q": P(), "attn.k": P(), "attn.v": P(), "other": P()}
    plan = plan_transfer({"other": ((3,), 4)}, src=(TP, every), dst=(TP, some))
    assert [plan.bytes_received(rank) for rank in range(4)] == [0] * 4


@pytest.mark.parametrize(
    ("arrays", "src", "dst", "settings", "error", "match"),
    [
        ([1], (TP, P()), (TP, P()), {}, ArgumentError, r"Give \{path: \(shape, bytes"),
        ({"w": (4, 4)}, (TP, P()), (TP, P()), {}, ArgumentError, r"'w': \(4, 4\)"),
        ({"w": ((4,), 4)}, (TP,), (TP, P()), {}, ArgumentError, "src="),
        ({"w": ((4,), 4)}, (TP, 3), (TP, P()), {}, ArgumentError, "specs=3"),
        ({"1": ((4,), 4)}, (TP, P()), (TP, {1: P(), "1": P("tp")}), {}, ArgumentError, "dst: two specs have .*'1'"),
        ({"1": ((4,), 4)}, (TP, {1: P(), "1": P("tp")}), (TP, P()), {}, ArgumentError, "src: two specs have .*'1'"),
        ({"a.b": ((4,), 4)}, (TP, {"a": {"b": P()}}), (TP, P()), {}, ShardingError, "src: the spec of 'a' is {'b'"),
        ({"w": ((4,), 4)}, ("nobody", P()), (TP, P()), {}, ValueError, "nobody"),
        ({"w": ((4,), 4)}, (TP, {"v": P()}), (TP, P()), {}, ShardingError, "src has no spec for 'w'"),
        ({"w": ((4,), 4)}, (TP, P(partial="tp")), (TP, P()), {}, ShardingError, "a sum still to be taken over tp"),
        ({"w": ((4,), 4)}, (TP, P()), (TP, P(partial="tp")), {}, ShardingError, "dst has"),
        ({"w": ((6,), 4)}, (TP, P()), (TP, P("tp")), {}, ShapeError, "dst: 'w' of shape .*does not divide"),
        ({"w": ((6,), 4)}, (TP, P()), (TP, P()), {"message_bytes": 3}, ArgumentError, "less than one element of w"),
        (
            {"a.q": ((8,), 4)},
            (TP, P()),
            (TP, {"a.qkv": dm.Fused(P(), QKV)}),
            {},
            ShardingError,
            "fused of a.k, a.v too",
        ),
        ({"qkv": ((9,), 4)}, (TP, {"qkv": dm.Fused(P(), QKV)}), (TP, P()), {}, ShapeError, "which make 16"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(arrays, src, dst, settings, error, match):
    with pytest.raises(error, match=match):
        plan_transfer(arrays, src=src, dst=dst, **settings)


def test_one_ranks_part_of_1000_tensors_between_1024_ranks_is_all_that_it_lacks():
    """What it takes is in `tests.bench.topology_scale`; nothing is listed for the other ranks."""
    source, target = topology({"fsdp": 128, "tp": 8}), topology({"dp": 64, "tp": 16})
    arrays = {f"layers.{i}.w": ((4096 + 1024 * (i % 8), 4096), 2) for i in range(1000)}
    plan = plan_transfer(arrays, src=(source, P(("tp", "fsdp"))), dst=(target, P("tp")))
    received, sent = plan.receives(777), plan.sends(777)
    needs = sum(np.prod(local_shape(target, P("tp"), shape)) * 2 for shape, _ in arrays.values())
    kept = sum(piece.nbytes for piece in plan.kept(777))
    assert sum(message.nbytes for message in received) + kept == needs
    assert len(sent) > 0
