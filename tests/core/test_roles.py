"""What an axis does is read from roles; roles that contradict each other are refused."""

import pytest

import dualmesh as dm
from dualmesh import importers, presets
from dualmesh.cli.traffic import Model, bytes_held, traffic
from dualmesh.config import StateConfig
from dualmesh.errors import SpecError
from dualmesh.topology.communicators import lane_of
from dualmesh.topology.roles import param_axes, replica_axes, stage_axes, token_axes

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


@pytest.mark.parametrize(
    ("spec", "view", "sequence"),
    [
        (importers.deepspeed({"sequence_parallel_size": 2}, ep=2), "expert", "sp"),
        (importers.deepspeed({"sequence_parallel_size": 2, "zero_optimization": {"stage": 3}}, ep=2), "expert", "sp"),
        (
            dm.TopologySpec(
                {"dp": 4, "seq": 2},
                {"copies": "seq"},
                {"v": dm.View("dp", EDP, {"params": "edp", "replicate": "copies"})},
                {"data": "dp", "loss": ("dp", "seq"), "params": ("dp", "seq"), "sequence": "seq"},
            ),
            "v",
            "seq",
        ),
    ],
)
def test_copies_of_experts_along_a_sequence_axis_have_a_lane_beside_that_of_attention(spec, view, sequence):
    """Hooks sum experts' gradients over the ranks that code sends a sequence to: never on one communicator."""
    topology = spec.resolve(8)
    (copies,) = replica_axes(topology, view)
    assert topology.layout(copies) == topology.layout(sequence)
    assert (lane_of(topology, copies), lane_of(topology, sequence)) == ("param", "data")


def test_view_roles_are_part_of_the_text_and_the_data_of_a_spec():
    """Text and plain data keep them."""
    spec = dm.TopologySpec({"dp": 4}, views={"v": dm.View("dp", EDP, {"params": "edp", "experts": "ep"})})
    assert spec.to_text() == "dp4 | v: edp2 ep2 @experts = ep @params = edp"
    assert dm.TopologySpec.from_text(spec.to_text()) == spec
    assert dm.TopologySpec.from_dict(spec.to_dict()) == spec
    assert spec.resolve(4).spec.views["v"].roles == {"experts": ("ep",), "params": ("edp",)}


STAGED = {"stage": 2, "dp": 2, "tp": 2}


@pytest.mark.parametrize(
    ("combined", "views", "roles", "message"),
    [
        ({}, {}, {"data": "stage"}, "names 'stage', which shares ranks with 'stage' \\(role 'data'\\)"),
        ({}, {}, {"loss": "world"}, "shares ranks with 'world' \\(role 'loss'\\)"),
        ({}, {}, {"params": "stage", "loss": "stage"}, "\\(role 'params'\\)"),
        ({}, {}, {"replicate": ("stage", "dp")}, "\\(role 'replicate'\\)"),
        ({}, {}, {"sequence": "stage"}, "\\(role 'sequence'\\)"),
        ({"both": ("stage", "dp")}, {}, {"data": "both"}, "shares ranks with 'both' \\(role 'data'\\)"),
        ({}, {"v": dm.View(("stage", "dp"), {"x": 2, "y": 2})}, {"data": "x"}, "shares ranks with 'x'"),
        ({}, {"v": dm.View(("stage", "dp"), {"x": 4}, {"params": "x"})}, {}, "role 'params' of view 'v'"),
        ({}, {"v": dm.View(("stage", "dp"), {"x": 2, "y": 2}, {"experts": "x"})}, {}, "role 'experts' of view 'v'"),
        ({}, {"v": dm.View("dp", {"x": 2}, {"params": "x", "replicate": "stage"})}, {}, "role 'replicate' of view 'v'"),
        ({}, {}, {"stages": "stagee"}, "role 'stages' names the axis 'stagee', not declared.*Did you mean 'stage'"),
        ({}, {}, {"stage": "stage"}, "role 'stage' is unknown. Roles: .*, stages.*Did you mean 'stages'"),
    ],
)
def test_stages_that_carry_tokens_or_shard_parameters_are_refused(combined, views, roles, message):
    """Along stages layers differ and tokens do not, whichever of two axes of the same ranks is named."""
    with pytest.raises(SpecError, match=f"(?s){message}"):
        dm.TopologySpec(STAGED, combined, views, {"stages": "stage", **roles}).resolve(8)


@pytest.mark.parametrize(
    ("sizes", "views", "stages", "expected"),
    [
        (STAGED, {}, "stage", ("stage",)),
        ({"a": 2, "dp": 2, "b": 2}, {}, ("a", "b"), ("a", "b")),
        ({"a": 2, "dp": 2, "b": 2}, {}, "pipeline", ("a", "b")),
        ({"a": 4, "dp": 2, "b": 1}, {"v": dm.View("a", {"x": 2, "y": 2})}, "x", ("x",)),
        ({"a": 1, "dp": 4, "b": 2}, {}, ("a", "b"), ("b",)),
        ({"a": 2, "dp": 2, "b": 2}, {}, (), ()),
    ],
)
def test_stages_are_the_axes_of_that_role_however_they_are_spelt(sizes, views, stages, expected):
    """One axis, several, a combined one or one of a view; those of size 1 have no stages."""
    combined = {"pipeline": ("a", "b")} if "a" in sizes else {}
    spec = dm.TopologySpec(sizes, combined, views, {"data": "dp", "loss": "dp", "stages": stages})
    assert stage_axes(spec.resolve(8)) == expected


def test_rank_groups_may_be_stages_unless_lists_of_tokens_join_two_of_one_pipeline():
    """Lists have no digits: two ranks of one pipeline must not be in one list of data."""
    pipelines, across = dm.RankGroups([(0, 4), (1, 5)]), dm.RankGroups([(0, 1), (4, 5)])
    topology = dm.GroupSpec({"way": pipelines, "dp": across}, roles={"stages": "way", "data": "dp"}).resolve(6)
    assert stage_axes(topology) == ("way",)
    mixed = dm.RankGroups([(0, 1, 4)])
    with pytest.raises(SpecError, match="names 'way', which shares ranks with 'dp' \\(role 'data'\\)"):
        dm.GroupSpec({"way": pipelines, "dp": mixed}, roles={"stages": "way", "data": "dp"}).resolve(6)


@pytest.mark.parametrize(
    "spec",
    [
        dm.parallel_spec(pp_size=2, dp_shard_size=-1),
        presets.torchtitan(pp=2),
        presets.nemo_rl(pp=2),
        presets.megatron(pp=2),
        presets.megatron(pp=2, etp=1, ep=2, tp=2, order="tp-ep-pp-dp"),
        importers.torchtitan({"pipeline_parallel_degree": 2}),
        importers.megatron({"pipeline_model_parallel_size": 2}),
        importers.deepspeed({"pipeline": {"stages": 2}}),
        StateConfig.of({"pp": 2, "dp_shard": 4}).topology_spec(),
        StateConfig.of({"spec": "stage2 x4 | @data = x | @loss = x | @stages = stage"}).topology_spec(),
        StateConfig.of({"axes": [["stage", 2], ["x", 4]], "roles": {"stages": "stage"}}).topology_spec(),
    ],
)
def test_every_layout_with_stages_says_so_and_keeps_it_in_text_and_data(spec):
    """Presets, importers, sizes and files set the role; text and plain data carry it."""
    stages = spec.roles["stages"]
    topology = spec.resolve(8)
    assert topology.role("stages") == stages == stage_axes(topology)
    assert topology.size(stages) == 2
    assert f"| @stages = {stages[0]}" in spec.to_text()
    assert dm.TopologySpec.from_text(spec.to_text()) == spec == dm.TopologySpec.from_dict(spec.to_dict())


def test_a_written_form_that_does_not_say_stages_has_none():
    """Text from before the role is read as it stands: an axis is no stage by its name."""
    topology = dm.TopologySpec.from_text("pp2 dp4 | @data = dp | @loss = dp").resolve(8)
    assert stage_axes(topology) == ()
    with pytest.raises(SpecError, match=r"does not say which axes play the role 'stages'.*roles={'stages'"):
        topology.role("stages")
    assert "role stages: none -> (pp)" in topology.diff(
        dm.TopologySpec({"pp": 2, "dp": 4}, roles={"data": "dp", "loss": "dp", "stages": "pp"}).resolve(8)
    )


RENAMED = {"pp": "tp", "dp_shard": "pp", "ulysses": "ulysses", "cp": "dp", "tp": "cp", "ep": "x", "ep_fsdp": "ep"}
MODEL = Model(9e6, 64, 2, expert_parameters=6e6, experts_per_token=2)


def test_the_planner_counts_by_roles_whatever_axes_are_called():
    """Stages, experts and tensor parallel axes under each other's names send and hold what the usual ones do."""
    sizes = {"pp": 2, "dp_shard": 2, "ulysses": 2, "cp": 2, "tp": 2}
    shards = ("dp_shard", "ulysses", "cp")

    def written(names):
        called = {name: names.get(name, name) for name in (*sizes, "ep", "ep_fsdp")}
        tokens = tuple(called[name] for name in shards)
        view = dm.View(
            tokens, {called["ep_fsdp"]: 4, called["ep"]: 2}, {"experts": called["ep"], "params": called["ep_fsdp"]}
        )
        roles = {"data": tokens[0], "params": tokens, "loss": tokens, "sequence": tokens[1:], "stages": called["pp"]}
        return dm.TopologySpec({called[name]: size for name, size in sizes.items()}, {}, {"v": view}, roles).resolve(32)

    usual = dm.parallel_spec(pp_size=2, dp_shard_size=2, ulysses_size=2, cp_size=2, tp_size=2, ep_size=2).resolve(32)
    plain, renamed = written({}), written(RENAMED)
    expected = [(one.work, one.times, one.sent) for one in traffic(usual, MODEL)]
    assert len(expected) == 10
    for topology in (plain, renamed):
        assert [(one.work, one.times, one.sent) for one in traffic(topology, MODEL)] == expected
        assert bytes_held(topology, MODEL) == bytes_held(usual, MODEL)
    axes = {one.work: one.axis for one in traffic(renamed, MODEL)}
    assert axes["hand activations on, and their gradients back"] == "tp"
    assert (axes["send tokens to experts and back"], axes["add partial activations"]) == ("x", "cp")
