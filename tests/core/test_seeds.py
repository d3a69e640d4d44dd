import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import ArgumentError
from dualmesh.testing.noise import counter_noise, noise_block
from tests.worlds import wide_worlds

ROWS = 48
EXPECTED = [715815747, 4087570728]


def test_seeds_differ_along_the_axes_named_and_nowhere_else(world):
    state = dm.init_parallel_state(dp_size=2, ulysses_size=2, tp_size=2)
    for axes in ("dp", ("dp", "tp"), ("tp", "dp"), "world", ()):
        seeds = [dm.seed_for(state, axes, base=5, rank=rank) for rank in range(8)]
        indices = [state.index(axes, rank) for rank in range(8)]
        assert len(set(seeds)) == len(set(indices)) == state.size(axes)
        assert {
            (a == b, i == j) for a, i in zip(seeds, indices, strict=True) for b, j in zip(seeds, indices, strict=True)
        } <= {
            (True, True),
            (False, False),
        }
        assert all(0 <= seed < 2**32 for seed in seeds)


def test_bases_give_other_seeds(world):
    state = dm.init_parallel_state(dp_size=8)
    assert len({dm.seed_for(state, "dp", base=base, rank=rank) for base in range(50) for rank in range(8)}) > 390
    with pytest.raises(ArgumentError, match=r"base=0\.5 is no integer"):
        dm.seed_for(state, "dp", base=0.5, rank=0)


def test_noise_is_standard_normal_and_every_element_its_own():
    noise = noise_block(3, [slice(0, 200), slice(0, 500)], (200, 500))
    assert abs(noise.mean()) < 0.02
    assert abs(noise.std() - 1) < 0.02
    assert len(np.unique(noise)) == noise.size
    assert np.corrcoef(noise[:, :-1].ravel(), noise[:, 1:].ravel())[0, 1] == pytest.approx(0, abs=0.02)


def test_a_block_of_noise_is_the_block_of_the_whole():
    whole = noise_block(9, [slice(0, 6), slice(0, 10)], (6, 10))
    np.testing.assert_array_equal(noise_block(9, [slice(2, 5), slice(7, 10)], (6, 10)), whole[2:5, 7:10])
    assert not np.any(noise_block(10, [slice(0, 6), slice(0, 10)], (6, 10)) == whole)


def noises(sizes):
    """Return the global noise array and the traced or own seeds of a topology."""
    state = dm.init_parallel_state(**sizes)
    noise = counter_noise(4, dm.P(("dp", "tp")), (ROWS, 2), dtype="float64")

    def seeds(x):
        return x * 0 + dm.seed_for(state, "tp", base=11)

    line = dm.distribute(np.zeros(state.world_size, np.int64), dm.P("world"))
    return dm.to_numpy(noise), dm.to_numpy(dm.shard_map(seeds, dm.P("world"), dm.P("world"))(line))


@pytest.mark.parametrize("backend", ["sim", "torch", "jax"])
def test_numbers_are_the_same_on_every_framework_and_topology(backend):
    expected = noise_block(4, [slice(0, ROWS), slice(0, 2)], (ROWS, 2))
    for sizes in ({"dp_size": 4}, {"dp_size": 2, "tp_size": 2}):
        for noise, seeds in wide_worlds()[backend](noises, sizes, world_size=4):
            np.testing.assert_array_equal(noise, expected)
            tp = sizes.get("tp_size", 1)
            assert len(set(seeds)) == tp
            assert list(seeds) == [EXPECTED[rank % tp] if tp == 2 else EXPECTED[0] for rank in range(4)]
