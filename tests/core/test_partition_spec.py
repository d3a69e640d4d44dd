"""`P`: a value that says which slice a rank holds, against numpy's split."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dualmesh as dm
from dualmesh.errors import ShapeError, ShardingError, SpecError, UnknownAxisError
from dualmesh.sharding.partition_spec import (
    P,
    canonical,
    dim_layouts,
    global_shape,
    is_spec,
    local_shape,
    named_axes,
    slices_of,
    split_axes,
)
from tests.core.any_topology import examples


@st.composite
def placed(draw):
    """A topology, a spec over its base axes and view, and a shape that the spec divides."""
    example = draw(examples())
    topology = example.spec.resolve(example.world_size)
    names = draw(st.permutations(topology.base_axes))
    entries, shape = [], []
    while names:
        taken = draw(st.integers(0, len(names)))
        entries.append(tuple(names[:taken]))
        shape.append(topology.size(tuple(names[:taken])) * draw(st.integers(1, 2)))
        names = names[taken:] if taken else []
    return topology, P(*entries), tuple(shape)


@given(placed())
def test_a_rank_holds_the_block_of_its_index_in_every_dim(example):
    topology, spec, shape = example
    whole = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    found = np.full(shape, -1)
    for rank in range(topology.rank_offset, topology.rank_offset + topology.world_size):
        block = whole
        for dim, entry in enumerate(spec.entries):
            axes = split_axes(entry)
            block = np.split(block, topology.size(axes), axis=dim)[topology.index(axes, rank)]
        cut = slices_of(topology, spec, shape, rank)
        np.testing.assert_array_equal(whole[cut], block)
        assert block.shape == local_shape(topology, spec, shape)
        found[cut] = whole[cut]
    np.testing.assert_array_equal(found, whole)
    assert global_shape(topology, spec, local_shape(topology, spec, shape)) == shape


@given(placed())
def test_the_canonical_spec_splits_alike_and_is_its_own(example):
    topology, spec, shape = example
    short = canonical(topology, spec)
    assert dim_layouts(topology, short, shape) == dim_layouts(topology, spec, shape)
    assert canonical(topology, short) == short


@given(placed())
def test_a_layout_is_named_by_axes_that_spell_it(example):
    topology, spec, _ = example
    for entry in spec.entries:
        layout = topology.layout(split_axes(entry))
        assert topology.layout(named_axes(topology, layout)) == layout


def test_equal_specs_are_one_value():
    specs = [P("dp"), P(("dp",)), P("dp", None), P(["dp"], None, None)]
    assert len(set(specs)) == 1
    assert P(partial=("a", "b")) == P(partial=("b", "a"))
    assert len({P("dp"), P(None, "dp"), P("dp", partial="tp"), P(("dp", "tp")), P(("tp", "dp")), P()}) == 6
    for same in (pickle.loads(pickle.dumps(P("dp", partial="tp"))), copy.deepcopy(P("dp", partial="tp"))):
        assert same == P("dp", partial="tp")
        assert hash(same) == hash(P("dp", partial="tp"))
    assert P("dp") != "dp"
    assert P(()) == P(None)


def test_a_spec_is_frozen():
    with pytest.raises(AttributeError, match="P is frozen"):
        P("dp").entries = ()
    with pytest.raises(AttributeError, match="P is frozen"):
        del P("dp").entries


def test_only_specs_are_specs():
    assert is_spec(P())
    assert not any(is_spec(value) for value in ("dp", ("dp",), None, 3))
    assert P.of(P("dp")) == P("dp")
    with pytest.raises(ShardingError, match=r"expected, found 'dp'. Write dm.P"):
        P.of("dp")


@pytest.mark.parametrize("entries", [("dp", "dp"), (("dp", "tp"), "dp"), (("dp", "dp"),)])
def test_an_axis_splits_once(entries):
    with pytest.raises(ShardingError, match="axis 'dp' is named twice"):
        P(*entries)
    with pytest.raises(ShardingError, match="axis 'dp' is named twice"):
        P("dp", partial="dp")


@pytest.mark.parametrize("entry", [3, (3,), ("dp", None), 2.5])
def test_entries_are_names_tuples_or_none(entry):
    with pytest.raises(ShardingError, match=r"is no entry. Entries are an axis name, a tuple of names, or None"):
        P(entry)


@pytest.mark.parametrize(
    ("spec", "shape", "kind", "message"),
    [
        (P("dp"), (6,), ShapeError, r"dim 0 has size 6, which 'dp' of size 4 does not divide"),
        (P(None, ("dp", "tp")), (8, 4), ShapeError, r"dim 1 has size 4, which \('dp', 'tp'\) of size 8"),
        (P("dp", None), (8,), ShardingError, r"has 1 dim, but P\('dp', None\) has 2 entries"),
        (P("dpp"), (8,), UnknownAxisError, r"P\('dpp'\).*no axis 'dpp'.*Did you mean 'dp'"),
        (P("dp", "world"), (8, 8), SpecError, r"'dp' and 'world' .* share ranks"),
        (P("dp", partial="ep"), (8,), SpecError, r"'dp' and 'ep' .* share ranks"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(spec, shape, kind, message):
    views = {"expert": dm.View(("dp", "tp"), {"edp": 2, "ep": 4})}
    topology = dm.TopologySpec({"dp": 4, "tp": 2}, views=views).resolve(8)
    with pytest.raises(kind, match=message):
        slices_of(topology, spec, shape, 0)
