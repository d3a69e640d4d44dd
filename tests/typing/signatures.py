"""What callers may rely on, as mypy sees it from outside: checked by the suite's mypy call, never run.

A line that must be refused says with which error; mypy reports an ignore that nothing needs.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, assert_type

import dualmesh as dm


def specs_and_topologies() -> None:
    """Specs resolve to topologies, which answer integers."""
    spec = assert_type(dm.parallel_spec(dp_shard_size=-1, tp_size=2, ep_size=2), dm.TopologySpec)
    assert_type(dm.TopologySpec({"dp": -1}, views={"v": dm.View("dp", {"ep": 2})}), dm.TopologySpec)
    topology = assert_type(spec.resolve(8), dm.Topology)
    assert_type(topology.size("tp"), int)
    assert_type(topology.ranks(("dp_shard", "tp"), 3), tuple[int, ...])
    assert_type(topology.coords(3), dict[str, int])
    assert_type(topology.base_axes, tuple[str, ...])
    assert_type(dm.TopologySpec.from_dict(spec.to_dict()), dm.TopologySpec)
    assert_type(dm.presets.torchtitan(tp=2), dm.TopologySpec)
    assert_type(dm.RankGroups([[0, 1], [2]]), dm.RankGroups)
    spec.resolve("8")  # type: ignore[arg-type]
    dm.parallel_spec(tp=2)  # type: ignore[call-arg]


def worlds_and_states() -> None:
    """Sessions are context managers; states are found by name and by scope."""
    with dm.session(backend="sim", world_size=8) as session:
        assert_type(session, dm.Session)
    assert_type(dm.init_distributed("torch"), dm.Session)
    assert_type(dm.init_parallel_state(dp_size=8, name="thinker"), dm.ParallelState)
    assert_type(dm.init_parallel_states({"thinker": dm.parallel_spec(dp_size=8)}), dict[str, dm.ParallelState])
    assert_type(dm.get_parallel_state_by_name("thinker"), dm.ParallelState)
    with dm.use_parallel_state("thinker") as state:
        assert_type(state, dm.ParallelState)
    assert_type(dm.scope_name(), str | None)
    dm.init_parallel_state(dp_mode="fsdp3")  # type: ignore[arg-type]
    dm.init_parallel_state(tp="2")  # type: ignore[call-arg]


def states_answer(state: dm.ParallelState) -> None:
    """A state's own answers, and the attributes that VeOmni's callers ask for."""
    assert_type(state.size("tp"), int)
    assert_type(state.enabled("tp"), bool)
    assert_type(state.ranks("tp"), tuple[int, ...])
    assert_type(state.topology, dm.Topology)
    assert_type(state.names, list[str])
    assert_type(state.dp_size, int)
    assert_type(state.ulysses_enabled, bool)
    assert_type(state.ep_size, int)
    _ = state.tp_sise  # type: ignore[attr-defined]


def functions_keep_their_types() -> None:
    """Scopes and `bind` give back what they were given."""

    @dm.use_parallel_state("thinker")
    def talk(words: list[str], loud: bool = False) -> str:
        return " ".join(words).upper() if loud else " ".join(words)

    assert_type(talk(["a"]), str)
    assert_type(dm.bind(talk)(["a"], loud=True), str)
    talk("a", 3)  # type: ignore[arg-type]
    lifted: Callable[..., Any] = dm.shard_map(talk, in_specs=dm.P("dp"), out_specs=dm.P())
    assert_type(dm.ops.axis_size("tp"), int)
    assert_type(lifted(), Any)


def configurations_and_pictures(path: Path) -> None:
    """Files become states and pictures."""
    config = assert_type(dm.Configuration.from_file(path), dm.Configuration)
    assert_type(config.topologies(8), dict[str, dm.Topology])
    assert_type(config.init(), dict[str, dm.ParallelState])
    assert_type(dm.flags.init_from_flags(), dict[str, dm.ParallelState])
    assert_type(dm.draw(config.topologies(8)).svg, str)
    dm.draw(config.topologies(8), theme="drak")  # type: ignore[arg-type]
    _ = dm.no_such_name  # type: ignore[attr-defined]


def errors_are_errors(error: dm.DualmeshError) -> None:
    """Messages are text; offending values are attributes of any type."""
    assert_type(str(error), str)
    assert_type(error.axis, Any)
