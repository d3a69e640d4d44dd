"""FSDP2, DDP and plain parameters on a state's meshes train as one process does."""

import numpy as np
import pytest

import dualmesh as dm
from tests.worlds import torch_world

STEPS = 3


def network():
    import torch

    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)).double()


def batch(step, size):
    random = np.random.default_rng(step)
    return random.normal(size=(size, 6)), random.normal(size=(size, 4))


def trained(wrapping, settings):
    """Train on this rank's rows of unequal weight; return all parameters afterwards."""
    import torch

    state = dm.init_parallel_state(**settings)
    net = wrapped(network(), wrapping, state)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        index, size = state.index("dp_sp"), state.size("dp_sp")
        x, y = (torch.from_numpy(part)[index::size] for part in batch(step, 8))
        optimizer.zero_grad()
        loss = ((net(x) - y) ** 2).sum()
        objective, _ = dm.token_mean(loss, len(x))
        objective.backward()
        if wrapping == "plain":
            dm.sync_gradients(net)
        optimizer.step()
    return [dm.to_numpy(p) for p in net.parameters()]


def wrapped(net, wrapping, state):
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if wrapping == "fsdp2":
        for layer in (net[0], net[2]):
            fully_shard(layer, mesh=state.fsdp_mesh)
        fully_shard(net, mesh=state.fsdp_mesh)
    if wrapping == "ddp":
        net = DistributedDataParallel(net, process_group=state.group("dp_sp"))
    if wrapping != "plain":
        dm.sum_gradients(net)
        dm.sum_gradients(net)
    return net


def in_one_process():
    import torch

    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = map(torch.from_numpy, batch(step, 8))
        optimizer.zero_grad()
        (((net(x) - y) ** 2).sum() / len(x)).backward()
        optimizer.step()
    return [p.detach().numpy() for p in net.parameters()]


@pytest.mark.parametrize("wrapping", ["fsdp2", "ddp", "plain"])
def test_wrapped_training_equals_one_process(wrapping):
    settings = {"dp_replicate_size": 2, "ulysses_size": 2}
    (expected,) = torch_world(lambda: in_one_process(), world_size=1)
    for found in torch_world(trained, wrapping, settings, world_size=4):
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-12, atol=1e-13)


def meshes():
    state = dm.init_parallel_state(dp_replicate_size=2, dp_shard_size=2, tp_size=2, ep_size=2)
    fsdp, tp = state.fsdp_mesh, state.submesh("tp")
    of_view = [("ep",), ("ep_fsdp",), ("ep_replicate", "ep_fsdp"), ("ep_fsdp", "ep"), ("ep_replicate", "ep_fsdp", "ep")]
    return {
        "fsdp": (fsdp.mesh_dim_names, fsdp.mesh.tolist()),
        "tp": tp.mesh.tolist(),
        "one root": fsdp._get_root_mesh() is tp._get_root_mesh(),
        "one root of the view": len({id(state.submesh(*axes)._get_root_mesh()) for axes in of_view}) == 1,
        "view": [state.submesh(*axes).mesh.tolist() for axes in of_view],
        "cached": state.submesh("tp") is tp,
        "groups": fsdp.get_group("dp_replicate") is state.group("dp_replicate") and tp.get_group() is state.group("tp"),
        "whole": state.mesh.mesh_dim_names == state.topology.base_axes,
    }


def test_meshes_used_together_are_cut_from_one_root_on_the_pools_groups():
    found = torch_world(meshes, world_size=8)
    assert found[3]["fsdp"] == (("dp_replicate", "dp_shard"), [[1, 3], [5, 7]])
    assert found[3]["tp"] == [2, 3]
    assert found[3]["view"] == [[1, 3], [3], [[3], [7]], [[1, 3]], [[[1, 3]], [[5, 7]]]]
    for each in found:
        assert each["one root"]
        assert each["one root of the view"]
        assert each["cached"]
        assert each["groups"]
        assert each["whole"]


def in_own_placements():
    import torch

    dm.init_parallel_state(spec=dm.TopologySpec({"a": 2, "b": 2}))
    specs = {"x": dm.P("a"), "w": dm.P(None, "b"), "u": dm.P(("b", "a")), "r": dm.P()}
    values = {key: dm.distribute(np.arange(16.0).reshape(4, 4) + 1, spec) for key, spec in specs.items()}

    def each(v):
        return sum(dm.ops.all_reduce((v[key] ** 2).sum(), specs[key].axes or "a") for key in specs) / 4

    lifted = dm.shard_map(each, (specs,), dm.P(partial=("a", "b")))
    _, grads = dm.value_and_grad(lifted)(values)
    return (
        [grads[key].placements == values[key].placements for key in specs],
        [values[key].grad is None and not values[key].requires_grad for key in specs],
        all(isinstance(grad, torch.Tensor) for grad in grads.values()),
    )


def test_gradients_come_in_the_inputs_own_placements_and_leave_nothing_behind():
    assert torch_world(in_own_placements, world_size=4) == [([True] * 4, [True] * 4, True)] * 4


def captured():
    import torch

    dm.init_parallel_state(spec=dm.TopologySpec({"a": 2}))
    w = torch.nn.Parameter(dm.distribute(np.ones(4), dm.P("a")))
    try:
        dm.shard_map(lambda x: x * w, dm.P("a"), dm.P("a"))(np.ones(4))
    except dm.DualmeshError as error:
        return type(error).__name__, "'w'" in str(error)
    return None


def test_a_captured_dtensor_that_needs_a_gradient_is_refused_by_name():
    assert torch_world(captured, world_size=2) == [("ArrayTypeError", True)] * 2


def experts():
    spec = dm.parallel_spec(dp_shard_size=2, ulysses_size=2, ep_size=2)
    other = dm.View(over=("dp_shard", "ulysses"), axes={"emb": 2, "emb_fsdp": 2})
    spec = dm.TopologySpec(spec.axes, spec.combined, {**spec.views, "emb": other}, spec.roles)
    dm.init_parallel_state(spec=spec)
    whole = np.arange(32.0).reshape(4, 8)
    back = [dm.to_numpy(dm.distribute(whole, p)).tolist() for p in (dm.P("ep", "ep_fsdp"), dm.P("emb_fsdp"))]
    try:
        dm.distribute(whole, dm.P("ep", "emb"))
    except dm.DualmeshError as error:
        return back == [whole.tolist()] * 2, type(error).__name__, "ep" in str(error) and "emb" in str(error)
    return None


def test_arrays_lie_on_one_view_at_a_time():
    found = torch_world(experts, world_size=4)
    assert [one[0] for one in found] == [True] * 4
    assert {one[2] for one in found} == {True}
