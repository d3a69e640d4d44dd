import itertools

import pytest

import dualmesh as dm
from dualmesh.errors import ShardingError
from dualmesh.sharding.logical_axes import rules_of, spec_by_rules

FLAX_EXAMPLE = (("batch", "X"), ("features", "X"), ("heads", "Y"), ("batch", "Z"))


def test_the_example_of_flax_gives_what_flax_says():
    names = ("batch", "length", "heads", "features")
    assert spec_by_rules(names, FLAX_EXAMPLE) == dm.P("X", None, "Y", None)


@pytest.mark.parametrize("names", list(itertools.permutations(("batch", "heads", "features", None))))
def test_precedence_is_that_of_the_rules_not_of_the_dims(names):
    entries = {"batch": "X", "heads": "Y"}
    assert spec_by_rules(names, FLAX_EXAMPLE) == dm.P(*(entries.get(name) for name in names))


def test_a_later_rule_serves_a_dim_whose_first_axis_is_taken():
    rules = [("batch", "X"), ("features", "X"), ("features", ("X", "Y")), ("features", "Z")]
    assert spec_by_rules(("features", "batch"), rules) == dm.P("Z", "X")
    assert spec_by_rules(("features",), rules) == dm.P("X")


def test_none_is_a_rule_that_keeps_a_dim_whole():
    rules = [("embed", None), ("embed", "X"), ("heads", "X")]
    assert spec_by_rules(("embed", "heads"), rules) == dm.P(None, "X")
    assert spec_by_rules(("embed",), [("embed", ()), ("embed", "X")]) == dm.P()


def test_names_without_a_rule_and_dims_without_a_name_stay_whole():
    assert spec_by_rules((None, "unknown", "a"), {"a": ["X", "Y"], "b": "Z"}) == dm.P(None, None, ("X", "Y"))
    assert spec_by_rules((), {"a": "X"}) == dm.P()


def test_with_a_topology_axes_that_share_ranks_are_the_same_axis():
    topology = dm.parallel_spec(dp_shard_size=2, ulysses_size=2, tp_size=2, ep_size=2).resolve(8)
    rules = [("expert", "ep"), ("embed", "dp_shard_sp"), ("embed", "ep_fsdp"), ("mlp", "tp")]
    names = ("expert", "embed", "mlp")
    assert spec_by_rules(names, rules, topology) == dm.P("ep", "ep_fsdp", "tp")
    assert spec_by_rules(names, rules) == dm.P("ep", "dp_shard_sp", "tp")
    assert spec_by_rules(names[1:], rules, topology) == dm.P("dp_shard_sp", "tp")


def test_malformed_rules_and_names_are_refused():
    with pytest.raises(ShardingError, match=r"\('a', 'X', 'Y'\) is no rule"):
        rules_of([("a", "X", "Y")])
    with pytest.raises(ShardingError, match="'ab' is no rule"):
        rules_of(["ab"])
    with pytest.raises(ShardingError, match="3 is no entry"):
        rules_of({"a": 3})
    with pytest.raises(ShardingError, match=r"'a' names 2 dims"):
        spec_by_rules(("a", None, "a"), {"a": "X"})
    with pytest.raises(ShardingError, match=r"\('a', 'b'\) is no name"):
        spec_by_rules((("a", "b"), None), {"a": "X"})
