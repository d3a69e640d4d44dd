"""What is fuzzed: each target draws one input and calls dualmesh; the drawn values that are wrong must be shown."""

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

import dualmesh as dm
from dualmesh._support import waits
from dualmesh.config import Configuration, StateConfig
from dualmesh.runtime import environment
from dualmesh.runtime.node_variables import nodes_from, place_from
from tests.fuzz.values import names, sizes, wild

Draw = Callable[..., Any]
Call = Callable[[], Any]
Target = Callable[[Draw], tuple[Call, list[Any]]]
"""Draws an input; returns the call, and the values of which the message must show one ([]: nobody knows which)."""
TARGETS: dict[str, Target] = {}
WORLD = 8
KWARGS = ("dp_size", "dp_replicate_size", "dp_shard_size", "tp_size", "pp_size", "cp_size", "ulysses_size")


def target(fn: Target) -> Target:
    """Register a target."""
    TARGETS[fn.__name__] = fn
    return fn


@target
def axis_sizes(draw):
    """One size of a spec is anything."""
    value = draw(wild)
    axes = draw(st.dictionaries(names, sizes, max_size=2)) | {"odd": value}
    return lambda: dm.TopologySpec(axes).resolve(WORLD), [value, *axes.values()]


@target
def axis_names(draw):
    """One axis name is anything that can be a key."""
    value = draw(st.one_of(st.text(max_size=5), st.integers(), st.none(), st.tuples(names, names), st.floats()))
    return lambda: dm.TopologySpec({value: 2, "rest": -1}).resolve(WORLD), [value]


@target
def axes(draw):
    """The axes are anything."""
    value = draw(wild)
    return lambda: dm.TopologySpec(value).resolve(WORLD), [value]


@target
def combined(draw):
    """Combined axes are anything."""
    value = draw(st.one_of(wild, st.dictionaries(names, wild, max_size=2)))
    return lambda: dm.TopologySpec({"dp": 2, "tp": 4}, combined=value).resolve(WORLD), [value]


@target
def views(draw):
    """Views are anything, or views of anything."""
    view = st.fixed_dictionaries({}, optional={"over": wild, "axes": wild, "odd": wild})
    value = draw(st.one_of(wild, st.dictionaries(names, st.one_of(view, wild), max_size=2)))
    return lambda: dm.TopologySpec({"dp": 2, "tp": 4}, views=value).resolve(WORLD), [value]


@target
def roles(draw):
    """Roles are anything."""
    roles_ = st.dictionaries(st.sampled_from(["data", "params", "loss", "seqence"]), wild, max_size=2)
    value = draw(st.one_of(wild, roles_))
    return lambda: dm.TopologySpec({"dp": 2, "tp": 4}, roles=value).resolve(WORLD), [value]


@target
def worlds(draw):
    """The world size, or the first rank, is anything."""
    value = draw(wild)
    if draw(st.booleans()):
        return lambda: dm.TopologySpec({"dp": -1, "tp": 2}).resolve(value), [value]
    return lambda: dm.TopologySpec({"dp": 8}, rank_offset=value).resolve(WORLD), [value]


@target
def dicts(draw):
    """Plain data for specs is anything, or has the right keys."""
    keys = ("axes", "combined", "views", "roles", "rank_offset", "axis", "group_sizes", "groups")
    data = st.fixed_dictionaries({}, optional={key: wild for key in keys})
    kind = draw(st.sampled_from([dm.TopologySpec, dm.GroupSpec, dm.FederatedSpec]))
    value = draw(st.one_of(wild, data))
    return lambda: kind.from_dict(value).resolve(WORLD), [value]


@target
def texts(draw):
    """The compact text of a spec is anything, or made of its signs."""
    words = st.lists(
        st.sampled_from(["dp", "tp", "2", "-1", "x", "*", "/", "=", "(", ")", "[", "]", "|", ",", "'", ":"])
    )
    value = draw(st.one_of(wild, st.text(max_size=12), words.map("".join), words.map(" ".join)))
    return lambda: dm.TopologySpec.from_text(value).resolve(WORLD), [value, *_parts(value)]


@target
def usual_sizes(draw):
    """Arguments of `parallel_spec`, some of them anything."""
    value = draw(wild)
    given = draw(st.dictionaries(st.sampled_from(KWARGS), sizes, max_size=2)) | {draw(st.sampled_from(KWARGS)): value}
    return lambda: dm.parallel_spec(**given).resolve(WORLD), [value, *given.values()]


@target
def extra_parallels(draw):
    """Expert sizes, names and places are anything."""
    name = draw(st.sampled_from(["ep_size", "ep_over", "extra_parallel_sizes", "extra_parallel_names"]))
    value = draw(st.one_of(wild, st.lists(sizes, max_size=2), st.lists(names, max_size=2)))
    return lambda: dm.parallel_spec(dp_size=WORLD, **{name: value}).resolve(WORLD), [value]


@target
def presets(draw):
    """An argument of a preset is anything."""
    preset, arguments = draw(
        st.sampled_from(
            [
                (dm.presets.torchtitan, ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")),
                (dm.presets.megatron, ("tp", "cp", "ep", "dp", "pp", "order", "rank_offset")),
                (dm.presets.accelerate, ("dp_replicate", "dp_shard", "cp", "sp", "tp")),
                (dm.presets.nemo_rl, ("dp", "cp", "tp", "pp")),
            ]
        )
    )
    value = draw(wild)
    given = {draw(st.sampled_from(arguments)): value}
    return lambda: preset(**given).resolve(WORLD), [value]


@target
def imports(draw):
    """Settings of another project are anything, or have its keys."""
    importer, keys = draw(
        st.sampled_from(
            [
                (dm.importers.torchtitan, ("tensor_parallel_degree", "data_parallel_shard_degree", "typo")),
                (dm.importers.megatron, ("tensor_model_parallel_size", "world_size", "order")),
                (dm.importers.accelerate, ("tp_size", "dp_shard_size", "cp_size")),
                (dm.importers.maxtext, ("ici_fsdp_parallelism", "dcn_data_parallelism", "mesh_axes")),
                (dm.importers.deepspeed, ("zero_optimization", "tensor_parallel", "sequence_parallel_size")),
            ]
        )
    )
    value = draw(st.one_of(wild, st.fixed_dictionaries({}, optional={key: wild for key in keys})))
    return lambda: importer(value).resolve(WORLD), [value]


@target
def rank_groups(draw):
    """Lists of ranks are anything."""
    groups = st.lists(st.one_of(wild, st.lists(st.integers(-1, 9), max_size=4)), max_size=3)
    value = draw(st.one_of(wild, groups))
    if draw(st.booleans()):
        return lambda: dm.RankGroups(value), [value]
    return lambda: dm.GroupSpec({"node": value}).resolve(WORLD), [value]


@target
def federations(draw):
    """Sizes of federations and shards are anything."""
    first, second = draw(st.one_of(wild, st.lists(sizes, max_size=3))), draw(st.one_of(st.none(), wild))
    return lambda: dm.FederatedSpec(first, second).resolve(WORLD), [first, second, WORLD]


@target
def partition_specs(draw):
    """Entries of a partition spec are anything."""
    value = draw(st.one_of(wild, st.tuples(names, wild)))
    return lambda: dm.get_parallel_state().pspec(value), [value]


@target
def states(draw):
    """An argument of `init_parallel_state` is anything."""
    value = draw(wild)
    other = (
        "device_type",
        "name",
        "spec",
        "backend",
        "ranks",
        "own_groups",
        "group_options",
        "dp_mode",
        "async_enabled",
    )
    name = draw(st.sampled_from((*KWARGS, *other)))
    given = {"name": "fuzzed", **({} if name == "spec" else {"dp_size": WORLD}), name: value}
    return lambda: dm.init_parallel_state(**given), [value]


@target
def many_states(draw):
    """The states registered at once are anything."""
    value = draw(st.one_of(wild, st.dictionaries(st.one_of(names, wild.filter(_is_key)), wild, max_size=2)))
    return lambda: dm.init_parallel_states(value), [value]


@target
def groups_options(draw):
    """Group options are anything, or have the right names."""
    options = st.fixed_dictionaries({}, optional={"timeout_s": wild, "is_high_priority": wild, "timeout": wild})
    value = draw(options)
    return lambda: dm.init_parallel_state(dp_size=WORLD, name="fuzzed", group_options=value), [value]


@target
def questions(draw):
    """An axis or a rank that a topology is asked for is anything."""
    topology, value = dm.parallel_spec(dp_size=4, tp_size=2).resolve(WORLD), draw(wild)
    ask = draw(
        st.sampled_from(
            [
                topology.size,
                topology.partition,
                topology.coords,
                lambda value: topology.index(value, 0),
                lambda value: topology.index("tp", value),
                lambda value: topology.ranks(value, 0),
                lambda value: topology.ranks("tp", value),
                topology.role,
            ]
        )
    )
    return lambda: ask(value), [value]


@target
def names_asked_for(draw):
    """A state is looked up, or entered, by anything."""
    value = draw(wild)
    ask = draw(st.sampled_from([dm.get_parallel_state_by_name, lambda value: dm.use_parallel_state(value).__enter__()]))
    return lambda: ask(value), [value]


VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_TASKS_PER_NODE", "SLURM_STEP_NODELIST")
SAID = st.one_of(st.sampled_from(["0", "1", "8", "-1", "", "eight", "2(x3)", "1.5", "127.0.0.1"]), st.text(max_size=5))


@target
def launches(draw):
    """Launchers' variables: half set, malformed, contradictory."""
    variables = draw(st.dictionaries(st.sampled_from((*VARIABLES, *SLURM, "SLURM_JOB_ID")), SAID, max_size=7))
    given = draw(st.fixed_dictionaries({}, optional={"rank": wild, "world_size": wild, "init_method": wild}))
    return lambda: environment.launch_from(variables, **given), [
        *variables.values(),
        *variables,
        *given.values(),
    ]


@target
def nodes(draw):
    """What launchers say of nodes: half set, malformed, contradictory."""
    variables = draw(st.dictionaries(st.sampled_from((*VARIABLES, *SLURM)), SAID, max_size=6))
    ask = draw(st.sampled_from([place_from, nodes_from]))
    return lambda: ask(variables), [*variables.values(), *variables]


@target
def timeouts(draw):
    """DUALMESH_TIMEOUT_S, or the argument, is anything."""
    value = draw(wild)
    if draw(st.booleans()) and isinstance(value, str):
        return lambda: waits.timeout_s(None, {"DUALMESH_TIMEOUT_S": value}), [value]
    return lambda: waits.timeout_s(value), [value]


FIELDS = ("dp_size", "tp_size", "tp", "axes", "spec", "combined", "views", "rank_groups", "preset", "settings", "ranks")
FIELD_NAMES = st.one_of(st.sampled_from((*FIELDS, "tpp_size", "own_groups", "dp_mode")), st.text(max_size=4))


@target
def settings_of_a_state(draw):
    """The settings of one state are anything, or have its names."""
    value = draw(st.one_of(wild, st.dictionaries(FIELD_NAMES, st.one_of(sizes, wild), max_size=3)))
    return lambda: StateConfig.of(value).topology_spec().resolve(WORLD), [value]


@target
def configurations(draw):
    """Data of configuration files are anything, or have the right keys."""
    state = st.one_of(wild, st.dictionaries(FIELD_NAMES, st.one_of(sizes, wild), max_size=3))
    data = st.fixed_dictionaries(
        {}, optional={"states": st.one_of(wild, st.dictionaries(names, state, max_size=2)), "default": wild,
                      "world_size": wild, "stats": wild},
    )  # fmt: skip
    value = draw(st.one_of(wild, data))
    return lambda: Configuration.from_dict(value).topologies(WORLD), [value, "states"]


@target
def files(draw):
    """The text of a configuration file is anything, or nearly right."""
    line = st.sampled_from(
        ["states:", "  a: {tp: 2}", "  b: {tpp: 2}", "world_size: 8", "states = 3", "[states.a]", "tp_size = 2", "- 1",
         "default: a", "a: [", "tp_size = 'x'", "\t", "states: {a: {dp_shard: -1, tp: true}}"]
    )  # fmt: skip
    text = draw(st.one_of(st.text(max_size=30), st.lists(line, max_size=4).map("\n".join)))
    ending = draw(st.sampled_from(["yaml", "toml", "json", ""]))
    path = Path(tempfile.gettempdir()) / f"dualmesh-fuzz-{ending}.{ending}"
    return lambda: (path.write_text(text), Configuration.from_file(path).topologies(WORLD)), []


@target
def variables(draw):
    """DUALMESH_ variables are anything."""
    fields = st.sampled_from(
        ["TP_SIZE", "DP_SHARD", "DP_SIZE", "SPEC", "CONFIG", "TPP_SIZE", "EP_SIZE", "AXES", "RANKS"]
    )
    given = draw(st.dictionaries(fields.map("DUALMESH_{}".format), SAID, max_size=2))
    call = lambda: (found := Configuration.from_environment(given)) and found.topologies(WORLD)  # noqa: E731
    return call, [*given.values(), *given, *_parts(" ".join(given.values()))]


def _parts(text: Any) -> list[str]:
    """Return the words, numbers and signs of a text."""
    return re.findall(r"[^\W\d]+|\d+|[^\w\s]", text) if isinstance(text, str) else []


def _is_key(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
