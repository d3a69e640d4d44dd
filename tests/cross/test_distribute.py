"""Uneven sizes are padded or refused, and who holds the array is said, on every backend, rank by rank."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import ArgumentError, RankError, ShapeError
from dualmesh.sharding.partition_spec import slices_of
from dualmesh.sharding.slices import padded_shape
from dualmesh.testing import assert_same
from tests.core.all_specs import TOPOLOGIES, whole_specs
from tests.cross.redistributions import held
from tests.jax_backend.processes import processes
from tests.worlds import torch_world, worlds

SLOW_S = 300.0
SHAPES = ((7, 5), (6, 11), (1, 4), (12, 12), (0, 3))
BACKENDS = ["sim", "torch", "jax"]


def whole_of(shape):
    return np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)


def padded(name, specs):
    """Return, per shape and spec: the padded shape, the blocks, the value trimmed, what each rank has of the array."""
    state, found = dm.init_parallel_state(spec=TOPOLOGIES[name].spec), []
    for shape in SHAPES:
        for spec in specs:
            x = dm.distribute(whole_of(shape), spec, pad=True)
            own = {rank: dm.local_slices(spec, shape, rank, pad=True) for rank in state.local_ranks}
            cuts = {rank: tuple((cut.start, cut.stop) for cut in slices) for rank, slices in own.items()}
            found.append((tuple(x.shape), held(x, state), dm.to_numpy(x, shape=shape), cuts))
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_uneven_sizes_are_padded_by_zeros_at_the_end_and_trimmed_back(backend):
    name = "2x3"
    topology, specs = TOPOLOGIES[name], whole_specs(TOPOLOGIES[name])[::3]
    answers = worlds()[backend](padded, name, specs, world_size=topology.world_size, timeout_s=SLOW_S)
    cases = [(shape, spec) for shape in SHAPES for spec in specs]
    for place, (shape, spec) in enumerate(cases):
        wide, whole = padded_shape(topology, spec, shape), whole_of(shape)
        zeroed = np.pad(whole, [(0, large - size) for large, size in zip(wide, shape, strict=True)])
        blocks = {rank: block for answer in answers for rank, block in answer[place][1].items()}
        assert blocks.keys() == set(range(topology.world_size))
        wanted = {rank: zeroed[slices_of(topology, spec, wide, rank)] for rank in blocks}
        assert_same(f"{shape} {spec} rank", wanted, blocks, rtol=0)
        for found_shape, _, value, cuts in (answer[place] for answer in answers):
            assert found_shape == wide
            assert_same(f"{shape} {spec}", whole, value, rtol=0)
            for rank, cut in cuts.items():
                block = slices_of(topology, spec, wide, rank)
                own = [range(size)[one] for size, one in zip(shape, block, strict=True)]  # Python clips slices itself
                assert cut == tuple((one.start, one.stop) for one in own)
                own = whole[block]
                part = blocks[rank][tuple(slice(size) for size in own.shape)]
                assert_same(f"{shape} {spec} own part of rank {rank}", own, part, rtol=0)


def refused(rank_of_none=None):
    dm.init_parallel_state(spec=dm.TopologySpec({"a": 2, "b": 2}))
    said = []
    x = dm.distribute(np.ones((3, 2)), dm.P("a"), pad=True)
    for call in (
        lambda: dm.distribute(np.ones((3, 2)), dm.P("a")),
        lambda: dm.distribute(np.ones(3), dm.P(None, "a"), pad=True),
        lambda: dm.distribute(np.ones(3), dm.P("x"), pad=True),
        lambda: dm.to_numpy(x, shape=(5, 2)),
        lambda: dm.to_numpy(x, shape=(3,)),
        lambda: dm.local_slices(dm.P("a"), (3,), 0),
        lambda: dm.distribute(np.ones(4), dm.P("a"), src=4),
        lambda: dm.distribute(np.ones(4), dm.P("a"), src=0, check=True),
    ):
        try:
            said.append(repr(call()))
        except dm.DualmeshError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_pad_uneven_sizes_are_refused_and_so_is_what_cannot_be_trimmed(backend):
    for said in worlds()[backend](refused, world_size=4, timeout_s=SLOW_S):
        uneven, entries, axis, larger, dims, slices, src, both = said
        for text in (uneven, slices):
            assert text.startswith("ShapeError")
            assert "size 3" in text
            assert "pad=True" in text
        assert "has 2 entries" in entries
        assert axis.startswith("UnknownAxisError")
        assert "shape=(5, 2), but the array has shape (4, 2)" in larger
        assert "shape=(3,), but the array has shape (4, 2)" in dims
        assert "RankError: distribute: src=4 is no rank of State" in src
        assert "give one" in both


def given_by_one(src, dtypes):
    """Lay out what rank `src` holds, on a state of some ranks in another order; return blocks and refusals."""
    import torch

    spec, ranks = dm.TopologySpec({"a": 2, "b": 2}), (3, 0, 5, 2)
    state = dm.init_parallel_state(spec=spec, ranks=ranks)
    if not state.is_member:
        return None
    found = []
    holds = state.own_rank() == src
    for dtype in dtypes:
        whole = torch.arange(5 * 6).reshape(5, 6).to(getattr(torch, dtype)) if holds else "nothing"
        x = dm.distribute(whole, dm.P(("b", "a"), None), src=src, pad=True)
        found.append((str(x.dtype), x.to_local().to(torch.complex64).numpy(), dm.to_numpy(x, shape=(5, 6)).shape))
    said = []
    for bad in (np.ones((3, 4)), np.array(["text"] * 4), torch.ones(4, requires_grad=True) * 2):
        try:
            dm.distribute(bad if holds else None, dm.P("a"), src=src)
        except dm.DualmeshError as error:
            said.append((type(error).__name__, str(error)))
    return state.own_rank(), found, said


def test_torch_lays_out_what_one_rank_holds_and_all_refuse_what_it_refuses():
    dtypes = ["float32", "bfloat16", "int64", "bool", "complex64", "int16"]
    topology, ranks = dm.TopologySpec({"a": 2, "b": 2}).resolve(4), (3, 0, 5, 2)
    answers = [one for one in torch_world(given_by_one, 5, dtypes, world_size=6, timeout_s=SLOW_S) if one]
    assert {rank for rank, _, _ in answers} == set(ranks)
    whole = np.pad(np.arange(30.0).reshape(5, 6), [(0, 3), (0, 0)])
    for rank, found, said in answers:
        block = whole[slices_of(topology, dm.P(("b", "a")), (8, 6), ranks.index(rank))]
        for dtype, (found_dtype, given, trimmed) in zip(dtypes, found, strict=True):
            assert found_dtype == f"torch.{dtype}"
            wanted = block != 0 if dtype == "bool" else block
            assert_same(f"{dtype} on rank {rank}", wanted.astype(np.complex64), given, rtol=0)
            assert trimmed == (5, 6)
        kinds = ["ShapeError", "ArrayTypeError", "NotDifferentiableError"] if rank == 5 else ["ShardingError"] * 3
        assert [kind for kind, _ in said] == kinds
        assert all(rank == 5 or "rank 5, which holds the array, refused it" in text for _, text in said)


def compared(differs):
    """Compare equal copies, then copies of which one rank's differs."""
    state = dm.init_parallel_state(dp_size=4)
    good = dm.distribute(np.arange(8.0), dm.P("dp"), check=True)
    other = np.arange(8.0)
    other[5] += 0.0 if state.own_rank() != 2 else differs
    try:
        dm.distribute(other, dm.P("dp"), check=True)
    except dm.DualmeshError as error:
        return tuple(good.shape), str(error)
    return tuple(good.shape), None


def test_check_compares_the_copies_that_ranks_hold():
    for differs in (0.0, 1e-9):
        for shape, said in torch_world(compared, differs, world_size=4, timeout_s=SLOW_S):
            assert shape == (8,)
            assert (said is None) == (differs == 0.0)
            assert said is None or "ranks 0 and 2 hold different arrays" in said


def over_processes():
    """On JAX: lay out what the process of rank 3 holds, then compare copies."""
    import jax

    state = dm.init_parallel_state(spec=dm.TopologySpec({"a": 2, "b": 2}))
    holds, said = 3 in state.local_ranks, []
    whole = -np.arange(10.0).reshape(5, 2)
    x = dm.distribute(whole if holds else None, dm.P(("b", "a")), src=3, pad=True)
    assert_same("trimmed", whole, dm.to_numpy(x, shape=(5, 2)), rtol=0)
    assert np.signbit(dm.to_numpy(x)[0, 0])
    dm.distribute(np.arange(4.0), dm.P("a"), check=True)
    for call in (
        lambda: dm.distribute(np.arange(3.0) if holds else None, dm.P("a"), src=3),
        lambda: dm.distribute(np.arange(4.0) + jax.process_index(), dm.P("a"), check=True),
    ):
        try:
            call()
        except dm.DualmeshError as error:
            said.append(f"{type(error).__name__}: {error}")
    return holds, said


def test_in_jax_the_process_of_one_rank_holds_the_array():
    for holds, (refusal, differs) in processes(over_processes, devices=(2, 2)):
        assert refusal.startswith("ShapeError" if holds else "ShardingError: distribute: rank 3, which holds")
        assert "ranks 0 and 2 hold different arrays" in differs


def test_one_process_of_all_ranks_lays_out_what_any_of_them_holds(world):
    dm.init_parallel_state(dp_size=8)
    x = dm.distribute(np.arange(9), dm.P("dp"), src=6, pad=True)
    assert x.shape == (16,)
    assert dm.to_numpy(x, shape=(9,)).tolist() == list(range(9))
    for bad, kind in (({"src": 9}, RankError), ({"src": -1}, ArgumentError), ({"pad": 2}, ArgumentError)):
        with pytest.raises(kind, match="distribute: "):
            dm.distribute(np.arange(8), dm.P("dp"), **bad)
    with pytest.raises(ShapeError, match="dim 0 has size 9"):
        dm.distribute(np.arange(9), dm.P("dp"), src=6)
