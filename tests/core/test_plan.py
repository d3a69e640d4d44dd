import json
import pickle
from typing import NamedTuple

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.arrays.plan import ShardingPlan
from dualmesh.errors import ArgumentError, ShardingError

TOPOLOGY = dm.parallel_spec(dp_shard_size=2, ulysses_size=2, tp_size=2, ep_size=4).resolve(8)


class Shaped(NamedTuple):
    """A named tuple of arrays, as optimizer states are."""

    mu: object
    nu: object


def model(layers=2):
    """Return a nested tree of arrays."""
    return {
        "embed": np.zeros((32, 8)),
        "layers": [
            {"attn": {"wq": np.zeros((8, 16)), "wo": np.zeros((16, 8))}, "norm": np.zeros(8)} for _ in range(layers)
        ],
        "experts": (np.zeros((4, 8, 6)),),
        "step": 3,
    }


PLAN = ShardingPlan(
    {
        "layers.0.attn.wo": dm.P(),
        "layers.*.attn.w*": dm.P("dp_shard_sp", "tp"),
        "**.norm": dm.P(),
        "experts.*": dm.P("ep", "ep_fsdp", "tp"),
        "embed": ("vocab", "embed"),
    },
    rules={"vocab": "tp", "embed": ("dp_shard", "ulysses")},
)


def test_the_first_pattern_that_matches_gives_the_spec():
    specs = PLAN.specs(model(), TOPOLOGY)
    attention = {"wq": dm.P("dp_shard_sp", "tp"), "wo": dm.P("dp_shard_sp", "tp")}
    assert specs == {
        "embed": dm.P("tp", ("dp_shard", "ulysses")),
        "layers": [
            {"attn": attention | {"wo": dm.P()}, "norm": dm.P()},
            {"attn": attention, "norm": dm.P()},
        ],
        "experts": (dm.P("ep", "ep_fsdp", "tp"),),
        "step": dm.P(),
    }


def test_dotted_names_nested_trees_and_key_paths_get_the_same_specs():
    flat = {"layers.0.attn.wq": np.zeros((8, 16)), "layers.1.norm": np.zeros(8)}
    plan = ShardingPlan({"layers.*.attn.wq": dm.P(None, "tp"), "layers.*.norm": dm.P("tp")})
    nested = {"layers": [{"attn": {"wq": flat["layers.0.attn.wq"]}}, {"norm": flat["layers.1.norm"]}]}
    keys = [(("layers", 0, "attn", "wq"), (8, 16)), (iter(("layers", 1, "norm")), (8,))]
    assert plan.specs(flat) == plan.resolve(keys) == {"layers.0.attn.wq": dm.P(None, "tp"), "layers.1.norm": dm.P("tp")}
    assert plan.specs(nested) == {"layers": [{"attn": {"wq": dm.P(None, "tp")}}, {"norm": dm.P("tp")}]}
    assert plan.spec_of(("layers", 7, "norm"), (8,), TOPOLOGY) == dm.P("tp")


def test_containers_keep_their_types_and_nones():
    tree = [Shaped({"w": np.zeros(4)}, None), (np.zeros(4),)]
    specs = ShardingPlan({"**": dm.P("tp")}).specs(tree, TOPOLOGY)
    assert specs == [Shaped({"w": dm.P("tp")}, None), (dm.P("tp"),)]
    assert type(specs[0]) is Shaped


def test_one_error_says_everything_that_is_wrong():
    plan = ShardingPlan(
        {
            "layers.*.attn.wq": dm.P("tpp", "dp_shard"),
            "layers.**": dm.P("tp", "dp_shard_sp"),
            "layers.1.norm": dm.P(),
            "layer.*.mlp": dm.P("tp"),
            "experts.*": dm.P("ep", "dp_shard", ("ulysses", "dp_shard_sp")),
        }
    )
    tree = model()
    tree["layers"][0]["attn"]["wo"] = np.zeros((15, 6))
    with pytest.raises(ShardingError) as caught:
        plan.specs(tree, TOPOLOGY)
    problems = caught.value.problems
    assert str(caught.value).startswith(f"ShardingPlan: {len(problems)} problems.\n  - ")
    expected = [
        "no pattern matches, and the plan has no default: embed.",
        "no axis 'tpp'. Axes: pp, dp_replicate, dp_shard",
        "Did you mean 'tp'? Needed by: layers.0.attn.wq, layers.1.attn.wq.",
        "dim 0 of shape (15, 6) has size 15, which 'tp' of size 2 does not divide: layers.0.attn.wo.",
        "dim 1 of shape (15, 6) has size 6, which 'dp_shard_sp' of size 4 does not divide: layers.0.attn.wo.",
        "pattern 'layers.**' gives P('tp', 'dp_shard_sp'): 2 entries for shape (8,), which has 1 dim: layers.0.norm, "
        "layers.1.norm.",
        "axes 'ep' and 'dp_shard' share ranks, an array can be split by one of them: experts.0.",
        "axes 'dp_shard' and 'dp_shard_sp' share ranks",
        "axes 'ulysses' and 'dp_shard_sp' share ranks",
        "pattern 'layer.*.mlp' matches nothing.",
        "pattern 'layers.1.norm' gets nothing: the first match counts, and 'layers.**' is listed before it.",
    ]
    assert [text for text in expected if not any(text in problem for problem in problems)] == []
    assert sum("experts.0" in problem for problem in problems) == 5
    assert not any("wq" in problem for problem in problems if "tpp" not in problem)


def test_many_parameters_with_one_fault_share_a_line():
    plan = ShardingPlan({"layers.*.norm": dm.P("tp", "dp")}, default=dm.P())
    with pytest.raises(ShardingError, match=r"norm, layers\.1\.norm.* and 95 more\.$") as caught:
        plan.specs(model(100))
    assert len(caught.value.problems) == 1


def test_without_a_topology_only_what_needs_none_is_checked():
    plan = ShardingPlan({"w": dm.P("nowhere")})
    assert plan.spec_of("w", (3,)) == dm.P("nowhere")
    with pytest.raises(ShardingError, match=r"1 entry for shape \(\), which has 0 dims: w"):
        plan.spec_of("w", ())
    with pytest.raises(ShardingError, match="no axis 'nowhere'"):
        plan.spec_of("w", (3,), TOPOLOGY)


def test_a_default_serves_what_no_pattern_matches():
    plan = ShardingPlan({"a": dm.P("tp")}, default=dm.P(None, "dp_shard"))
    assert plan.specs({"a": np.zeros(2), "b": np.zeros((2, 2))}) == {"a": dm.P("tp"), "b": dm.P(None, "dp_shard")}
    plan = ShardingPlan({}, rules={"x": "tp"}, default=("x", None))
    assert plan.specs({"b": np.zeros((2, 2))}) == {"b": dm.P("tp")}


def test_scalars_need_no_pattern():
    assert ShardingPlan({}).specs({"count": np.int32(3), "rate": 0.1}) == {"count": dm.P(), "rate": dm.P()}
    assert ShardingPlan({}, default=dm.P("tp")).specs({"count": np.zeros(())}) == {"count": dm.P()}


def test_names_from_the_model_are_translated_where_no_pattern_matches():
    plan = ShardingPlan({"a": dm.P()}, rules={"heads": "tp"}, default=dm.P())
    tree = {"a": np.zeros((2, 2)), "b": np.zeros((2, 2)), "c": np.zeros(2)}
    names = {"a": ("heads", None), "b": (None, "heads")}
    assert plan.specs(tree, names=names) == {"a": dm.P(), "b": dm.P(None, "tp"), "c": dm.P()}
    assert plan.resolve([("a", (2,)), ("b", (2, 2), ["heads", "x"])]) == {"a": dm.P(), "b": dm.P("tp")}
    with pytest.raises(ShardingError, match=r"logical names \('heads',\), but the plan has no rules: w"):
        ShardingPlan({}).spec_of("w", (2,), names=("heads",))


def test_rules_see_which_axes_share_ranks():
    plan = ShardingPlan({"w": ("expert", "embed")}, rules=[("expert", "ep"), ("embed", "dp_shard"), ("embed", "tp")])
    assert plan.spec_of("w", (4, 4), TOPOLOGY) == dm.P("ep", "tp")


def test_leaves_that_are_no_arrays_are_refused_by_path():
    with pytest.raises(ShardingError, match=r"a str is no array: it has no shape.*: a\.b, c") as caught:
        ShardingPlan({"**": dm.P()}).specs({"a": {"b": "text"}, "c": "more", "d": len})
    assert len(caught.value.problems) == 2


def test_two_arrays_with_one_path_are_refused():
    with pytest.raises(ShardingError, match=r"two arrays have the same path: a\.b"):
        ShardingPlan({"**": dm.P()}).specs({"a.b": np.zeros(2), "a": {"b": np.zeros(3)}})


def test_plans_are_values():
    again = ShardingPlan(dict(PLAN.patterns), rules=PLAN.rules)
    assert again == PLAN
    assert hash(again) == hash(PLAN)
    assert {PLAN: 1}[pickle.loads(pickle.dumps(PLAN))] == 1
    other_order = ShardingPlan(dict(reversed(PLAN.patterns)), rules=PLAN.rules)
    assert other_order != PLAN
    with pytest.raises(AttributeError):
        PLAN.default = dm.P()


@pytest.mark.parametrize(
    "plan", [PLAN, ShardingPlan({}, default=dm.P(("a", "b"), None)), ShardingPlan({}, {"x": None}, default=("x",))]
)
def test_plans_survive_plain_data_and_repr(plan):
    assert ShardingPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert eval(repr(plan), {"ShardingPlan": ShardingPlan, "P": dm.P}) == plan


def test_plain_data_is_short_to_write():
    data = {"patterns": [{"*.w": [["dp", "tp"], None]}, {"b": {"names": ["x"]}}], "rules": {"x": ["dp", "tp"]}}
    assert ShardingPlan.from_dict(data) == ShardingPlan(
        {"*.w": dm.P(("dp", "tp")), "b": ("x",)}, rules={"x": ("dp", "tp")}
    )
    with pytest.raises(ShardingError, match=r"'pattern' is unknown\. Keys: patterns, rules, default"):
        ShardingPlan.from_dict({"pattern": {}})
    with pytest.raises(ShardingError, match="'patterns' is missing"):
        ShardingPlan.from_dict({})


def test_the_table_shows_every_parameter_and_its_part():
    table = PLAN.table(model(1) | {"layers": [model(1)["layers"][0]] * 2}, TOPOLOGY)
    lines = table.splitlines()
    assert lines[0].split() == ["path", "shape", "spec", "per", "rank"]
    assert "layers.1.attn.wq  (8, 16)    P('dp_shard_sp', 'tp')" in table
    assert next(line for line in lines if line.startswith("experts.0")).endswith("(1, 8, 3)")
    assert len(lines) == 10


def test_str_shows_patterns_default_and_rules():
    assert str(ShardingPlan({"a.*": ("x",)}, {"x": ("dp", "tp")}, default=dm.P())) == (
        "pattern       gets\na.*           ('x',)\n(no pattern)  P()\n\nrule          axes\nx             ('dp', 'tp')"
    )


def test_malformed_plans_are_refused():
    with pytest.raises(ShardingError, match="'a' is listed twice"):
        ShardingPlan([("a", dm.P()), ("a", dm.P("tp"))])
    with pytest.raises(ShardingError, match="'a' gives logical names, but there are no rules"):
        ShardingPlan({"a": ("embed",)})
    with pytest.raises(ShardingError, match=r"pattern 'a' gives P\(partial=\('tp',\)\).*leave `partial` out"):
        ShardingPlan({"a": dm.P(partial="tp")})
    with pytest.raises(ShardingError, match="A partition spec was expected, found 'tp'"):
        ShardingPlan({"a": "tp"})
    with pytest.raises(ArgumentError, match=r"Pattern 'a\.\.b'"):
        ShardingPlan({"a..b": dm.P()})
