"""A spec is plain frozen data: what is declared is what comes back."""

import copy
import json
import pickle

import numpy as np
import pytest
from hypothesis import given

import dualmesh as dm
from dualmesh.errors import SpecError
from tests.core.any_topology import examples


@given(examples())
def test_a_spec_survives_every_round_trip(example):
    spec = example.spec
    assert dm.TopologySpec.from_dict(spec.to_dict()) == spec
    assert dm.TopologySpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert dm.TopologySpec.from_text(spec.to_text()) == spec
    for same in (pickle.loads(pickle.dumps(spec)), copy.copy(spec), copy.deepcopy(spec)):
        assert same == spec
        assert hash(same) == hash(spec)
    assert eval(repr(spec), {"TopologySpec": dm.TopologySpec, "View": dm.View}) == spec


def test_specs_differ_in_everything_that_is_declared():
    base = {"axes": [["dp", 2], ["tp", 2]]}
    specs = [
        base,
        {"axes": [["tp", 2], ["dp", 2]]},
        {**base, "combined": {"c": ["dp"]}},
        {**base, "views": {"v": {"over": ["dp"], "axes": {"a": 2}}}},
        {**base, "views": {"v": {"over": ["tp"], "axes": {"a": 2}}}},
        {**base, "roles": {"data": ["dp"]}},
        {**base, "rank_offset": 4},
    ]
    assert len({dm.TopologySpec.from_dict(spec) for spec in specs}) == len(specs)


def test_a_spec_is_frozen():
    spec = dm.TopologySpec({"dp": 2})
    with pytest.raises(AttributeError):
        spec.rank_offset = 3
    spec.axes["dp"] = 5
    assert spec.axes == {"dp": 2}


def test_sizes_of_any_integer_type_become_ints():
    spec = dm.TopologySpec({"dp": np.int64(2)}, views={"v": dm.View("dp", {"a": np.int8(2)})}, rank_offset=np.uint8(4))
    data = spec.to_dict()
    assert json.dumps(data) == (
        '{"axes": [["dp", 2]], "views": [["v", {"over": ["dp"], "axes": [["a", 2]]}]], "rank_offset": 4}'
    )
    assert spec == dm.TopologySpec({"dp": 2}, views={"v": {"over": "dp", "axes": {"a": 2}}}, rank_offset=4)


def test_one_name_stands_for_a_tuple_of_one():
    assert dm.TopologySpec({"dp": 2}, {"c": "dp"}) == dm.TopologySpec({"dp": 2}, {"c": ["dp"]})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "'axes' is missing"),
        ([("dp", 2)], "must map names to values, found list"),
        ({"axes": {"dp": 2}, "rolse": {}}, "unknown key 'rolse'. Keys: axes.* Did you mean 'roles'"),
        ({"axes": [2, 2]}, "axes must map names to values, found list"),
        ({"axes": {"dp": 2}, "views": {"v": {"over": ["dp"]}}}, "view 'v': 'axes' is missing. Keys: over, axes"),
        ({"axes": {"dp": 2}, "views": {"v": {"over": "dp", "axis": {}}}}, "view 'v': unknown key 'axis'.*'axes'"),
        ({"axes": {"dp": 2}, "views": {"v": 3}}, "view 'v' must map names to values, found int 3"),
        ({"axes": {"dp": 2}, "combined": {"c": 3}}, "a name or a list of names, found 3"),
    ],
)
def test_data_that_is_no_spec_is_refused_with_what_is_known(data, message):
    with pytest.raises(SpecError, match=message):
        dm.TopologySpec.from_dict(data)
