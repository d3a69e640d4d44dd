"""What an axis does is read from roles; roles that contradict each other are refused."""

import pytest

import dualmesh as dm
from dualmesh import importers, presets
from dualmesh.errors import SpecError
from dualmesh.lanes import lane_of
from dualmesh.roles import param_axes, replica_axes, token_axes

TOKENS = {"data": "dp", "loss": ("dp", "cp"), "sequence": "cp"}
SIZES = {"dp": 2, "cp": 2, "tp": 2}
EDP = {"edp": 2, "ep": 2}


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({**TOKENS, "params": "dp"}, "tokens differ along 'cp' \\(role 'sequence'\\).*no gradient is summed over it"),
        ({"loss": ("dp", "cp"), "params": "dp"}, "tokens differ along 'cp' \\(role 'loss'\\)"),
        ({"loss": ("dp", "cp"), "params": "cp", "replicate": "tp"}, "tokens differ along 'dp'"),
        ({"data": ("dp", "cp"), "params": "dp"}, "tokens differ along 'cp' \\(role 'data'\\)"),
        ({"data": ("dp", "cp"), "loss": "dp"}, "'cp' \\(role 'data'\\), but role 'loss' leaves it out"),
        ({"sequence": "cp", "loss": "dp"}, "'cp' \\(role 'sequence'\\), but role 'loss' leaves it out"),
        ({"loss": "dp", "params": ("dp", "tp")}, "summed over 'tp' \\(role 'params'\\), along which no tokens differ"),
        ({"loss": "dp", "params": "dp", "replicate": "cp"}, "summed over 'cp' \\(role 'replicate'\\)"),
        ({"loss": "world", "params": ("dp", "cp")}, "tokens differ along 'world'"),
    ],
)
def test_roles_by_which_gradients_would_miss_tokens_are_refused(roles, message):
    """Tokens differ along an axis exactly where gradients are summed over it."""
    with pytest.raises(SpecError, match=f"(?s){message}"):
        dm.TopologySpec(SIZES, roles=roles).resolve(8)


@pytest.mark.parametrize(
    ("sizes", "views", "roles"),
    [
        (SIZES, {}, {**TOKENS, "params": ("dp", "cp")}),
        (SIZES, {}, {**TOKENS, "params": "cp", "replicate": "dp"}),
        (SIZES, {}, TOKENS),
        ({**SIZES, "cp": 1}, {}, {**TOKENS, "params": "dp"}),
        (SIZES, {"v": dm.View(("dp", "cp"), {"x": 4})}, {**TOKENS, "params": "x"}),
        (SIZES, {"v": dm.View(("dp", "cp"), {"x": 4})}, {"loss": "x", "params": ("dp", "cp")}),
        (SIZES, {"v": dm.View(("dp", "cp"), {"x": 2, "y": 2})}, {"loss": ("x", "y"), "params": "y", "replicate": "x"}),
    ],
)
def test_roles_that_agree_resolve_whatever_names_they_use(sizes, views, roles):
    """Ranks count, not names: a view's axes may stand for base axes, and axes of size 1 for nothing."""
    spec = dm.TopologySpec(sizes, views=views, roles=roles)
    assert set(token_axes(spec.resolve(2 * 2 * sizes["cp"]))) == {name for name in ("dp", "cp") if sizes[name] > 1}


def test_a_view_that_leaves_out_tokens_is_refused_unless_it_says_its_copies():
    """Experts sharded over a view must span every token axis, or have copies along it."""
    whole = {**TOKENS, "params": ("dp", "cp")}
    for over, sizes in (("dp", {"edp": 2, "ep": 1}), ("cp", {"edp": 1, "ep": 2}), (("cp", "tp"), EDP)):
        views = {"expert": dm.View(over, sizes, {"params": "edp"})}
        with pytest.raises(SpecError, match="view 'expert', whose parameters are sharded over edp, neither spans it"):
            dm.TopologySpec(SIZES, views=views, roles=whole).resolve(8)
    said = dm.View("dp", {"edp": 2, "ep": 1}, {"params": "edp", "replicate": "cp"})
    assert replica_axes(dm.TopologySpec(SIZES, views={"e": said}, roles=whole).resolve(8), "e") == ("cp",)
    with pytest.raises(SpecError, match="tokens differ along 'ulysses'"):
        dm.parallel_spec(dp_shard_size=2, ulysses_size=2, ep_size=2, ep_over=("dp_shard",)).resolve(4)


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"parms": "edp"}, "role 'parms' of view 'v' is unknown.*Did you mean 'params'"),
        ({"params": "dp"}, "role 'params' of view 'v' names 'dp', no axis of that view. Axes: edp, ep"),
        ({"experts": "nope"}, "role 'experts' of view 'v' names the axis 'nope'"),
    ],
)
def test_view_roles_that_mean_nothing_are_refused(roles, message):
    """Roles of a view are known ones, of its own axes."""
    with pytest.raises(SpecError, match=f"(?s){message}"):
        dm.TopologySpec({"dp": 4}, views={"v": dm.View("dp", EDP, roles)}).resolve(4)


@pytest.mark.parametrize("name", ["ep_fsdp", "edp", "efsdp", "expert_dp", "expert_shard", "zz", "tp_replicate"])
def test_the_lane_of_a_view_axis_is_said_by_its_role(name):
    """Spelt in any way, an axis is in lane "param" where the view says that it shards parameters, else in "data"."""
    for roles, lane in (({"params": name}, "param"), ({"replicate": name}, "param"), ({}, "data")):
        view = dm.View("dp", {name: 2, "ep": 2}, roles)
        assert lane_of(dm.TopologySpec({"dp": 4}, views={"v": view}).resolve(4), name) == lane


def test_presets_say_which_axes_shard_experts():
    """Every layout with experts names the lane "param" axis of its view, as before roles said so."""
    torchtitan = presets.torchtitan(dp_shard=4, ep=2).resolve(4)
    megatron = presets.megatron(ep=2, etp=1, dp=4).resolve(4)
    deepspeed = importers.deepspeed({"zero_optimization": {"stage": 3}}, ep=2).resolve(4)
    usual = dm.parallel_spec(dp_shard_size=4, ep_size=2).resolve(4)
    for topology, view, axis in (
        (torchtitan, "sparse", "efsdp"),
        (megatron, "expert", "expert_dp"),
        (deepspeed, "expert", "edp"),
        (usual, "ep", "ep_fsdp"),
    ):
        assert param_axes(topology, view) == (axis,)
        assert (lane_of(topology, axis), lane_of(topology, "ep")) == ("param", "data")


def test_view_roles_are_part_of_the_text_and_the_data_of_a_spec():
    """Text and plain data keep them."""
    spec = dm.TopologySpec({"dp": 4}, views={"v": dm.View("dp", EDP, {"params": "edp", "experts": "ep"})})
    assert spec.to_text() == "dp4 | v: edp2 ep2 @experts = ep @params = edp"
    assert dm.TopologySpec.from_text(spec.to_text()) == spec
    assert dm.TopologySpec.from_dict(spec.to_dict()) == spec
    assert spec.resolve(4).spec.views["v"].roles == {"experts": ("ep",), "params": ("edp",)}
