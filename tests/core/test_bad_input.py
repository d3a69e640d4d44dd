"""Every public function, every argument, every kind of wrong value: one of dualmesh's errors or an accepted value.

An error of Python's or a framework's own here means that an argument was used before it was looked at.
"""

import inspect
import warnings

import numpy as np
import pytest

import dualmesh as dm
from dualmesh import testing
from dualmesh.config import StateConfig
from dualmesh.errors import DualmeshError
from dualmesh.runtime import scope
from dualmesh.runtime.registry import registry

P = dm.P
X = np.arange(64.0).reshape(8, 8)
VALUES = (
    *(None, True, 0, 3, -1, 2.5, float("nan"), "", "x", "é", b"x", (), [], {}, (1, 2), ["a"], {"a": 1}, {1, 2}),
    *(object(), int, np.int64(3), np.array([1, 2]), np.array(1.0)),
)
GRID = dm.TopologySpec({"a": 2, "b": 4}).resolve(8)


def keyword(fn, argument, others=None):
    """Return a call of `fn` with one argument wrong."""
    return lambda value: fn(**{**(others or {}), argument: value})


def keywords(fn, others=None):
    """Return, per argument of `fn`, a call with that one wrong."""
    return {f"{fn.__name__} {one}": keyword(fn, one, others) for one in inspect.signature(fn).parameters}


def inside(fn):
    """Return a call of a per-rank function with the wrong value beside a block."""
    return lambda value: dm.shard_map(lambda x: fn(x, value), P("dp"), P("dp"))(X)


def given(value):
    """Return what is callable as it is, or the value: a function's own errors are its caller's."""
    return (lambda x: x) if callable(value) else value


CALLS = {
    **keywords(dm.init_parallel_state, {"name": "n"}),
    **keywords(dm.parallel_spec),
    **keywords(dm.init_distributed, {"backend": "sim"}),
    **keywords(dm.presets.torchtitan),
    **keywords(dm.presets.megatron),
    **keywords(dm.presets.accelerate),
    **keywords(dm.presets.nemo_rl),
    "init_parallel_states": dm.init_parallel_states,
    "init_parallel_states spec": lambda value: dm.init_parallel_states({"a": value}),
    "init_parallel_states default": lambda value: dm.init_parallel_states({"a": dm.parallel_spec(dp_size=8)}, value),
    "TopologySpec": dm.TopologySpec,
    **{
        f"TopologySpec {name}": keyword(dm.TopologySpec, name, {"axes": {"a": 8}})
        for name in ("combined", "views", "roles", "rank_offset")
    },
    "TopologySpec.from_dict": dm.TopologySpec.from_dict,
    "View over": lambda value: dm.TopologySpec({"a": 8}, views={"v": dm.View(over=value, axes={"q": 8})}),
    "View axes": lambda value: dm.TopologySpec({"a": 8}, views={"v": dm.View(over=("a",), axes=value)}),
    "resolve": dm.TopologySpec({"a": -1}).resolve,
    "topology size": GRID.size,
    "topology partition": GRID.partition,
    "topology coords": GRID.coords,
    "topology index": lambda value: GRID.index(value, 0),
    "topology index rank": lambda value: GRID.index("a", value),
    "topology ranks": lambda value: GRID.ranks(value, 0),
    "topology ranks rank": lambda value: GRID.ranks("a", value),
    "P": P,
    "P partial": lambda value: P("a", partial=value),
    "RankGroups": dm.RankGroups,
    "RankGroups group": lambda value: dm.RankGroups([value]),
    "GroupSpec": dm.GroupSpec,
    "ShardingPlan": dm.ShardingPlan,
    "ShardingPlan spec": lambda value: dm.ShardingPlan({"a": value}),
    "ShardingPlan rules": lambda value: dm.ShardingPlan({"a": P()}, value),
    "ShardingPlan default": lambda value: dm.ShardingPlan({"a": P()}, None, value),
    "use_parallel_state": lambda value: dm.use_parallel_state(value).__enter__(),
    "get_parallel_state_by_name": dm.get_parallel_state_by_name,
    "bind": dm.bind,
    "strict": dm.strict,
    "debug": dm.debug,
    **{
        f"state {name}": (lambda value, name=name: getattr(dm.get_parallel_state(), name)(value))
        for name in ("size", "enabled", "group_sizes", "axes", "group", "pspec", "sharding", "submesh", "is_writer")
    },
    "state index": lambda value: dm.get_parallel_state().index(value, 0),
    "state index rank": lambda value: dm.get_parallel_state().index("dp", value),
    "state ranks": lambda value: dm.get_parallel_state().ranks(value, 0),
    "state ranks rank": lambda value: dm.get_parallel_state().ranks("dp", value),
    **{
        f"{verb} {what}": call
        for verb in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "shift", "enter", "leave")
        for what, call in {
            "x": inside(lambda _x, value, verb=verb: getattr(dm.ops, verb)(value, "dp")),
            "axis": inside(lambda x, value, verb=verb: getattr(dm.ops, verb)(x, value)),
            "state": inside(lambda x, value, verb=verb: getattr(dm.ops, verb)(x, "dp", state=value)),
        }.items()
    },
    "all_reduce op": inside(lambda x, value: dm.ops.all_reduce(x, "dp", op=value)),
    "all_gather dim": inside(lambda x, value: dm.ops.all_gather(x, "dp", dim=value)),
    "reduce_scatter dim": inside(lambda x, value: dm.ops.reduce_scatter(x, "dp", dim=value)),
    "reduce_scatter op": inside(lambda x, value: dm.ops.reduce_scatter(x, "dp", 1, op=value)),
    "all_to_all split_dim": inside(lambda x, value: dm.ops.all_to_all(x, "dp", value, 1)),
    "all_to_all concat_dim": inside(lambda x, value: dm.ops.all_to_all(x, "dp", 1, value)),
    "broadcast src": inside(lambda x, value: dm.ops.broadcast(x, "dp", src=value)),
    "shift offset": inside(lambda x, value: dm.ops.shift(x, "dp", offset=value)),
    "shift wrap": inside(lambda x, value: dm.ops.shift(x, "dp", wrap=value)),
    "permute pairs": inside(lambda x, value: dm.ops.permute(x, "dp", pairs=value)),
    "permute pair": inside(lambda x, value: dm.ops.permute(x, "dp", pairs=[value])),
    "permute src": inside(lambda x, value: dm.ops.permute(x, "dp", pairs=[(value, 0)])),
    "take_block dim": inside(lambda x, value: dm.ops.take_block(x, "dp", value)),
    "axis_index": inside(lambda x, value: x + dm.ops.axis_index(value)),
    "axis_size": dm.ops.axis_size,
    "ragged_all_to_all x": inside(lambda _x, value: dm.ops.ragged_all_to_all(value, "dp", [0] * 8, [0] * 8)),
    "ragged_all_to_all counts": inside(lambda x, value: dm.ops.ragged_all_to_all(x, "dp", value, value)),
    "ragged_all_to_all count": inside(lambda x, value: dm.ops.ragged_all_to_all(x, "dp", [value] * 8, [value] * 8)),
    "ragged_all_to_all rows": inside(lambda x, value: dm.ops.ragged_all_to_all(x, "dp", [0] * 8, [0] * 8, rows=value)),
    "shard_map fn": lambda value: dm.shard_map(given(value), P(), P())(X),
    "shard_map in_specs": lambda value: dm.shard_map(lambda x: x, value, P())(X),
    "shard_map out_specs": lambda value: dm.shard_map(lambda x: x, P(), value)(X),
    "shard_map state": lambda value: dm.shard_map(lambda x: x, P(), P(), state=value)(X),
    "shard_map axes": lambda value: dm.shard_map(lambda x: x, P(), P(), axes=value)(X),
    "shard_map check_replicated": lambda value: dm.shard_map(lambda x: x, P(), P(), check_replicated=value)(X),
    "shard_map argument": dm.shard_map(lambda x: x, P("dp"), P("dp")),
    "shard_map result": inside(lambda _x, value: value),
    "value_and_grad fn": dm.value_and_grad,
    "value_and_grad argnums": lambda value: dm.value_and_grad(lambda x: x, argnums=value),
    "value_and_grad state": lambda value: dm.value_and_grad(lambda x: x, state=value)(X),
    "remat": lambda value: dm.remat(given(value))(X),
    **{
        f"{fn.__name__} {what}": call
        for fn in (dm.distribute, dm.shard_local, dm.constrain)
        for what, call in {
            "array": lambda value, fn=fn: fn(value, P("dp")),
            "spec": lambda value, fn=fn: fn(X, value),
            "state": lambda value, fn=fn: fn(X, P("dp"), state=value),
        }.items()
    },
    **{
        f"distribute {what}": keyword(dm.distribute, what, {"array": X, "spec": P("dp")})
        for what in ("pad", "src", "check")
    },
    "to_numpy": dm.to_numpy,
    "Fused spec": lambda value: dm.Fused(value, {"q": 1}),
    "Fused parts": lambda value: dm.Fused(P(), value),
    "Fused dim": lambda value: dm.Fused(P(), {"q": 1}, value),
    **{
        f"plan_transfer {name}": keyword(
            dm.plan_transfer, name, {"arrays": {"w": ((8,), 4)}, "src": (GRID, P()), "dst": (GRID, P())}
        )
        for name in ("arrays", "src", "dst", "message_bytes", "renames")
    },
    **{
        f"transfer {name}": keyword(dm.transfer, name, {"tree": {}, "src": "base", "dst": "base", "specs": P()})
        for name in ("tree", "src", "dst", "specs", "renames", "buffer_bytes")
    },
    "to_numpy shape": lambda value: dm.to_numpy(X, shape=value),
    "local_slices pad": lambda value: dm.local_slices(P("dp"), (8,), 0, pad=value),
    "local_slices spec": lambda value: dm.local_slices(value, (8,), 0),
    "local_slices shape": lambda value: dm.local_slices(P("dp"), value, 0),
    "local_slices size": lambda value: dm.local_slices(P("dp"), (value,), 0),
    "local_slices rank": lambda value: dm.local_slices(P("dp"), (8,), rank=value),
    "token_mean loss_sum": inside(lambda _x, value: dm.token_mean(value, 1)[0]),
    "token_mean count": inside(lambda x, value: dm.token_mean(x.sum(), value)[0]),
    "token_mean axis": inside(lambda x, value: dm.token_mean(x.sum(), 3, axis=value)[0]),
    "token_mean total": inside(lambda x, value: dm.token_mean(x.sum(), 3, total=value)[0]),
    "sync_gradients": dm.sync_gradients,
    "sync_gradients axis": lambda value: dm.sync_gradients([X], value),
    "sum_gradients": dm.sum_gradients,
    "global_norm": dm.global_norm,
    "global_norm ord": lambda value: dm.global_norm([X], value),
    "global_norm axis": inside(lambda x, value: dm.global_norm([x], 2, value)),
    "seed_for state": lambda value: dm.seed_for(value, "dp"),
    "seed_for axes": lambda value: dm.seed_for(dm.get_parallel_state(), value, rank=0),
    "seed_for base": lambda value: dm.seed_for(dm.get_parallel_state(), "dp", value, rank=0),
    "seed_for rank": lambda value: dm.seed_for(dm.get_parallel_state(), "dp", rank=value),
    "clear_parallel_state": lambda value: value is None or dm.clear_parallel_state(value),
    "host.broadcast axis": lambda value: dm.host.broadcast(1, value),
    "host.broadcast src": lambda value: dm.host.broadcast(1, "dp", value),
    "host.all_gather axis": lambda value: dm.host.all_gather(1, value),
    "host.barrier state": lambda value: dm.host.barrier(state=value),
    **{
        f"sequence.{name} dim": inside(lambda x, value, name=name: getattr(dm.sequence, name)(x, value, "dp"))
        for name in ("slice_sequence", "gather_sequence", "pad_sequence")
    },
    "sequence.roll shift": inside(lambda x, value: dm.sequence.roll(x, value, 0, "dp")),
    "sequence.roll dim": inside(lambda x, value: dm.sequence.roll(x, 1, value, "dp")),
    "sequence.unpad_sequence length": inside(lambda x, value: dm.sequence.unpad_sequence(x, 0, value)),
    "sequence.gather_seq_scatter_heads": inside(
        lambda x, value: dm.sequence.gather_seq_scatter_heads(x, seq_dim=value, head_dim=1, axis="dp")
    ),
    "sequence.gather_heads_scatter_seq": inside(
        lambda x, value: dm.sequence.gather_heads_scatter_seq(x, seq_dim=0, head_dim=value, axis="dp")
    ),
}


@pytest.fixture
def state():
    with dm.session(backend="sim", world_size=8):
        yield dm.init_parallel_state(dp_size=8)
    dm.strict(False)
    dm.debug(False)


def put_back(state):
    """Leave scopes and forget states that a wrong value opened after all."""
    while scope.read() is not None:
        scope.pop(scope.read())
    others = [one for one in registry.states() if one is not state]
    registry.drop(others)
    for name in [name for name in registry.names() if name != "base"]:
        del registry.named[name]


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_value_is_refused_with_an_error_of_dualmesh_or_accepted(call, state):
    strange = {}
    for value in VALUES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                CALLS[call](value)
            except DualmeshError:
                pass
            except Exception as error:
                strange[repr(value)] = f"{type(error).__name__}: {error}"
        put_back(state)
    assert strange == {}


NAMED = {
    "draw(theme=)": lambda value: dm.TopologySpec({"a": 2}).resolve(2).draw(theme=value),
    "role": dm.TopologySpec({"a": 2}).resolve(2).role,
    "StateConfig(dp_mode=)": lambda value: StateConfig(dp_mode=value),
    "preset": lambda value: StateConfig.of({"preset": value}),
    "importer": lambda value: StateConfig.of({"importer": value}),
    "place_of(processes=)": lambda value: testing.place_of("sim", processes=value),
    "run_on": lambda value: testing.run_on(value, len, world_size=1),
    "inject": lambda value: testing.inject(value).__enter__(),
}


@pytest.mark.parametrize("what", NAMED)
def test_what_must_be_one_of_some_names_may_be_anything_and_is_refused(what):
    for value in (np.array([1, 2]), np.array("a"), ["a"], {"a": 1}, {1}, object(), 2.5):
        with pytest.raises(DualmeshError):
            NAMED[what](value)
