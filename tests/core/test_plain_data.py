"""Plain data survives tools that sort keys: what is written is read back equal, or refused by name."""

import dataclasses
import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import dualmesh as dm
from dualmesh._support.plain_data import forms_of, may_be_sorted, read_fields, stands_as, write_fields
from dualmesh.config import Configuration, StateConfig
from dualmesh.errors import DualmeshError, ShardingError, SpecError
from dualmesh.topology.federation_axes import FederatedGroups
from dualmesh.topology.spec import View
from tests.core.any_topology import examples
from tests.core.test_notation import specs

AXES = ["zz", "b", "aa", "B", "a2", "a10"]


def json_sorted(data):
    return json.loads(json.dumps(data, sort_keys=True))


def yaml_default(data):
    return yaml.safe_load(yaml.safe_dump(data))


def yaml_flow(data):
    return yaml.safe_load(yaml.safe_dump(data, default_flow_style=True, allow_unicode=True))


def keys_backwards(data):
    """Reverse the keys of every mapping, as another tool might."""
    if isinstance(data, dict):
        return {key: keys_backwards(data[key]) for key in reversed(data)}
    return [keys_backwards(item) for item in data] if isinstance(data, list) else data


TOOLS = [json_sorted, yaml_default, yaml_flow, keys_backwards]


@given(specs())
def test_a_spec_reads_back_equal_through_tools_that_sort_keys(spec):
    for tool in TOOLS:
        assert dm.TopologySpec.from_dict(tool(spec.to_dict())) == spec


@given(examples())
def test_a_topology_reads_back_with_the_same_groups(example):
    topology = example.spec.resolve(example.world_size)
    for tool in TOOLS:
        back = dm.TopologySpec.from_dict(tool(topology.spec.to_dict())).resolve(example.world_size)
        assert back == topology
        assert back.axis_names == topology.axis_names
        for axis in topology.axis_names:
            assert back.partition(axis).tolist() == topology.partition(axis).tolist()


@given(st.lists(st.sampled_from(AXES), min_size=1, unique=True), st.permutations(range(6)))
def test_rank_groups_read_back_equal(names, ranks):
    spec = dm.GroupSpec({name: [ranks[:3], ranks[3:]] for name in names}, roles={"loss": names[0], "data": names[-1]})
    for tool in TOOLS:
        assert dm.GroupSpec.from_dict(tool(spec.to_dict())) == spec


@given(st.dictionaries(st.sampled_from(["*", "z.*", "a.w", "**.b"]), st.sampled_from([dm.P("tp"), ("x", None)])))
def test_a_plan_reads_back_equal(patterns):
    plan = dm.ShardingPlan(patterns, rules={"x": ("tp", "dp"), "a": None}, default=dm.P(None, ("dp", "tp")))
    for tool in TOOLS:
        assert dm.ShardingPlan.from_dict(tool(plan.to_dict())) == plan


@given(st.lists(st.sampled_from(AXES), min_size=1, unique=True), specs())
def test_a_configuration_reads_back_equal_and_in_order(names, spec):
    states = {name: StateConfig(spec=spec, group_options={"timeout_s": 5, "is_high_priority": True}) for name in names}
    config = Configuration(states, world_size=8)
    for tool in TOOLS:
        back = Configuration.from_dict(tool(config.to_dict()))
        assert back == config
        assert list(back.states) == names


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(
    "spec",
    [
        dm.parallel_spec(pp_size=2, dp_size=2, ulysses_size=2, ep_size=2),
        dm.TopologySpec({"tp": 2, "dp": 2, "pp": 2}),
        dm.GroupSpec({"b": [[3, 0], [1, 2, 4]], "a": [[1, 0]]}),
        dm.FederatedSpec((5, 3)),
        dm.FederatedSpec((4, 4), 2),
    ],
)
def test_a_described_state_has_the_topology_that_was_described(spec, tool):
    plan = dm.ShardingPlan({"z": dm.P(), "**": dm.P()})
    with dm.session(backend="sim", world_size=8):
        state = dm.init_parallel_state(spec=spec)
        saved = tool(dm.describe(state, plan))
    assert dm.described(saved) == state.topology
    assert dm.ShardingPlan.from_dict(saved["plan"]) == plan


def test_the_first_format_is_read_where_its_order_can_be_known():
    with dm.session(backend="sim", world_size=4):
        saved = dm.describe(dm.init_parallel_state(spec=dm.TopologySpec({"tp": 2, "dp": 2})))
    old = {**saved, "format": 1, "spec": {"axes": {"tp": 2, "dp": 2}}}
    assert dm.described(old) == dm.described(saved)
    with pytest.raises(SpecError, match=r"axes is a mapping with its keys in sorted order \(dp, tp\)"):
        dm.described(json_sorted(old))
    with pytest.raises(SpecError, match=r"format 3\. .* format 1, 2"):
        dm.described({**saved, "format": 3})


@pytest.mark.parametrize(
    ("read", "data", "what", "error"),
    [
        (dm.TopologySpec.from_dict, {"axes": {"dp": 2, "pp": 2}}, r"axes: \[\['dp', 2\], \['pp', 2\]\]", SpecError),
        (dm.TopologySpec.from_dict, {"axes": {"a2": 2, "a10": 2}}, "axes .* sorted order", SpecError),
        (dm.TopologySpec.from_dict, {"axes": {"a": 2, "B": 2}}, "axes .* sorted order", SpecError),
        (
            dm.TopologySpec.from_dict,
            {"axes": [["a", 2]], "combined": {"x": "a", "y": "a"}},
            "combined .* sort",
            SpecError,
        ),
        (
            dm.TopologySpec.from_dict,
            {"axes": [["a", 4]], "views": [{"v": {"over": ["a"], "axes": {"x": 2, "y": 2}}}]},
            "view 'v': axes .* sort",
            SpecError,
        ),
        (dm.GroupSpec.from_dict, {"rank_groups": {"a": [[0]], "b": [[1]]}}, "rank_groups .* sort", SpecError),
        (dm.ShardingPlan.from_dict, {"patterns": {"**": [], "a": []}}, "patterns .* sort", ShardingError),
        (dm.ShardingPlan.from_dict, {"patterns": {}, "rules": {"a": "x", "b": "x"}}, "rules .* sort", ShardingError),
        (StateConfig.of, {"axes": {"dp": 2, "pp": 2}}, "axes .* sort", SpecError),
    ],
)
def test_a_mapping_that_a_tool_may_have_sorted_is_refused_with_the_pairs_to_write(read, data, what, error):
    with pytest.raises(error, match=what):
        read(data)


def test_a_mapping_out_of_sorted_order_and_one_of_one_name_are_read():
    pairs = [["tp", 2], ["dp", 4]]
    same = [{"axes": {"tp": 2, "dp": 4}}, {"axes": [{"tp": 2}, {"dp": 4}]}, {"axes": pairs}]
    assert {dm.TopologySpec.from_dict(data) for data in same} == {dm.TopologySpec({"tp": 2, "dp": 4})}
    assert dm.TopologySpec.from_dict({"axes": {"dp": 4}}) == dm.TopologySpec({"dp": 4})
    assert not may_be_sorted([])


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([["dp", 2], ["dp", 4]], "axes gives 'dp' twice"),
        ([["dp", 2, 3]], r"\['dp', 2, 3\] is no pair"),
        ([{"dp": 2, "tp": 4}], "is no pair"),
        ([[2, "dp"]], "the name 2. Names are strings"),
        ("dp", "found str 'dp'"),
    ],
)
def test_pairs_that_are_none_are_refused(pairs, message):
    with pytest.raises(SpecError, match=message):
        dm.TopologySpec.from_dict({"axes": pairs})


def test_states_in_sorted_order_need_a_default_to_be_registered():
    states = {"actor": {"dp_shard": -1}, "critic": {"dp": 2, "tp": 2}}
    with dm.session(backend="sim", world_size=4):
        with pytest.raises(SpecError, match=r"sorted order \(actor, critic\).*default: NAME"):
            Configuration.from_dict({"states": states}).init()
        Configuration.from_dict({"states": states, "default": "critic"}).init()
        assert dm.scope_name() == "critic"
    with dm.session(backend="sim", world_size=4):
        Configuration.from_dict({"states": [["critic", states["critic"]], {"actor": states["actor"]}]}).init()
        assert dm.scope_name() == "critic"


@pytest.mark.parametrize("kind", [View, dm.TopologySpec, dm.GroupSpec, dm.FederatedSpec])
def test_every_field_says_how_it_stands_in_plain_data(kind):
    assert set(forms_of(kind)) == {field.name for field in dataclasses.fields(kind)}


def test_a_field_that_does_not_say_is_an_error_and_not_lost():
    @dataclasses.dataclass(frozen=True)
    class Spec:
        size: int = stands_as("size")
        colour: str = "red"

    for lossy in (lambda: write_fields(Spec(2)), lambda: read_fields("Spec", Spec, {"size": 2})):
        with pytest.raises(TypeError, match="colour does not say"):
            lossy()


def test_what_one_line_or_settings_cannot_say_is_refused(monkeypatch):
    federation = dm.FederatedSpec((2, 2)).resolve(4).group_spec()
    with pytest.raises(SpecError, match="cannot be written as settings"):
        StateConfig(spec=federation).to_dict()
    with pytest.raises(DualmeshError, match=r"dm\.FederatedSpec\.from_dict"):
        FederatedGroups.from_dict(federation.to_dict())


def test_roles_have_no_order():
    one, other = ({"data": "dp", "loss": "dp"}, {"loss": "dp", "data": "dp"})
    assert dm.TopologySpec({"dp": 2}, roles=one) == dm.TopologySpec({"dp": 2}, roles=other)
    assert hash(dm.TopologySpec({"dp": 2}, roles=one)) == hash(dm.TopologySpec({"dp": 2}, roles=other))


@pytest.mark.parametrize("name", ["a\nb", "a\x85b", "a\x00", "\u2028"])
def test_names_that_tools_do_not_keep_are_refused(name):
    """PyYAML writes some of them and reads a space: neither written nor resolved."""
    for spec in (
        dm.TopologySpec({name: 2}),
        dm.TopologySpec({"dp": 2}, combined={"c": (name,)}),
        dm.TopologySpec({"dp": 2}, roles={"data": name}),
    ):
        with pytest.raises(SpecError, match="cannot be printed"):
            spec.to_dict()
    with pytest.raises(SpecError, match="cannot be printed"):
        dm.TopologySpec({name: 2}).resolve(2)
