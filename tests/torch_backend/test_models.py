"""Torch modules by a plan: DTensors, FSDP2 with experts on their view, modules born sharded; against one process."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.sharding.partition_spec import canonical
from tests.worlds import torch_world

SLOW_S = 300.0


def network(seed=3):
    """Return a module with tied weights, a buffer, and weights that are drawn after their module was taken."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
            self.norm = nn.LayerNorm(8)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(32, 8)
            self.layers = nn.ModuleList([Block(), Block()])
            self.head = nn.Linear(8, 32, bias=False)
            self.head.weight = self.embed.weight
            self.scale = nn.Parameter(torch.full((4,), 0.5))
            self.register_buffer("steps", torch.arange(3))
            for layer in self.layers:
                nn.init.normal_(layer.up.weight, std=0.02)
                nn.init.xavier_uniform_(layer.down.weight)
                layer.up.bias.data.zero_()
            nn.init.trunc_normal_(self.embed.weight, std=0.1)

    torch.manual_seed(seed)
    return Net()


PLAN = dm.ShardingPlan(
    {
        "embed.weight": dm.P(("tp", "fsdp")),
        "layers.*.up.weight": dm.P("tp", "fsdp"),
        "layers.*.down.weight": dm.P("fsdp", "tp"),
        "layers.*.up.bias": dm.P("tp"),
        "**": dm.P(),
    }
)
SPEC = dm.TopologySpec({"fsdp": 2, "tp": 2})


def made_both_ways():
    """Return per way {path: (whole value, local shape)}, ties, and what was seen while the module was made."""
    import torch

    dm.init_parallel_state(spec=SPEC)
    seen = {}

    def watched():
        net = network()
        if not net.scale.is_meta:  # not the sketch
            seen["embed"] = tuple(net.embed.weight.to_local().shape)
            seen["layer"] = tuple(net.layers[1].up.weight.to_local().shape)
        return net

    born, applied = dm.init_sharded(watched, PLAN), PLAN.apply(network())
    after = torch.rand(2)  # the generator is where one process has it
    found = []
    for net in (born, applied):
        values = {name: (dm.to_numpy(p), tuple(p.to_local().shape)) for name, p in net.named_parameters()}
        found.append((values, net.head.weight is net.embed.weight, net.steps.tolist()))
    described = {path: tuple(x.to_local().shape) for path, x in PLAN.abstract(network()).items()}
    metas = all(x.to_local().is_meta for x in PLAN.abstract(network()).values())
    meshes = {mesh.mesh.tolist()[0][1] for mesh, _ in PLAN.shardings(network()).values()}
    return found, seen, described, metas, meshes, after.tolist()


def in_one_process():
    import torch

    values = {name: p.detach().numpy() for name, p in network().named_parameters()}
    return values, torch.rand(2).tolist()


def test_a_module_is_cut_by_the_plan_and_born_with_the_values_of_one_process():
    ((values, after),) = torch_world(in_one_process, world_size=1)
    local = {
        "embed.weight": (8, 8),
        **{f"layers.{i}.up.weight": (8, 4) for i in (0, 1)},
        **{f"layers.{i}.down.weight": (4, 8) for i in (0, 1)},
        **{f"layers.{i}.up.bias": (8,) for i in (0, 1)},
    }
    for found, seen, described, metas, meshes, generator in torch_world(made_both_ways, world_size=4, timeout_s=SLOW_S):
        assert seen == {"embed": (8, 8), "layer": (8, 4)}
        for parameters, tied, buffer in found:
            assert parameters.keys() == values.keys()
            assert tied
            assert buffer == [0, 1, 2]
            for name, (value, shape) in parameters.items():
                np.testing.assert_array_equal(value, values[name], err_msg=name)
                assert shape == local.get(name, value.shape)
                assert shape == described[name]
        assert metas
        assert meshes == {1}
        assert generator == after


def refusals():
    import torch
    from torch import nn

    dm.init_parallel_state(spec=dm.TopologySpec({"fsdp": 2, "tp": 2}, roles={"params": "fsdp"}))
    net = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 4, bias=False))
    calls = {
        "size": lambda: dm.ShardingPlan({"0.weight": dm.P(("fsdp", "tp")), "**": dm.P()}).apply(net),
        "unit": lambda: dm.ShardingPlan({"**": dm.P()}).apply(net, units=("0", "")),
        "order": lambda: dm.ShardingPlan({"**": dm.P(None)}).apply(net, units="1x"),
        "other": lambda: dm.init_sharded(lambda made=[]: made.append(1) or nn.Linear(4, 4, bias=len(made) > 1), WEIGHT),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except dm.DualmeshError as error:
            found[name] = str(error)
    return found, all(type(p) is torch.nn.Parameter for p in net.parameters())


WEIGHT = dm.ShardingPlan({"weight": dm.P("fsdp"), "bia*": dm.P()}, default=dm.P())


def test_what_does_not_fit_is_refused_by_name_and_changes_nothing():
    ((found, untouched),) = torch_world(refusals, world_size=4, timeout_s=SLOW_S)[:1]
    assert untouched
    assert "dim 0 of shape (3, 6) has size 3, which ('fsdp', 'tp') of size 4 does not divide: 0.weight" in found["size"]
    assert "splits every parameter of a unit over fsdp, but '0.weight' has P()" in found["unit"]
    assert "the unit '1x' matches no module" in found["order"]
    assert found.keys() == {"size", "unit", "order", "other"}


def experts(seed=4, axis="ep"):
    import torch
    from torch import nn

    class Experts(nn.Module):
        """Adds up all experts; each rank has some of them, and the rows of all are brought together."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 8, 8, dtype=torch.float64) / 4)

        def forward(self, x):
            weight = self.weight.to_local() if hasattr(self.weight, "to_local") else self.weight
            if weight.shape[0] == 4:
                return torch.tanh(torch.einsum("bi,eij->ebj", x, weight)).sum(0)
            rows = dm.ops.all_gather(x, axis)
            return dm.ops.reduce_scatter(torch.tanh(torch.einsum("bi,eij->ebj", rows, weight)).sum(0), axis)

    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8).double(), Experts(), nn.Linear(8, 8).double())


EXPERTS = dm.ShardingPlan(
    {"1.weight": dm.P("ep", "ep_fsdp"), "*.weight": dm.P(None, "dp_shard_sp"), "**": dm.P("dp_shard_sp")}
)


USUAL = dm.parallel_spec(dp_replicate_size=1, dp_shard_size=2, ulysses_size=2, ep_size=2)
ROLES = {"data": ("rep", "all"), "params": ("all",), "loss": ("rep", "all"), "replicate": ("rep",)}
FREE = {
    "usual": (USUAL, EXPERTS, ("1", ""), "ep", (2, 4, 8)),
    "free names": (
        dm.TopologySpec({"rep": 1, "all": 4}, views={"v": dm.View(("all",), {"few": 2, "mine": 2})}, roles=ROLES),
        dm.ShardingPlan({"1.weight": dm.P("mine", "few"), "*.weight": dm.P(None, "all"), "**": dm.P("all")}),
        {"1": "few", "": None},
        "mine",
        (2, 4, 8),
    ),
    "free names and replicas": (
        dm.TopologySpec({"rep": 2, "all": 2}, views={"v": dm.View(("all",), {"few": 1, "mine": 2})}, roles=ROLES),
        dm.ShardingPlan({"1.weight": dm.P("mine", "few"), "*.weight": dm.P(None, "all"), "**": dm.P("all")}),
        {"1": "few", "": None},
        "mine",
        (2, 8, 8),
    ),
}


def trained(steps, spec, plan, units, axis):
    """Train on this rank's rows; return all parameters, the local shape of the experts, misread layouts."""
    import torch

    state = dm.init_parallel_state(spec=spec)
    whole = experts(axis=axis)
    specs = {path: plan.spec_of(path, value.shape, state.topology) for path, value in whole.named_parameters()}
    net = plan.apply(whole, units=units)
    dm.sum_gradients(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        x, y = batch(step)
        index, size = state.index("world"), state.size("world")
        mine = slice(index * 8 // size, (index + 1) * 8 // size)
        optimizer.zero_grad()
        loss = ((net(x[mine]) - y[mine]) ** 2).sum()
        objective, _ = dm.token_mean(loss, 8 // size)
        objective.backward()
        optimizer.step()
    found = {name: dm.to_numpy(p) for name, p in net.named_parameters()}
    read = {name: state.spec_of(p) for name, p in net.named_parameters()}
    wrong = {name: spec for name, spec in read.items() if spec != canonical(state.topology, specs[name])}
    return found, tuple(net[1].weight.to_local().shape), wrong


def batch(step):
    import torch

    draw = np.random.default_rng(step)
    return [torch.from_numpy(draw.normal(size=(8, 8))) for _ in range(2)]


def trained_in_one_process(steps):
    import torch

    net = experts()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        (((net(x) - y) ** 2).sum() / 8).backward()
        optimizer.step()
    return {name: p.detach().numpy() for name, p in net.named_parameters()}


@pytest.mark.parametrize("name", FREE)
def test_fsdp2_with_experts_on_their_view_trains_as_one_process_does(name):
    *given, local = FREE[name]
    (wanted,) = torch_world(trained_in_one_process, 2, world_size=1)
    for found, shape, wrong in torch_world(trained, 2, *given, world_size=4, timeout_s=SLOW_S):
        assert shape == local
        assert wrong == {}
        assert found.keys() == wanted.keys()
        for path, value in wanted.items():
            np.testing.assert_allclose(found[path], value, rtol=1e-11, atol=1e-12, err_msg=path)


def refused_units(cases):
    """Return what is said of units whose axes are not known or do not fit, and whether nothing was wrapped."""
    import torch

    said = []
    for name, (spec, weight, units) in cases.items():
        dm.init_parallel_state(spec=spec, name=name)
        net = experts(axis="mine")
        plan = dm.ShardingPlan({"1.weight": weight, "*.weight": dm.P(None, "all"), "**": dm.P("all")})
        with dm.use_parallel_state(name):
            try:
                plan.apply(net, units=units)
            except dm.DualmeshError as error:
                said.append(str(error))
        assert all(type(parameter) is torch.nn.Parameter for parameter in net.parameters())
    return said


def test_units_on_axes_of_any_name_are_told_theirs_or_refused_by_name():
    free, spanned = (
        dm.TopologySpec({"rep": 2, "all": 2}, views={"v": dm.View(over, axes)}, roles=ROLES)
        for over, axes in ((("all",), {"few": 1, "mine": 2}), (("rep", "all"), {"mine": 4, "few": 1}))
    )
    cases = {
        "unsaid": (free, dm.P("mine", "few"), ("1", "")),
        "unknown": (free, dm.P("mine", "few"), {"1": "fw", "": None}),
        "elsewhere": (free, dm.P("mine", "few"), {"1": "all", "": None}),
        "spanned": (spanned, dm.P("mine", "few"), {"1": "few", "": None}),
    }
    for said in torch_world(refused_units, cases, world_size=4, timeout_s=SLOW_S):
        unsaid, unknown, elsewhere, spanned = said
        assert "view 'v' does not say which of its axes shards parameters" in unsaid
        assert "units={'1': 'axis'}" in unsaid
        assert "no axis 'fw'" in unknown
        assert "FSDP2 splits every parameter of a unit over all, but '1.weight' has P('mine', 'few')" in elsewhere
        assert "view 'v' spans rep" in spanned


def beside_tp():
    spec = dm.parallel_spec(dp_shard_size=2, tp_size=2)
    dm.init_parallel_state(spec=spec)
    net = experts()[0]
    plan = dm.ShardingPlan({"weight": dm.P(("tp", "dp_shard_sp")), "bias": dm.P("dp_shard_sp")})
    whole = {name: p.detach().numpy().copy() for name, p in net.named_parameters()}
    plan.apply(net, units="")
    return [np.array_equal(dm.to_numpy(p), whole[name]) for name, p in net.named_parameters()], [
        (
            tuple(p.to_local().shape),
            p.to_local().detach().numpy()[0, 0] if p.dim() == 2 else None,
            whole["weight"][:, 0],
        )
        for p in net.parameters()
    ]


def test_fsdp2_beside_tensor_parallelism_gives_every_rank_the_block_of_the_spec():
    for rank, (equal, blocks) in enumerate(torch_world(beside_tp, world_size=4, timeout_s=SLOW_S)):
        assert equal == [True, True]
        fsdp, tp = divmod(rank, 2)
        shape, first, column = blocks[0]
        assert shape == (2, 8)
        assert first == column[(tp * 2 + fsdp) * 2]
        assert blocks[1][0] == (4,)


def wrapped_names():
    import torch
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    state = dm.init_parallel_state(spec=dm.TopologySpec({"fsdp": 1}))
    net = network()
    net.layers[0] = checkpoint_wrapper(net.layers[0])
    return [path for path, _ in state.models.parameters(torch.compile(net, backend="eager"))]


def test_what_wrappers_put_into_names_is_no_part_of_a_path():
    (found,) = torch_world(wrapped_names, world_size=1)
    assert found[:4] == ["scale", "embed.weight", "layers.0.up.weight", "layers.0.up.bias"]
    assert not [path for path in found if "_" in path]


def test_units_are_for_modules(world):
    dm.init_parallel_state(dp_size=8)
    with pytest.raises(dm.errors.ArgumentError, match="units="):
        dm.ShardingPlan({"**": dm.P("dp")}).apply({"w": np.arange(8)}, units="w")
