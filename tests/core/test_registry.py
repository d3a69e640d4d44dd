import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import (
    ArgumentError,
    ScopeError,
    SpecError,
    StaleStateError,
    StateWarning,
    TakenNameError,
    UnknownStateError,
)
from dualmesh.runtime.registry import Registry
from dualmesh.runtime.single_process import single_process_state


def test_first_state_is_the_default_and_later_ones_leave_it(world):
    base = dm.init_parallel_state(dp_size=8)
    dm.init_parallel_state(tp_size=8, name="other")
    assert dm.get_parallel_state() is base


def test_equal_settings_under_two_names_are_one_state(world):
    base = dm.init_parallel_state(dp_size=8)
    assert dm.init_parallel_state(dp_shard_size=8, name="alias") is base
    assert dm.get_parallel_state_by_name("alias") is base
    assert base.names == ["base", "alias"]


@pytest.mark.parametrize(
    "setting", [{"dp_mode": "ddp"}, {"async_enabled": True}, {"own_groups": True}, {"group_options": {"timeout_s": 5}}]
)
def test_other_settings_on_one_topology_are_another_state(world, setting):
    base = dm.init_parallel_state(dp_size=8)
    other = dm.init_parallel_state(dp_size=8, name="other", **setting)
    assert other is not base
    assert other.topology == base.topology


def test_each_name_that_asks_for_groups_of_its_own_is_a_state_of_its_own(world):
    one, other = (dm.init_parallel_state(dp_size=8, name=name, own_groups=True) for name in ("one", "other"))
    both = dm.init_parallel_states({name: dm.parallel_spec(tp_size=8) for name in "ab"}, own_groups=True)
    assert one is not other
    assert both["a"] is not both["b"]
    assert [state.names for state in (one, other, *both.values())] == [["one"], ["other"], ["a"], ["b"]]
    with pytest.warns(StateWarning, match="'one' is already registered; it is returned as it is"):
        assert dm.init_parallel_state(dp_size=8, name="one", own_groups=True) is one


VIEW = {"v": dm.View("dp", {"x": 2, "y": 2})}
UNLIKE = [
    {"spec": dm.TopologySpec({"dp": 4, "tp": 2})},
    {"spec": dm.TopologySpec({"tp": 2, "dp": 4})},
    {"spec": dm.TopologySpec({"dp": 4, "tp": 2}), "ranks": (1, 0, 2, 3, 4, 5, 6, 7)},
    {"spec": dm.TopologySpec({"dp": 4, "tp": 2}), "group_options": {"timeout_s": 5}},
    {"spec": dm.TopologySpec({"dp": 4, "tp": 2}), "group_options": {"timeout_s": 5.5}},
    {"spec": dm.TopologySpec({"dp": 4, "tp": 2}), "group_options": {"is_high_priority": True}},
    {"spec": dm.TopologySpec({"dp": 4, "tp": 2}, roles={"data": "dp"})},
    {"spec": dm.TopologySpec({"dp": 4, "tp": 2}, roles={"data": ("dp", "tp")})},
    {"spec": dm.TopologySpec({"dp": 4, "tp": 2}, roles={"data": ("tp", "dp")})},
    {"spec": dm.TopologySpec({"dp": 4, "tp": 2}, {"a": ("dp", "tp"), "b": "tp"})},
    {"spec": dm.TopologySpec({"dp": 4, "tp": 2}, {"b": "tp", "a": ("dp", "tp")})},
    {"spec": dm.TopologySpec({"dp": 4, "tp": 2}, {"b": "tp", "a": ("tp", "dp")})},
    {"spec": dm.TopologySpec({"dp": 4, "tp": 2}, views=VIEW)},
    {"spec": dm.TopologySpec({"dp": 4, "tp": 2}, views={"w": VIEW["v"]})},
    {"spec": dm.TopologySpec({"dp": 4, "tp": 2}, views={"v": dm.View("dp", {"y": 2, "x": 2})})},
    {"spec": dm.GroupSpec({"g": [[0, 1], [2]]})},
    {"spec": dm.GroupSpec({"g": [[1, 0], [2]]})},
    {"spec": dm.GroupSpec({"g": [[2], [0, 1]]})},
    {"spec": dm.FederatedSpec((4, 4))},
    {"spec": dm.FederatedSpec((4, 4), 2)},
    {"spec": dm.FederatedSpec((4, 4), 4)},
]


def test_states_that_differ_in_anything_that_can_be_seen_are_not_one_state(world):
    states = [dm.init_parallel_state(**asked, name=f"s{place}") for place, asked in enumerate(UNLIKE)]
    assert len(set(map(id, states))) == len(UNLIKE)
    for place, asked in enumerate(UNLIKE):
        assert dm.init_parallel_state(**asked, name=f"again{place}") is states[place]


def test_looking_up_by_name_leaves_the_ambient_state(world):
    base = dm.init_parallel_state(dp_size=8)
    other = dm.init_parallel_state(tp_size=8, name="other")
    assert dm.get_parallel_state_by_name("other") is other
    assert dm.get_parallel_state() is base


def test_unknown_name_lists_the_names(world):
    dm.init_parallel_state(dp_size=8, name="thinker")
    with pytest.raises(
        UnknownStateError, match=r"'thniker' is not registered. Registered names: thinker. Did you mean 'thinker'"
    ):
        dm.get_parallel_state_by_name("thniker")


def test_taken_name_warns_and_returns_the_first_state(world):
    base = dm.init_parallel_state(dp_size=8)
    with pytest.warns(StateWarning, match=r"'base' is already registered as .*dp_shard=8.*; asked for now: .*tp=8"):
        assert dm.init_parallel_state(tp_size=8) is base
    with pytest.warns(StateWarning, match="'base' is already registered; it is returned as it is") as caught:
        assert dm.init_parallel_state(dp_size=8) is base
    assert [warning.filename for warning in caught] == [__file__]


def test_strict_refuses_a_taken_name_with_other_sizes_only(world):
    base = dm.init_parallel_state(dp_size=8)
    dm.strict(True)
    try:
        with pytest.raises(TakenNameError, match=r"asked for now: .*tp=8.* Use another name"):
            dm.init_parallel_state(tp_size=8)
        with pytest.warns(StateWarning):
            assert dm.init_parallel_state(dp_size=8) is base
    finally:
        dm.strict(False)


def test_strict_can_come_from_the_environment(world, monkeypatch):
    from dualmesh.runtime.registry import registry

    monkeypatch.setattr(registry, "_strict", None)
    monkeypatch.setenv("DUALMESH_STRICT", "1")
    dm.init_parallel_state(dp_size=8)
    with pytest.raises(TakenNameError):
        dm.init_parallel_state(tp_size=8)


def test_refused_init_registers_nothing(world):
    with pytest.raises(SpecError, match="multiply to 6, but the world has 8 ranks"):
        dm.init_parallel_state(dp_size=3, tp_size=2)
    with pytest.raises(UnknownStateError, match="Registered names: none"):
        dm.get_parallel_state_by_name("base")
    single_process_state.cache_clear()
    with pytest.warns(StateWarning, match="before any init"):
        state = dm.get_parallel_state()
    assert state.world_size == 1


def test_arrays_are_copies_before_any_init_too():
    """As with a state: the caller may fill its buffer anew at once."""
    single_process_state.cache_clear()
    with pytest.warns(StateWarning, match="before any init"):
        dm.get_parallel_state()
    for call in (lambda x: dm.distribute(x, dm.P()), lambda x: dm.shard_local(x, dm.P()), dm.to_numpy):
        buffer = np.arange(4.0)
        made = call(buffer)
        buffer[...] = -1
        assert made.tolist() == [0, 1, 2, 3]
    assert dm.distribute([1, 2], dm.P()).tolist() == [1, 2]


def test_the_warning_before_any_init_points_at_the_line_of_the_user():
    for ask in (dm.get_parallel_state, lambda: dm.ops.axis_size("tp")):
        single_process_state.cache_clear()
        with pytest.warns(StateWarning, match="before any init") as caught:
            ask()
        assert [warning.filename for warning in caught] == [__file__]


def test_several_states_register_all_or_none(world):
    with pytest.raises(SpecError):
        dm.init_parallel_states({"a": dm.parallel_spec(dp_size=8), "b": dm.parallel_spec(dp_size=3)})
    with pytest.raises(UnknownStateError):
        dm.get_parallel_state_by_name("a")


def test_default_of_several_states_can_be_chosen(world):
    specs = {"a": dm.parallel_spec(dp_size=8), "b": dm.parallel_spec(tp_size=8)}
    states = dm.init_parallel_states(specs, default="b")
    assert list(states) == ["a", "b"]
    assert dm.get_parallel_state() is states["b"]
    assert dm.scope_name() == "b"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: dm.init_parallel_state(dp_size=8, include_sp_in_fsdp=False),
            "include_sp_in_fsdp=False is not supported",
        ),
        (lambda: dm.init_parallel_state(dp_size=8, dp_mode="fsdp3"), "dp_mode='fsdp3'. Allowed: fsdp2, fsdp1, ddp"),
        (lambda: dm.init_parallel_state(dp_size=8, name=""), "'' is no name"),
        (lambda: dm.init_parallel_state(dp_size=8, spec=dm.TopologySpec({"x": 8})), "both spec and dp_size were given"),
        (lambda: dm.init_parallel_state(dp_size=2, ranks=[0, 0]), "ranks=.0, 0.. They must be different ranks"),
        (lambda: dm.init_parallel_state(dp_size=2, ranks=[0, 8]), r"Not allowed: 8"),
        (lambda: dm.init_parallel_state(dp_size=2, ranks=[True, 0]), r"Not allowed: True"),
        (lambda: dm.init_parallel_states({"a": 3}), "'a' maps to 3. Give a dm.TopologySpec"),
        (
            lambda: dm.init_parallel_states({"a": dm.parallel_spec(dp_size=8)}, default="b"),
            "default='b' is not among the names",
        ),
    ],
)
def test_bad_arguments_are_refused_by_name(world, call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


def test_one_name_is_cleared_and_its_state_with_its_last_name(world):
    spec = dm.parallel_spec(dp_size=8)
    first, twin = (dm.init_parallel_state(spec=spec, name=name) for name in ("first", "twin"))
    other = dm.init_parallel_state(tp_size=8, name="other")
    assert first is twin
    with dm.use_parallel_state("other"), pytest.raises(ScopeError, match=r"'first' is cleared inside .* 'other'"):
        dm.clear_parallel_state("first")
    dm.clear_parallel_state("first")
    assert (dm.scope_name(), twin.is_live, twin.names) == ("twin", True, ["twin"])
    dm.clear_parallel_state("twin")
    with pytest.raises(StaleStateError, match="mesh: State 'twin' was cleared"):
        twin.require_live("mesh")
    assert (dm.scope_name(), dm.get_parallel_state(), twin.is_live, other.is_live) == ("other", other, False, True)
    with pytest.raises(UnknownStateError, match=r"'twin' is not registered any more: it was cleared"):
        dm.clear_parallel_state("twin")
    assert dm.init_parallel_state(spec=spec, name="first") is not first
    dm.clear_parallel_state("other")
    assert dm.scope_name() == "first"


def test_clear_forgets_everything_and_is_idempotent(world):
    old = dm.init_parallel_state(dp_size=8)
    with dm.use_parallel_state("base"):
        dm.clear_parallel_state()
        dm.clear_parallel_state()
        assert dm.scope_name() is None
    new = dm.init_parallel_state(dp_size=8)
    assert new is not old
    assert dm.get_parallel_state() is new
    assert old.size("dp") == 8
    with pytest.raises(StaleStateError, match="State 'base' was cleared"):
        old.mesh  # noqa: B018 (the property refuses)


def test_session_tears_down_on_exceptions():
    seen = []

    def fails():
        with dm.session(backend="sim", world_size=4) as session:
            seen.extend([session, dm.init_parallel_state(dp_size=4)])
            with dm.use_parallel_state("base"):
                _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        fails()
    session, state = seen
    assert not session.is_live
    assert not state.is_live
    with pytest.raises(StaleStateError, match=r"ops.all_reduce: State 'base'"):
        dm.ops.all_reduce(0.0, "dp", state=state)


def test_same_sizes_in_a_new_session_are_a_fresh_state():
    handles = []
    for _ in range(2):
        with dm.session(backend="sim", world_size=4):
            handles.append(dm.init_parallel_state(dp_size=4))
    assert handles[0] is not handles[1]


def test_refused_init_ends_the_world_that_it_started():
    with pytest.raises(SpecError, match="the world has 1 rank"):
        dm.init_parallel_state(dp_size=7, backend="sim")
    with dm.session(backend="sim", world_size=2) as session:
        assert session.world_size == 2


def test_a_process_of_several_ranks_is_the_writer_where_one_of_them_is(world):
    state = dm.init_parallel_state(dp_size=2, tp_size=4)
    assert state.is_writer()
    other = dm.init_parallel_state(dp_size=4, ranks=[4, 5, 6, 7], name="other")
    assert other.is_writer("dp")


def test_sizes_that_do_not_fit_the_listed_ranks_are_refused_with_the_list():
    with dm.session(backend="sim", world_size=8):
        for spec in (dm.parallel_spec(dp_size=8), dm.FederatedSpec((4, 4))):
            with pytest.raises(SpecError, match=r"'some' over ranks=\(2, 5\), which are its world: "):
                dm.init_parallel_state(spec=spec, ranks=[2, 5], name="some")
        with pytest.raises(SpecError, match=r"^init_parallel_state: 'base': Topology: "):
            dm.init_parallel_state(tp_size=3)


def test_naming_differs_while_a_name_that_compiled_code_looked_up_means_something_else(world):
    """New names and names that nothing compiled looked up change nothing; the old meaning is the old value."""
    compiling, told = [], []
    registry = Registry()
    registry.add_compiler(lambda: bool(compiling), told.append)
    dp, tp = dm.init_parallel_state(dp_size=8, name="dp"), dm.init_parallel_state(tp_size=8, name="tp")
    registry.add("talker", dp)
    registry.get("talker")
    registry.drop([dp])
    assert told == [frozenset()], "no compiled code looked it up"
    registry.add("talker", dp)
    compiling.append(True)
    registry.get("talker")
    with pytest.raises(UnknownStateError):
        registry.get("later")
    compiling.clear()
    registry.add("other", tp)
    assert told == [frozenset()]
    registry.unname("talker")
    registry.add("talker", tp)
    registry.add("later", tp)
    registry.unname("talker")
    registry.add("talker", dp)
    gone, renamed, later = ("talker", None), ("talker", tp.plan), ("later", tp.plan)
    assert [set(naming) for naming in told] == [set(), {gone}, {renamed}, {renamed, later}, {gone, later}, {later}]
    tp.names.remove("other")
    tp.names.remove("later")


def test_of_several_states_the_one_that_does_not_fit_is_named():
    """And none of them is registered."""
    with dm.session(backend="sim", world_size=8):
        specs = {"thinker": dm.parallel_spec(dp_size=8), "talker": dm.parallel_spec(dp_size=3)}
        with pytest.raises(SpecError, match=r"'talker': Topology: .*multiply to 3, but the world has 8 ranks"):
            dm.init_parallel_states(specs)
        with pytest.raises(ValueError, match="'thinker' is not registered"):
            dm.get_parallel_state_by_name("thinker")
