"""What functions return has memory of its own: the caller may fill a buffer anew at once, on every backend."""

import functools

import numpy as np
import pytest

import dualmesh as dm
from tests.worlds import worlds

WHOLE = np.arange(1024, dtype=np.float32).reshape(16, 64)
SPECS = {"split": dm.P("dp"), "other dim": dm.P(None, "dp"), "everywhere": dm.P()}
SHARING = ["pad_sequence", "unpad_sequence", "all_reduce over size 1"]
"""What says in its docstring or its page that it may return its argument or a view of it."""


def filled_buffer():
    """Return a float32 array whose memory begins where XLA would take it over, filled with other numbers everywhere."""
    room = np.empty(WHOLE.nbytes + 64, np.uint8)
    start = -room.ctypes.data % 64
    buffer = room[start : start + WHOLE.nbytes].view(np.float32).reshape(WHOLE.shape)
    buffer[...] = WHOLE
    return buffer


def changed(backend):
    """Return the names of functions whose results follow what is written to their argument, or to their result."""
    state = dm.init_parallel_state(dp_size=2, name="rows")
    dm.init_parallel_state(spec=dm.TopologySpec({"dp": 2}), name="others")
    is_torch = backend == "torch"
    if is_torch:
        import torch

    def given(buffer):
        """Return the buffer as an array of the framework that shares its memory, where there is such a thing."""
        return torch.from_numpy(buffer) if is_torch else buffer

    def model(x):
        if not is_torch:
            return {"w": x}
        made = torch.nn.Module()
        made.w = torch.nn.Parameter(x)
        return made

    def parameter(made):
        return made.w if is_torch else made["w"]

    calls = {}
    for name, spec in SPECS.items():
        plan = dm.ShardingPlan({"w": spec})
        calls |= {
            f"distribute, {name}": lambda x, spec=spec: dm.distribute(x, spec),
            f"distribute with src, {name}": lambda x, spec=spec: dm.distribute(x, spec, src=0),
            f"distribute with check, {name}": lambda x, spec=spec: dm.distribute(x, spec, check=True),
            f"distribute with pad, {name}": lambda x, spec=spec: dm.distribute(x, spec, pad=True),
            f"shard_local, {name}": lambda x, spec=spec: dm.shard_local(x, spec),
            f"plan.apply, {name}": lambda x, plan=plan: parameter(plan.apply(model(x))),
            f"init_sharded, {name}": lambda x, plan=plan: parameter(dm.init_sharded(lambda: model(x), plan)),
            f"transfer, {name}": lambda x, spec=spec: dm.transfer(
                {"w": x if is_torch else dm.distribute(x, spec)}, src="rows", dst="others", specs=spec
            )["w"],
            f"transfer, same state, {name}": lambda x, spec=spec: dm.transfer(
                {"w": x if is_torch else dm.distribute(x, spec)}, src="rows", dst="rows", specs=spec
            )["w"],
        }
    if is_torch:
        federation = dm.init_parallel_state(spec=dm.FederatedSpec((1, 1)), name="federation")
        for weights in (None, (1, 0)):
            calls[f"federated_mean, {weights}"] = lambda x, weights=weights: dm.federated_mean(
                {"w": x}, federation, weights
            )["w"]
        calls["reshard"] = lambda x: dm.reshard(x, src=("rows", dm.P("dp")), dst=("rows", dm.P("dp")))
        calls["pad_sequence"] = lambda x: dm.sequence.pad_sequence(x, 0, "dp")
        calls["unpad_sequence"] = lambda x: dm.sequence.unpad_sequence(x, 0, 3)
        calls["slice_sequence"] = lambda x: dm.sequence.slice_sequence(x, 0, "dp")
        calls["all_reduce over size 1"] = lambda x: dm.ops.all_reduce(x, "tp")
    for name in ("take", "sum", "gather"):
        calls[f"shard_map, {name}"] = functools.partial(lifted, name)
    found = []
    for name, call in calls.items():
        buffer = filled_buffer()
        made = call(given(buffer))
        before = read(made, state)
        buffer[...] = -1
        after = read(made, state)
        if (after != before).any():
            found.append(name)
        value = dm.to_numpy(made)
        value[...] = -2
        if (read(made, state) != after).any():
            found.append(f"to_numpy of {name}")
    buffer = filled_buffer()
    read_back = dm.to_numpy(given(buffer))
    buffer[...] = -1
    return found + ([] if (read_back == WHOLE).all() else ["to_numpy"])


def lifted(name, x):
    """Lift a function that has nothing to do on its block."""
    axis = "tp"  # of size 1
    ops = {
        "take": lambda x: dm.ops.take_block(x, axis, 0),
        "sum": lambda x: dm.ops.all_reduce(x, axis),
        "gather": lambda x: dm.ops.all_gather(x, axis, 0),
    }
    return dm.shard_map(ops[name], dm.P("dp"), dm.P("dp"))(x)


def read(made, state):
    """Return what this process holds of an array, a copy."""
    return np.concatenate([np.array(x).reshape(-1) for x in held_blocks(made, state)])


def held_blocks(made, state):
    if state.backend == "torch":
        made = made.detach()
        return [(made.to_local() if hasattr(made, "to_local") else made).numpy()]
    if state.backend == "sim":
        return [made.block(rank) for rank in state.members]
    return [np.asarray(shard.data) for shard in made.addressable_shards]


@pytest.mark.parametrize("backend", ["sim", "torch", "jax"])
def test_results_share_no_memory_with_what_they_were_made_of(backend):
    """The layouts in which nothing has to move, too."""
    for found in worlds()[backend](changed, backend, world_size=2):
        assert found == (SHARING if backend == "torch" else [])
