"""Every plan is carried out in numpy: blocks of the global array in, blocks of the global array out."""

import itertools
import time
from collections import Counter

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import RankError, ShapeError, ShardingError, UnknownAxisError
from dualmesh.sharding.partition_spec import canonical, local_shape, slices_of
from dualmesh.sharding.redistribution import Placed, Reshard
from tests.core.all_specs import TOPOLOGIES, all_specs


def members(placed):
    """Return {rank: place in the grid}, read off the definition."""
    topology = placed.topology
    own = range(topology.rank_offset, topology.rank_offset + topology.world_size)
    return {rank: place for place, rank in enumerate(placed.ranks or own)}


def blocks_of(array, placed):
    """Return {rank: its block}; addends of a partial array differ on every rank and sum to the array."""
    topology, spec = placed.topology, placed.spec
    blocks = {}
    for rank, place in members(placed).items():
        block = array[slices_of(topology, spec, array.shape, place + topology.rank_offset)]
        size, index = topology.size(spec.partial), topology.index(spec.partial, place + topology.rank_offset)
        noise = np.random.default_rng(index).integers(-50, 50, block.shape)
        others = sum(np.random.default_rng(i).integers(-50, 50, block.shape) for i in range(size - 1))
        blocks[rank] = block if size == 1 else noise if index < size - 1 else block - others
    return blocks


def carried_out(plan, array):
    """Carry out a plan, checking that every element arrives exactly once from each source; return {rank: block}."""
    held = blocks_of(array, plan.source)
    arrived = {}
    for rank in members(plan.target):
        shape = local_shape(plan.target.topology, plan.target.spec, array.shape)
        block, times = np.zeros(shape, array.dtype), np.zeros(shape, int)
        for part in plan.receives(rank):
            for source in part.sources:
                block[part.target_slices] += held[source][part.source_slices]
                times[part.target_slices] += 1
            assert len(part.sources) == len(set(part.sources)) == plan.source.topology.size(plan.source.spec.partial)
        np.testing.assert_array_equal(times, plan.source.topology.size(plan.source.spec.partial))
        arrived[rank] = block
    return arrived


def check(source, target, shape):
    """Check values, that own parts stay, and that `sends` is the counterpart of `receives`."""
    array = np.arange(np.prod(shape)).reshape(shape) + 1
    plan = Reshard(shape, source, target)
    arrived = carried_out(plan, array)
    expected = blocks_of(array, target)
    assert arrived.keys() == expected.keys()
    for rank, block in arrived.items():
        np.testing.assert_array_equal(block, expected[rank], err_msg=f"{source} {target} {rank}")
    held = members(source)
    received = Counter()
    for rank in arrived:
        for part in plan.receives(rank):
            received.update((source, rank, str(part[1:])) for source in part.sources)
            if rank in held:
                topology, spec = source.topology, source.spec
                wanted = slices_of(target.topology, target.spec, shape, members(target)[rank] + offset(target))
                own = slices_of(topology, spec, shape, held[rank] + offset(source))
                start = [o.start + s.start for o, s in zip(wanted, part.target_slices, strict=True)]
                holds = all(s.start <= at < s.stop for s, at in zip(own, start, strict=True))
                assert (rank in part.sources) == holds
    sent = Counter((rank, part.target, str(part[1:])) for rank in held for part in plan.sends(rank))
    assert sent == received
    assert max(received.values(), default=1) == 1
    return plan


def offset(placed):
    """Return the first rank of the topology."""
    return placed.topology.rank_offset


def distinct(topology, partial):
    """Return one spec of every meaning, partial sums included or not."""
    found = {canonical(topology, spec): spec for spec in all_specs(topology) if partial or not spec.partial}
    return list(found.values())


@pytest.mark.parametrize(("name", "step"), [("2x2x2", 23), ("2x3", 1), ("1x4x1", 1), ("view", 3), ("inner view", 37)])
def test_any_spec_to_any_other_on_the_same_ranks(name, step):
    topology = TOPOLOGIES[name]
    pairs = list(itertools.product(distinct(topology, True), distinct(topology, False)))
    for source, target in pairs[::step]:
        check(Placed(topology, source), Placed(topology, target), (24, 24))


EIGHT, SIX = TOPOLOGIES["2x2x2"], TOPOLOGIES["2x3"]
ELSEWHERE = {
    "another grid, some of the ranks": (EIGHT, None, SIX, None),
    "another grid, more ranks": (SIX, None, EIGHT, None),
    "overlapping ranks": (EIGHT, None, SIX, (9, 3, 4, 12, 0, 7)),
    "ranks out of order": (EIGHT, (5, 3, 1, 7, 0, 2, 4, 6), SIX, (2, 11, 5, 0, 8, 3)),
    "disjoint ranks": (SIX, None, EIGHT, tuple(range(6, 14))),
    "one rank": (EIGHT, None, dm.TopologySpec({"a": 1}).resolve(1), (3,)),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_any_spec_to_any_other_on_other_ranks(name):
    first, first_ranks, second, second_ranks = ELSEWHERE[name]
    pairs = list(itertools.product(distinct(first, True), distinct(second, False)))
    for source, target in pairs[:: max(1, len(pairs) // 100)]:
        check(Placed(first, source, first_ranks), Placed(second, target, second_ranks), (24, 24))


def test_sizes_that_only_their_own_side_divides_are_cut_at_both_places():
    source, target = Placed(dm.TopologySpec({"a": 2}).resolve(2), dm.P("a")), Placed(SIX, dm.P("b"))
    plan = check(source, target, (6,))
    assert [(part.sources, part.source_slices, part.target_slices) for part in plan.receives(1)] == [
        ((0,), (slice(2, 3),), (slice(0, 1),)),
        ((1,), (slice(0, 1),), (slice(1, 2),)),
    ]


def test_scalars_and_empty_arrays_have_plans_too():
    check(Placed(EIGHT, dm.P(partial="a")), Placed(SIX, dm.P(), tuple(range(4, 10))), ())
    plan = Reshard((0, 8), Placed(EIGHT, dm.P("a", "b")), Placed(SIX, dm.P("b")))
    assert plan.receives(0) == plan.sends(0) == ()


def test_a_rank_outside_gets_and_gives_nothing():
    plan = Reshard((6,), Placed(SIX, dm.P("a")), Placed(SIX, dm.P("b"), tuple(range(6, 12))))
    assert plan.receives(2) == plan.sends(7) == plan.receives(99) == ()
    assert plan.receives(7) != ()
    assert plan.sends(2) != ()


def test_members_take_from_a_copy_that_shares_their_slower_digits():
    plan = Reshard((8,), Placed(EIGHT, dm.P("c")), Placed(EIGHT, dm.P()))
    assert [[part.sources for part in plan.receives(rank)] for rank in (0, 5, 7)] == [
        [(0,), (1,)],
        [(4,), (5,)],
        [(6,), (7,)],
    ]


def test_copies_that_are_equally_near_take_turns():
    topology = dm.TopologySpec({"dp": 4, "tp": 4}).resolve(16)
    plan = Reshard((16,), Placed(topology, dm.P("dp")), Placed(topology, dm.P(("tp", "dp"))))
    assert [len(plan.sends(rank)) for rank in range(16)] == [1] * 16
    plan = Reshard((16,), Placed(topology, dm.P("dp")), Placed(topology, dm.P()))
    assert [len(plan.sends(rank)) for rank in range(16)] == [4] * 16


@pytest.mark.parametrize("spec", [dm.P(), dm.P("a"), dm.P("c"), dm.P(("c", "a")), dm.P("b", "a")])
def test_ranks_outside_share_the_copies_of_a_block_evenly(spec):
    for target_spec in distinct(SIX, False):
        plan = Reshard((24, 24), Placed(EIGHT, spec), Placed(SIX, target_spec, tuple(range(20, 26))))
        loads = {}
        for rank in range(8):
            block = slices_of(EIGHT, spec, (24, 24), rank)
            loads.setdefault(str(block), []).append(len(plan.sends(rank)))
        assert all(max(load) - min(load) <= 1 for load in loads.values())


def test_every_addend_of_a_sum_is_a_source():
    plan = check(Placed(EIGHT, dm.P("a", partial=("c", "b"))), Placed(EIGHT, dm.P("b")), (8,))
    assert [(part.sources, part.source_slices) for part in plan.receives(1)] == [((0, 2, 1, 3), (slice(0, 4),))]
    assert {part.target for part in plan.sends(6)} == {2, 3, 6, 7}


def test_a_million_ranks_are_planned_rank_by_rank():
    topology = dm.TopologySpec({"dp": 2**10, "tp": 2**10}).resolve(2**20)
    began = time.perf_counter()
    plan = Reshard((2**20, 8), Placed(topology, dm.P("dp")), Placed(topology, dm.P(("tp", "dp"))))
    received, sent = plan.receives(777_777), plan.sends(777_777)
    assert time.perf_counter() - began < 0.5
    assert len(received) == 1
    assert len(sent) == 1


def test_what_does_not_fit_is_refused_by_name():
    source = Placed(SIX, dm.P("b"))
    with pytest.raises(ShapeError, match=r"Reshard: source array of shape \(8,\): dim 0 has size 8, which 'b'"):
        Reshard((8,), source, source)
    with pytest.raises(ShapeError, match=r"Reshard: target array of shape \(3,\).*'a' of size 2"):
        Reshard((3,), source, Placed(SIX, dm.P("a")))
    with pytest.raises(ShardingError, match=r"target P\(partial=\('a',\)\) is partial over a"):
        Reshard((6,), source, Placed(SIX, dm.P(partial="a")))
    with pytest.raises(ShardingError, match=r"has 1 dim, but .* has 2 entries"):
        Reshard((6,), source, Placed(SIX, dm.P("a", "b")))
    with pytest.raises(UnknownAxisError, match=r"target array.*no axis 'q'"):
        Reshard((6,), source, Placed(SIX, dm.P("q")))
    with pytest.raises(RankError, match=r"ranks 0, 1, 1, 2, 3, 4: 5 different ranks for 6 places"):
        Placed(SIX, dm.P(), (0, 1, 1, 2, 3, 4))
    with pytest.raises(RankError, match="2 different ranks for 6 places"):
        Placed(SIX, dm.P(), (0, 1))
