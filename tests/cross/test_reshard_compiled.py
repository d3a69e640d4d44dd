"""`dm.reshard` between states where a compiler runs the code around it: jax.jit, torch.compile."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import ArgumentError, ShardingError
from dualmesh.testing import assert_same, assert_sharded_as
from tests.cross.test_reshard import SLOW_S, opened
from tests.jax_backend.worker import in_jax
from tests.worlds import torch_world


@in_jax()
def test_inside_jit_both_ends_have_the_same_devices():
    import jax

    spec = dm.TopologySpec({"dp": 2, "sp": 4})
    states = dm.init_parallel_states({"a": spec, "b": dm.TopologySpec({"dp": 4, "sp": 2})})
    dm.init_parallel_state(spec=dm.TopologySpec({"dp": 2, "sp": 2}), ranks=(0, 1, 2, 3), name="half")
    whole = np.arange(64, dtype=np.float32).reshape(8, 8)
    x = dm.distribute(whole, dm.P("dp", "sp"), state=states["a"])
    ways = {"src": ("a", dm.P("dp", "sp")), "dst": ("b", dm.P("dp"))}
    for run in (lambda x: dm.reshard(x, **ways), jax.jit(lambda x: dm.reshard(x, **ways) * 1)):
        y = run(x)
        assert y.sharding.is_equivalent_to(states["b"].sharding(dm.P("dp")), 2)
        assert_sharded_as(y, dm.P("dp"), state=states["b"], values=whole, rtol=0)
    gradient = jax.jit(jax.grad(lambda x: (dm.reshard(x, **ways) ** 2).sum()))(x)
    assert_same("gradient", 2 * whole, gradient, rtol=0)
    with pytest.raises(ShardingError, match=r"inside jit, from State 'a' over .* to State 'half' over"):
        jax.jit(lambda x: dm.reshard(x, src=("a", dm.P()), dst=("half", dm.P())))(x)
    with pytest.raises(ShardingError, match=r"lies on .*but State 'half' is over"):
        dm.reshard(x, src=("half", dm.P()), dst=("a", dm.P()))
    with pytest.raises(ArgumentError, match="reshard: called inside shard_map"):
        dm.shard_map(lambda x: dm.reshard(x, **ways), dm.P("dp"), dm.P("dp"), state=states["a"])(x)


PAIR = {"all": ({"dp": 2, "sp": 1}, None), "one": ({"dp": 1}, (1,))}


def compiled_in_torch():
    """Return, for blocks and for DTensors, the value and gradient eagerly and compiled, and what fullgraph says."""
    import torch

    states = opened(PAIR)
    ways, rank = {"src": ("all", dm.P("dp")), "dst": ("one", dm.P())}, torch.distributed.get_rank()
    whole = np.arange(12.0).reshape(4, 3)

    def fn(x):
        y = dm.reshard(torch.sin(x), **ways)
        return (y * y).sum() * 3

    found = []
    for given in (
        torch.from_numpy(whole[2 * rank : 2 * rank + 2]),
        dm.distribute(whole, dm.P("dp"), state=states["all"]),
    ):
        for run in (fn, torch.compile(fn, backend="aot_eager")):
            x = given.clone().requires_grad_()
            value = run(x)
            value.backward()
            gradient = x.grad.to_local() if hasattr(x.grad, "to_local") else x.grad
            found.append((float(value.to_local() if hasattr(value, "to_local") else value), gradient.numpy()))
    torch._dynamo.reset()
    try:
        torch.compile(fn, backend="aot_eager", fullgraph=True)(given)
    except Exception as error:
        return found, str(error)
    return found, None


def test_torch_runs_reshard_between_two_compiled_pieces_and_fullgraph_says_so():
    whole = np.arange(12.0).reshape(4, 3)
    for rank, (found, said) in enumerate(torch_world(compiled_in_torch, world_size=2, timeout_s=SLOW_S)):
        value = 3 * (np.sin(whole) ** 2).sum() if rank == 1 else 0.0
        gradient = (6 * np.sin(whole) * np.cos(whole))[2 * rank : 2 * rank + 2]
        # Blocks and DTensors, eager and compiled; elements are at most 3.
        assert_same("values", [value] * 4, [one for one, _ in found], rtol=1e-13)
        assert_same("gradients", [gradient] * 4, [one for _, one in found], rtol=3e-15)
        assert "dm.reshard from state to state asks the ranks of both ends" in said
