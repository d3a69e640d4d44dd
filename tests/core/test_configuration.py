"""One schema for files, variables, flags, arguments and dataclasses; errors name file and line."""

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from absl import flags

import dualmesh as dm
from dualmesh.config import Configuration, StateConfig
from dualmesh.config.flags import (
    add_parallel_arguments,
    config_from_arguments,
    config_from_flags,
    define_parallel_flags,
)
from dualmesh.errors import SpecError
from dualmesh.runtime.environment import OWN_NAMES
from dualmesh.runtime.init import check_variables

YAML = """\
world_size: 8
default: talker
states:
  thinker: {dp_shard: -1, ulysses: 2}
  talker:
    axes: [{dp: -1}, {tp: 4}]
  nodes:
    rank_groups: {node: [[0, 1, 2], [3, 4]]}
  rollout:
    preset: megatron
    settings: {tp: 2, dp: -1}
"""
TOML = """\
world_size = 8
default = "talker"
[states.thinker]
dp_shard_size = -1
ulysses_size = 2
[states.talker]
axes = [["dp", -1], ["tp", 4]]
[states.nodes.rank_groups]
node = [[0, 1, 2], [3, 4]]
[states.rollout]
preset = "megatron"
settings = {tp = 2, dp = -1}
"""


def written(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    return tmp_path / name


def test_yaml_and_toml_say_the_same(tmp_path):
    first, second = (
        Configuration.from_file(written(tmp_path, name, text)) for name, text in (("a.yaml", YAML), ("a.toml", TOML))
    )
    assert first == second == Configuration.from_dict(first.to_dict())
    assert {name: topo.world_size for name, topo in first.topologies().items()} == dict.fromkeys(first.states, 8)


def test_init_registers_all_states_with_the_default(tmp_path):
    config = Configuration.from_file(written(tmp_path, "a.yaml", YAML))
    with dm.session(backend="sim", world_size=8):
        states = config.init()
        assert dm.get_parallel_state() is states["talker"]
        assert states["nodes"].size("node", 3) == 2
    with dm.session(backend="sim", world_size=4), pytest.raises(SpecError, match=r"a\.yaml:1: world_size is 8"):
        config.init()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.yaml", "states:\n  a:\n    tp: 2\n    ulyses: 2\n", r"c\.yaml:4: .*'ulyses'.*Did you mean 'ulysses"),
        ("c.yaml", "states:\n  a: {tp: 2}\ndefualt: a\n", r"c\.yaml:3: unknown key 'defualt'.*'default'"),
        ("c.yaml", "states:\n  a:\n    dp: 2\n    tp: x\n", r"c\.yaml:4: .*tp_size='x' is no size"),
        ("c.yaml", "states:\n  a: {tp: 2}\n  a: {tp: 4}\n", r"c\.yaml:3: 'a' is given twice, first in line 2"),
        ("c.yaml", "states: [\n", r"c\.yaml:\d+: no YAML"),
        ("c.yaml", "states: {a: {tp: 2, spec: dp*}}\n", r"c\.yaml:1: .*several ways"),
        ("c.toml", "[states.a]\ntp = 2\nulyses = 2\n", r"c\.toml:3: .*'ulyses'"),
        ("c.toml", "[states.a\n", r"c\.toml:1: no TOML"),
    ],
)
def test_errors_name_file_and_line(tmp_path, name, text, message):
    with pytest.raises(SpecError, match=message):
        Configuration.from_file(written(tmp_path, name, text))


def test_all_problems_come_at_once(tmp_path):
    file = written(tmp_path, "c.yaml", "states:\n  a: {tpp: 2}\n  b: {cp_sise: 2}\nx: 1\n")
    with pytest.raises(SpecError) as caught:
        Configuration.from_file(file)
    assert len(caught.value.problems) == 3


def test_a_state_that_does_not_fit_is_named_with_its_line(tmp_path):
    config = Configuration.from_file(written(tmp_path, "c.yaml", "states:\n  a: {tp: 2}\n  b:\n    tp: 3\n"))
    with pytest.raises(SpecError, match=r"c\.yaml:4: state 'b': .*multiply to 3, but the world has 2 ranks"):
        config.topologies(2)


def test_flags_win_over_variables_which_win_over_the_file(tmp_path):
    file = written(tmp_path, "c.yaml", "dp_shard: -1\ntp: 2\nulysses: 2\n")
    values = flags.FlagValues()
    define_parallel_flags(values)
    values(["prog", "--tp_size=8"])
    variables = {"DUALMESH_CONFIG": str(file), "DUALMESH_TP_SIZE": "4", "DUALMESH_CP": "2"}
    state = config_from_flags(values, variables).states["base"]
    assert (state.tp_size, state.cp_size, state.ulysses_size) == (8, 2, 2)


def test_arguments_mean_what_flags_mean():
    parser = argparse.ArgumentParser()
    add_parallel_arguments(parser)
    config = config_from_arguments(parser.parse_args(["--dp-shard-size", "-1", "--ep_size=4"]), {})
    assert config.states["base"] == StateConfig(dp_shard_size=-1, ep_size=4)
    with pytest.raises(SpecError, match="--tp_size='two': give an integer"):
        config_from_arguments(parser.parse_args(["--tp_size=two"]), {})


def test_a_dataclass_of_ones_own_is_read_by_its_names():
    @dataclass
    class Mine:
        dp_shard: int = -1
        tp: int = 2
        cp: int | None = None

    assert StateConfig.of(Mine()) == StateConfig(dp_shard_size=-1, tp_size=2)


def test_variables_close_to_a_setting_are_refused():
    assert Configuration.from_environment({"DUALMESH_BACKEND": "sim"}) is None
    with pytest.raises(
        SpecError, match=r"DUALMESH_ULYSES_SIZE='2' is no setting\. Did you mean 'DUALMESH_ULYSSES_SIZE'"
    ):
        Configuration.from_environment({"DUALMESH_ULYSES_SIZE": "2"})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("STRCT", "STRICT"),
        ("TIMEOUT", "TIMEOUT_S"),
        ("DEBUGG", "DEBUG"),
        ("BACKENDS", "BACKEND"),
        ("DP_SHRD", "DP_SHARD"),
        ("ULYSES", "ULYSSES"),
        ("OWN_GROUP", "OWN_GROUPS"),
        ("TPP_SIZE", "TP_SIZE"),
    ],
)
def test_misspelt_variables_are_refused_by_likeness_whatever_their_ending(name, meant, monkeypatch):
    """By `init_parallel_state` too, which reads no configuration; what is like nothing is nobody's business here."""
    for read in (Configuration.from_environment, check_variables):
        with pytest.raises(SpecError, match=rf"DUALMESH_{name}='1' is no setting\. Did you mean 'DUALMESH_{meant}'"):
            read({f"DUALMESH_{name}": "1"})
    monkeypatch.setenv(f"DUALMESH_{name}", "1")
    with dm.session(backend="sim", world_size=2):
        with pytest.raises(SpecError, match=f"Did you mean 'DUALMESH_{meant}'"):
            dm.init_parallel_state(dp_size=2)
        monkeypatch.delenv(f"DUALMESH_{name}")
        monkeypatch.setenv("DUALMESH_WHATEVER_ELSE", "1")
        assert dm.init_parallel_state(dp_size=2).size("dp") == 2


def test_every_variable_that_the_source_reads_is_known():
    """The list of names is the constants of the source and what a state takes."""
    source = Path(dm.__file__).parent
    text = "".join(path.read_text() for path in source.rglob("*.py"))
    constants = set(re.findall(r'= "DUALMESH_([A-Z_]+)"', text))
    assert constants
    assert constants <= set(OWN_NAMES)
    check_variables({f"DUALMESH_{name}": "1" for name in OWN_NAMES})


def test_states_are_registered_from_flags(tmp_path):
    """Every backend takes this way, so the simulated world stands for all."""
    values = flags.FlagValues()
    define_parallel_flags(values)
    path = written(tmp_path, "a.yaml", YAML)
    values(["train", f"--parallel_config={path}", "--parallel_state=thinker", "--tp_size=2"])
    with dm.session(backend="sim", world_size=8):
        states = dm.flags.init_from_flags(values)
        assert list(states) == ["thinker", "talker", "nodes", "rollout"]
        assert (states["thinker"].size("dp_shard"), states["thinker"].size("tp")) == (2, 2)
        assert dm.get_parallel_state() is states["talker"]
    with dm.session(backend="sim", world_size=4), pytest.raises(SpecError, match=r"a\.yaml:1: world_size is 8, but"):
        dm.flags.init_from_flags(values)
