"""The digit algebra against brute force over all ranks."""

from itertools import pairwise, permutations
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualmesh.topology.layout import (
    Digit,
    Layout,
    clash,
    cuts,
    divisors,
    on_grid,
    overlap,
    refactor,
    refinement,
    row_major,
)

SIZES = st.lists(st.sampled_from([1, 2, 3, 4, 5, 6]), min_size=1, max_size=4).filter(lambda sizes: prod(sizes) <= 120)
GRIDS_OF_24 = st.sampled_from(sorted(set(permutations([2, 2, 2, 3])))) | st.sampled_from(
    [(24,), (2, 12), (12, 2), (3, 8), (8, 3), (4, 6), (6, 4), (2, 3, 4), (4, 3, 2), (6, 1, 4)]
)


@st.composite
def grids(draw):
    """A grid and some of its axes, in any order, read as one."""
    sizes = draw(SIZES)
    layouts = row_major(sizes)
    members = draw(st.lists(st.sampled_from(range(len(sizes))), unique=True))
    return sizes, members, Layout.joined(layouts[place] for place in members)


def brute_index(layout, rank):
    index = 0
    for size, stride in layout.digits:
        index = index * size + rank // stride % size
    return index


@given(grids())
def test_an_axis_reads_its_index_as_numpy_does(grid):
    sizes, members, layout = grid
    coords = np.indices(sizes).reshape(len(sizes), -1)
    expected = np.zeros(prod(sizes), dtype=int)
    for place in members:
        expected = expected * sizes[place] + coords[place]
    assert [layout.index(rank) for rank in range(prod(sizes))] == expected.tolist()
    assert layout.size == prod(sizes[place] for place in members)


@given(grids())
def test_groups_are_disjoint_cover_and_come_in_index_order(grid):
    sizes, _, layout = grid
    world = prod(sizes)
    groups = layout.partition(world)
    assert groups.shape == (world // layout.size, layout.size)
    assert sorted(groups.reshape(-1).tolist()) == list(range(world))
    assert groups[:, 0].tolist() == sorted(groups[:, 0].tolist())
    assert groups.min(axis=1).tolist() == groups[:, 0].tolist()
    for group in groups.tolist():
        assert [layout.index(rank) for rank in group] == list(range(layout.size))
        for rank in group:
            assert layout.ranks(rank) == tuple(group)
            assert [layout.member(rank, index) for index in range(layout.size)] == group


@given(grids(), st.integers(0, 1000))
def test_a_first_rank_moves_every_group(grid, first):
    sizes, _, layout = grid
    world = prod(sizes)
    assert (layout.partition(world, first) == layout.partition(world) + first).all()


@given(grids())
def test_the_complement_is_what_is_left(grid):
    sizes, _, layout = grid
    rest = layout.complement(prod(sizes))
    assert rest.size * layout.size == prod(sizes)
    assert not overlap(rest, layout)
    assert rest.complement(prod(sizes)).size == layout.size


@given(st.lists(st.tuples(st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 3, 4, 6, 12])), max_size=3))
def test_layouts_clash_exactly_when_two_ranks_of_a_group_would_share_an_index(digits):
    layouts = [Layout.of([Digit(*digit)]) for digit in digits]
    world = 4 * 4 * 4 * 12 * 27
    large = [digit for digit in (Digit(*digit) for digit in digits) if digit.size > 1]
    offsets = {
        sum(step * digit.stride for step, digit in zip(steps, large, strict=True)) for steps in product_of(large)
    }
    indices = {tuple(offset // digit.stride % digit.size for digit in large) for offset in offsets}
    one_to_one = len(offsets) == len(indices) == prod(digit.size for digit in large)
    if clash(layouts) is None:
        assert one_to_one
        assert Layout.joined(layouts).partition(world).size == world
    else:
        first, second = clash(layouts)
        assert first < second
        assert overlap(layouts[first], layouts[second])


def product_of(digits):
    steps = [()]
    for digit in digits:
        steps = [(*done, step) for done in steps for step in range(digit.size)]
    return steps


def test_digits_that_interleave_at_no_divisor_share_ranks():
    assert overlap(Layout.of([Digit(2, 1)]), Layout.of([Digit(2, 3)]))
    assert not overlap(Layout.of([Digit(3, 1)]), Layout.of([Digit(2, 3)]))


@given(grids(), st.data())
def test_a_layout_is_factored_exactly_where_it_can_be_cut(grid, data):
    sizes, _, whole = grid
    parts = data.draw(st.sampled_from([[a, whole.size // a] for a in divisors(whole.size)]))
    found = refactor(whole, parts)
    if parts[1] not in cuts(whole):
        assert found is None
        return
    outer, inner = found
    for rank in range(prod(sizes)):
        assert outer.index(rank) * parts[1] + inner.index(rank) == whole.index(rank)


def test_splits_may_cut_through_an_axis_or_straddle_two():
    whole = Layout.joined(row_major([4, 3, 2])[0:1] + row_major([4, 3, 2])[2:])  # sizes 4 and 2, a 3 between them
    outer, inner = refactor(whole, [2, 4])
    assert inner == Layout((Digit(2, 6), Digit(2, 1)))
    assert outer == Layout((Digit(2, 12),))
    assert refactor(Layout((Digit(3, 8), Digit(4, 1))), [2, 6]) is None


@given(st.lists(GRIDS_OF_24, min_size=1, max_size=3))
def test_a_refinement_spells_every_layout_or_does_not_exist(factorisations):
    world = 24
    layouts = [layout for sizes in factorisations for layout in row_major(sizes)]
    grid = refinement(layouts, world)
    edges = sorted(
        {1, world} | {edge for one in layouts for size, stride in one.digits for edge in (stride, size * stride)}
    )
    divides = all(high % low == 0 for low, high in pairwise(edges))
    assert (grid is not None) == divides
    if grid is None:
        return
    assert prod(atom.size for atom in grid) == world
    for layout in layouts:
        atoms = on_grid(layout, grid)
        for rank in range(world):
            index = 0
            for place in atoms:
                size, stride = grid[place]
                index = index * size + rank // stride % size
            assert index == layout.index(rank)


def test_a_layout_that_the_grid_does_not_cut_is_not_on_it():
    assert on_grid(Layout((Digit(2, 1),)), [Digit(4, 1)]) is None


@pytest.mark.parametrize("number", [1, 2, 12, 36, 97, 1 << 20, 2**20 * 3**5])
def test_divisors_are_all_divisors_in_order(number):
    found = divisors(number)
    assert found == sorted(set(found))
    assert [number // divisor for divisor in reversed(found)] == found
    if number < 1000:
        assert found == [n for n in range(1, number + 1) if number % n == 0]


@pytest.mark.parametrize("members", [[0], [3], [2, 0], [0, 1, 2, 3], [3, 2, 1, 0], []])
def test_large_partitions_are_those_of_numpy(members):
    sizes = [8, 16, 64, 16]
    rest = [place for place in range(4) if place not in members]
    ranks = np.arange(7, 7 + prod(sizes)).reshape(sizes).transpose(rest + members)
    expected = ranks.reshape(-1, prod(sizes[place] for place in members))
    layout = Layout.joined(row_major(sizes)[place] for place in members)
    np.testing.assert_array_equal(layout.partition(prod(sizes), 7), expected)
