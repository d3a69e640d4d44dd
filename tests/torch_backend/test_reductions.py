"""After `dm.sum_gradients` a wrapped gradient is the sum over all tokens, whatever wraps, or an error was raised."""

import numpy as np
import pytest

import dualmesh as dm
from tests.worlds import torch_world

WORLD, LIMIT = 4, 1e-12
WEIGHT = np.arange(1.0, 17.0).reshape(4, 4) / 7
SETTINGS = {
    "dp_shard": {"dp_shard_size": 4},
    "hsdp": {"dp_replicate_size": 2, "dp_shard_size": 2},
    "ulysses": {"dp_shard_size": 2, "ulysses_size": 2},
    "cp": {"dp_shard_size": 2, "cp_size": 2},
    "tp": {"dp_shard_size": 2, "tp_size": 2},
}
EXPERTS = {"ep": {"dp_shard_size": 4, "ep_size": 2}, "hsdp x ep": {**SETTINGS["hsdp"], "ep_size": 2}}


def tokens_of(index):
    """Return the tokens of the rank with an index among those whose tokens differ."""
    return np.random.default_rng(index).normal(size=(3, 4))


def gradient_of(weight, size):
    """Return the gradient of the sum over all tokens of |weight @ token|^2."""
    return sum(2 * weight @ x.T @ x for x in map(tokens_of, range(size)))


def layer(requires_grad=True):
    import torch

    net = torch.nn.Linear(4, 4, bias=False, dtype=torch.float64)
    net.weight = torch.nn.Parameter(torch.from_numpy(WEIGHT.copy()), requires_grad=requires_grad)
    return net


def two_layers():
    import torch

    return torch.nn.Sequential(layer(), layer())


def fsdp1(net, *args, **settings):
    import warnings

    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch calls it deprecated
        return FullyShardedDataParallel(net, *args, device_id=torch.device("cpu"), **settings)


def ddp(net, group, **settings):
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(net, process_group=group, **settings)


def sharded(net, mesh, **settings):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(net, mesh=mesh, **settings)


def whole_gradients(net):
    """Return the whole gradient of every parameter."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    if isinstance(net, FullyShardedDataParallel):
        if net._use_orig_params:
            with FullyShardedDataParallel.summon_full_params(net, with_grads=True):
                return [parameter.grad.numpy().copy() for parameter in net.parameters()]
        (piece,) = [parameter.grad for parameter in net.parameters()]
        found = [piece.clone() for _ in range(WEIGHT.size // piece.numel())]
        if len(found) > 1:
            torch.distributed.all_gather(found, piece, group=net.process_group)
        return [torch.cat(found).numpy().reshape(WEIGHT.shape)]
    grads = [parameter.grad for parameter in net.parameters()]
    return [(grad.full_tensor() if isinstance(grad, DTensor) else grad).numpy().copy() for grad in grads]


# -- gradients -----------------------------------------------------------------------------------------------------


def wrappers(state):
    """Return {name: function that wraps a layer so that it can be made right}."""
    import torch
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import ShardingStrategy

    group = state.group(state.topology.role("loss"))
    ranks = state.ranks(state.topology.role("loss"))
    mesh = DeviceMesh.from_group(group, "cpu", mesh=list(ranks), mesh_dim_names=("all",))

    plan = dm.ShardingPlan({"**": dm.P(state.topology.role("params"))})

    def averaging(net):
        sharded(net, state.fsdp_mesh).set_gradient_divide_factor(2.0)
        return net

    found = {
        "FSDP2": lambda net: sharded(net, state.fsdp_mesh),
        "FSDP2 that was told to divide": averaging,
        "FSDP2, by a plan": lambda net: plan.apply(net, units=""),
        "FSDP2 on a mesh of the same ranks": lambda net: sharded(net, mesh),
        "replicate by FSDP2": lambda net: replicate(net, mesh=mesh),
        "DDP": lambda net: ddp(net, group),
        "DDP, static graph": lambda net: ddp(net, group, static_graph=True, gradient_as_bucket_view=True),
        "FSDP1": lambda net: fsdp1(net, group, use_orig_params=True),
        "FSDP1, flat": lambda net: fsdp1(net, group),
    }
    if state.fsdp_mesh.ndim == 1 and state.fsdp_mesh.size() == 4:
        found["FSDP2 that keeps pairs"] = lambda net: sharded(net, state.fsdp_mesh, reshard_after_forward=2)
        other = DeviceMesh("cpu", torch.tensor([[0, 3], [1, 2]]), mesh_dim_names=("far", "near"))
        found["HSDP on ranks in another order"] = lambda net: sharded(net, other)
    if state.fsdp_mesh.ndim == 2:
        groups = (state.group("dp_shard"), state.group("dp_replicate"))
        strategy = ShardingStrategy.HYBRID_SHARD
        found["FSDP1, hybrid"] = lambda net: fsdp1(net, groups, sharding_strategy=strategy)
    return found


def errors(settings):
    """Return {wrapper: the largest error of a gradient, of two backwards}."""
    import torch

    state = dm.init_parallel_state(**settings)
    axes = state.topology.role("loss")
    x, expected = torch.from_numpy(tokens_of(state.index(axes))), gradient_of(WEIGHT, state.size(axes))
    found = {}
    for name, wrap in wrappers(state).items():
        net = wrap(layer())
        dm.sum_gradients(net)
        dm.sum_gradients(net)
        for _ in range(2):
            net(x).square().sum().backward()
        found[name] = np.abs(whole_gradients(net)[0] - 2 * expected).max() / np.abs(expected).max()
    return found


@pytest.mark.parametrize("kind", SETTINGS)
def test_every_wrapper_sums_over_all_tokens(kind):
    for found in torch_world(errors, SETTINGS[kind], world_size=WORLD):
        assert len(found) >= 9
        assert {name: error for name, error in found.items() if not error < LIMIT} == {}


def accumulated(bucket_view):
    """Return {how a DDP model accumulates: the largest error}; the second layer is used where `uses` says."""
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = two_layers()

        def forward(self, x, uses):
            return self.layers[0](x).square().sum() + (self.layers[1](x).square().sum() if uses else 0)

    state = dm.init_parallel_state(dp_shard_size=4)
    x, once = torch.from_numpy(tokens_of(state.index("dp"))), gradient_of(WEIGHT, 4)
    odd = [2 * WEIGHT @ tokens_of(i).T @ tokens_of(i) for i in (1, 3)]
    net = ddp(Net(), state.group("dp_sp"), find_unused_parameters=True, gradient_as_bucket_view=bucket_view)
    dm.sum_gradients(net)
    found = {}

    def backward(name, uses, first, second):
        net(x, uses).backward()
        for layer, times in enumerate((first, second)):
            error = np.abs(whole_gradients(net)[layer] - times).max() / np.abs(once).max()
            found[f"{name}, layer {layer}"] = error

    backward("once", True, once, once)
    backward("twice", True, 2 * once, 2 * once)
    backward("unused on some", state.index("dp") % 2 == 1, 3 * once, 2 * once + sum(odd))
    backward("unused on all", False, 4 * once, 2 * once + sum(odd))
    with net.no_sync():
        net(x, True).backward()
    backward("after no_sync", True, 6 * once, 4 * once + sum(odd))
    net.zero_grad(set_to_none=False)
    backward("from zeros", True, once, once)
    net.zero_grad()
    with net.no_sync():
        net(x, True).backward()
    dm.sync_gradients(net.parameters())
    found["summed by hand"] = np.abs(whole_gradients(net)[1] - once).max()
    return found


@pytest.mark.parametrize("bucket_view", [False, True])
def test_ddp_adds_to_gradients_that_it_summed_before(bucket_view):
    for found in torch_world(accumulated, bucket_view, world_size=WORLD):
        assert len(found) == 13
        assert {name: error for name, error in found.items() if not error < 1e-11} == {}


def expert_layer(state, form):
    """Return an expert of each ep index, wrapped over the rest of its view; how its gradient is told apart."""
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            whole = torch.from_numpy(np.stack([WEIGHT, WEIGHT[::-1] * 2]))
            self.up = torch.nn.Parameter(whole)

        def forward(self, x):
            rows = dm.ops.all_gather(x, "ep")
            held = self.up.to_local() if hasattr(self.up, "to_local") else self.up
            return torch.stack([rows @ one.T for one in held])

    net = Experts()
    replicas = ("ep_replicate",) if state.enabled("ep_replicate") else ()
    mesh = state.submesh(*replicas, "ep_fsdp")
    if form == "plan":
        return dm.ShardingPlan({"up": dm.P("ep", "ep_fsdp")}).apply(net, units=""), {}
    if form == "DTensor":
        net.up = torch.nn.Parameter(distribute_tensor(net.up.detach(), state.submesh("ep"), [Shard(0)]))
        return sharded(net, mesh, shard_placement_fn=lambda _: Shard(1)), {}
    net.up = torch.nn.Parameter(net.up.detach()[[state.index("ep")]].clone())
    if form == "plain, FSDP2":
        return sharded(net, mesh, shard_placement_fn=lambda _: Shard(1)), {}
    net.up.data.fill_(1.0)  # alike everywhere, so that it must be told
    if form == "plain, DDP":
        return ddp(net, state.group((*replicas, "ep_fsdp"))), {"ep": net.parameters()}
    if form == "constant, FSDP2":
        sharded(net, mesh, shard_placement_fn=lambda _: Shard(1))
        return net, {"ep": net.parameters()}
    raise ValueError(form)


EXPERT_FORMS = ("plan", "DTensor", "plain, FSDP2", "plain, DDP", "constant, FSDP2")


def expert_errors(settings):
    import torch

    state = dm.init_parallel_state(**settings)
    size = state.size(state.topology.role("loss"))
    x = torch.from_numpy(tokens_of(state.index(state.topology.role("loss"))))
    found = {}
    for form in EXPERT_FORMS:
        net, blocks = expert_layer(state, form)
        dm.sum_gradients(net, blocks=blocks)
        net(x).square().sum().backward()
        grad = net.up.grad if hasattr(net, "up") else net.module.up.grad
        found_here = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        constant = form in ("plain, DDP", "constant, FSDP2")
        weights = [np.ones((4, 4))] * 2 if constant else [WEIGHT, WEIGHT[::-1] * 2]
        expected = np.stack([gradient_of(weight, size) for weight in weights])
        if len(found_here) == 1:
            expected = expected[[state.index("ep")]]
        found[form] = np.abs(found_here.numpy() - expected).max() / np.abs(expected).max()
    return found


@pytest.mark.parametrize("kind", EXPERTS)
def test_every_expert_is_summed_over_the_tokens_of_all_ranks(kind):
    for found in torch_world(expert_errors, EXPERTS[kind], world_size=WORLD):
        assert tuple(found) == EXPERT_FORMS
        assert {form: error for form, error in found.items() if not error < LIMIT} == {}


def scoped_errors():
    """Wrap a part of a model in another state than the rest, and sum a layer by hand."""
    import torch

    dm.init_parallel_states(
        {"pairs": dm.parallel_spec(dp_shard_size=2, tp_size=2), "all": dm.parallel_spec(dp_shard_size=4)}, default="all"
    )
    pairs, whole = dm.get_parallel_state_by_name("pairs"), dm.get_parallel_state_by_name("all")
    net = torch.nn.ModuleList([dm.scoped(layer(), "pairs"), layer(), layer(), layer(requires_grad=False)])
    sharded(net[0], pairs.fsdp_mesh)
    sharded(net[1], whole.fsdp_mesh)
    dm.sum_gradients(net, unwrapped=net[2].parameters())
    errors = []
    for part, state in zip(net, (pairs, whole, whole), strict=False):
        axes = state.topology.role("loss")
        part(torch.from_numpy(tokens_of(state.index(axes)))).square().sum().backward()
        if part is net[2]:
            dm.sync_gradients(part)
        errors.append(np.abs(whole_gradients(part)[0] - gradient_of(WEIGHT, state.size(axes))).max())
    return errors


def test_a_scoped_part_is_summed_over_the_tokens_of_its_own_state():
    for errors in torch_world(scoped_errors, world_size=WORLD):
        assert len(errors) == 3
        assert max(errors) < 1e-10


# -- refusals ------------------------------------------------------------------------------------------------------


def refusal_of(prepare):
    """Return the class and text of what is raised; what was wrapped must not have been changed."""
    try:
        prepare()
    except dm.DualmeshError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def refusals(settings, names):
    """Return {name: what was raised}."""
    state = dm.init_parallel_state(**settings, name="state")
    return {name: refusal_of(lambda name=name: REFUSED[name][2](state)) for name in names}


def _sum(net, **settings):
    dm.sum_gradients(net, **settings)


def _partly_wrapped(state):
    net = two_layers()
    sharded(net[0], state.fsdp_mesh)
    _sum(net)


def _ignored(state):
    net = two_layers()
    _sum(sharded(net, state.fsdp_mesh, ignored_params=set(net[1].parameters())))


def _nested(state):
    net = two_layers()
    net[0] = ddp(net[0], state.group("dp_sp"))
    _sum(ddp(net, state.group("dp_sp")))


def _ddp_around_fsdp2(state):
    net = two_layers()
    sharded(net[0], state.fsdp_mesh)
    _sum(ddp(net, state.group("dp_sp"), init_sync=False))  # torch itself cannot send DTensors beside tensors


def _hooked(state):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    net = ddp(layer(), state.group("dp_sp"))
    net.register_comm_hook(state.group("dp_sp"), allreduce_hook)
    _sum(net)


def _fsdp1_hooked(state):
    net = fsdp1(layer(), state.group("dp_sp"))
    net.register_comm_hook(None, lambda hook_state, grad, out: None)
    _sum(net)


def _unfrozen(state):
    net = two_layers()
    net[1].requires_grad_(False)
    wrapped = ddp(net, state.group("dp_sp"))
    net[1].requires_grad_(True)
    _sum(wrapped)


def _added(state):
    net = two_layers()
    wrapped = ddp(net, state.group("dp_sp"))
    net.append(layer())
    _sum(wrapped)


def _switched_off(state):
    net = sharded(layer(), state.fsdp_mesh)
    net.set_requires_gradient_sync(False)
    _sum(net)


def _all_reduce_hook(state):
    net = sharded(layer(), state.fsdp_mesh)
    net.set_all_reduce_hook(lambda grad: None)
    _sum(net)


def _unsharded(state):
    from torch.distributed.fsdp import ShardingStrategy

    _sum(fsdp1(layer(), state.group("dp_sp"), sharding_strategy=ShardingStrategy.NO_SHARD))


def _out_of_order(state):
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    _sum(sharded(layer(), DeviceMesh("cpu", torch.tensor([[3, 0], [2, 1]]), mesh_dim_names=("far", "near"))))


def _composable(state):
    from torch.distributed._composable.replicate import replicate

    _sum(replicate(layer(), process_group=state.group("dp_sp")))


def _copy_over_experts(state):
    _sum(sharded(layer(), state.submesh("ep_fsdp")))


def _replicated_over_experts(state):
    import torch
    from torch.distributed.tensor import Replicate, distribute_tensor

    net = layer()
    net.weight = torch.nn.Parameter(distribute_tensor(net.weight.detach(), state.submesh("ep"), [Replicate()]))
    _sum(sharded(net, state.submesh("ep_fsdp")))


def _another_state(state):
    other = dm.init_parallel_state(dp_shard_size=2, tp_size=2, name="other")
    _sum(sharded(layer(), other.fsdp_mesh))


def _plan(spec, units):
    return lambda state: dm.ShardingPlan({"weight": spec}).apply(layer(), units=units)


ALL = "over the ranks 0, 1, 2, 3"
REFUSED = {
    # name: (settings, parts of the message, what is tried)
    "a model not wrapped": ("dp_shard", ["no wrapper reduces", "'weight'", ALL], lambda _: _sum(layer())),
    "a layer left out": ("dp_shard", ["no wrapper reduces", "'1.weight'", "unwrapped="], _partly_wrapped),
    "an ignored parameter": ("dp_shard", ["no wrapper reduces", "'1.weight'", "unwrapped="], _ignored),
    "unwrapped that is wrapped": (
        "dp_shard",
        ["unwrapped= has 'weight'", "the FSDP2 unit reduces"],
        lambda state: _sum(net := sharded(layer(), state.fsdp_mesh), unwrapped=net.parameters()),
    ),
    "DDP in DDP": ("dp_shard", ["'module.0.module.weight'", "counts ranks twice"], _nested),
    "DDP around FSDP2": ("dp_shard", ["by DistributedDataParallel", "by the FSDP2 unit 'module.0'"], _ddp_around_fsdp2),
    "DDP with a hook": ("dp_shard", ["DistributedDataParallel cannot", "communication hook"], _hooked),
    "FSDP1 with a hook": ("dp_shard", ["FullyShardedDataParallel cannot", "communication hook"], _fsdp1_hooked),
    "unfrozen under DDP": ("dp_shard", ["made when 1 parameters needed gradients, and 2 do now"], _unfrozen),
    "added under DDP": ("dp_shard", ["came after it was made"], _added),
    "FSDP2 switched off": ("dp_shard", ["set_requires_gradient_sync(True)"], _switched_off),
    "FSDP2 with a hook": ("dp_shard", ["set_all_reduce_hook"], _all_reduce_hook),
    "FSDP1 that shards nothing": ("dp_shard", ["FullyShardedDataParallel cannot", "NO_SHARD"], _unsharded),
    "HSDP on groups that torch sorted": (
        "dp_shard",
        ["replicas of different shards are added up", "from_group"],
        _out_of_order,
    ),
    "composable replicate": ("dp_shard", ["replicate() cannot be made a plain sum"], _composable),
    "FSDP2 of another state": ("dp_shard", ["over the ranks 0, 2,", ALL.removeprefix("over ")], _another_state),
    "FSDP2 over part of cp": (
        "cp",
        ["FSDP2 unit sums the gradient of 'weight' over the ranks 0, 2", "State 'state'", "along dp_shard, cp"],
        lambda state: _sum(sharded(layer(), state.submesh("dp_shard"))),
    ),
    "DDP over part of cp": (
        "cp",
        ["DistributedDataParallel sums", "'module.weight' over the ranks 0, 2", "state.group(('dp_shard', 'cp'))"],
        lambda state: _sum(ddp(layer(), state.group("dp"))),
    ),
    "FSDP1 over part of cp": (
        "cp",
        ["FullyShardedDataParallel sums", "over the ranks 0, 2"],
        lambda state: _sum(fsdp1(layer(), state.group("dp"))),
    ),
    "a plan's unit over part of cp": (
        "cp",
        ["'weight'", "P('dp_shard')", "tokens differ along dp_shard, cp"],
        _plan(dm.P("dp_shard"), {"": "dp_shard"}),
    ),
    "DDP over tp too": (
        "tp",
        ["over the ranks 0, 1, 2, 3, but", "the ranks 0, 2"],
        lambda state: _sum(ddp(layer(), state.group("world"))),
    ),
    "HSDP without its replicas": (
        "hsdp",
        ["over the ranks 0, 1, but", "along dp_replicate, dp_shard"],
        lambda state: _sum(sharded(layer(), state.submesh("dp_shard"))),
    ),
    "a plan's copy over ep": (
        "ep",
        ["'weight'", "P('ep_fsdp')", "tokens differ along dp_shard"],
        _plan(dm.P("ep_fsdp"), ""),
    ),
    "a copy over ep": (
        "ep",
        ["leaves out ep", "'weight' has the same values on two", "blocks={'ep'"],
        _copy_over_experts,
    ),
    "a DTensor's copy over ep": ("ep", ["sums the gradient of 'weight' over the ranks 0, 2"], _replicated_over_experts),
    "DDP over ep_fsdp untold": (
        "ep",
        ["over the ranks 0, 2, but", "blocks={axis: parameters}"],
        lambda state: _sum(ddp(layer(), state.group("ep_fsdp"))),
    ),
}


@pytest.mark.parametrize("kind", dict.fromkeys(settings for settings, _, _ in REFUSED.values()))
def test_what_would_not_be_that_sum_is_refused_by_name(kind):
    names = [name for name, (settings, _, _) in REFUSED.items() if settings == kind]
    found = torch_world(refusals, {**SETTINGS, **EXPERTS}[kind], names, world_size=WORLD)[0]
    missing = {name: found[name] for name in names if not all(part in found[name] for part in REFUSED[name][1])}
    assert missing == {}


def after_a_refusal():
    """Return the gradient of a layer that FSDP2 still averages, as a refused model was not changed."""
    import torch

    state = dm.init_parallel_state(dp_shard_size=4)
    net = two_layers()
    sharded(net[0], state.fsdp_mesh)
    refused = refusal_of(lambda: dm.sum_gradients(net))
    net[0](torch.from_numpy(tokens_of(state.index("dp")))).square().sum().backward()
    return refused, np.abs(whole_gradients(net[0])[0] - gradient_of(WEIGHT, 4) / 4).max()


def test_a_refused_model_is_left_as_it_was():
    for refused, error in torch_world(after_a_refusal, world_size=WORLD):
        assert "no wrapper reduces" in refused
        assert error < LIMIT * 100


def flat_refusals():
    import torch

    state = dm.init_parallel_state(dp_shard_size=4)
    found = {}
    for name, settings in {"original": {"use_orig_params": True}, "flat": {}}.items():
        net = fsdp1(layer().float(), state.group("dp_sp"), **settings)  # its own norm takes no float64
        dm.sum_gradients(net)
        net(torch.from_numpy(tokens_of(state.index("dp"))).float()).square().sum().backward()
        plan = dm.ShardingPlan({"**": dm.P()})
        tried = {
            "clip_grad_norm_": lambda net=net: dm.clip_grad_norm_(net, 1.0),
            "clip_grad_norm_ of a list": lambda net=net: dm.clip_grad_norm_(list(net.parameters()), 1.0),
            "global_norm": lambda net=net: dm.global_norm(net),
            "sync_gradients": lambda net=net: dm.sync_gradients(net),
            "plan": lambda net=net, plan=plan: plan.apply(net),
        }
        found[name] = {which: refusal_of(fn) for which, fn in tried.items()}
        own = net.clip_grad_norm_(1e9).item()
        found[name]["its own"] = abs(own / np.linalg.norm(gradient_of(WEIGHT, 4)) - 1)
    wrapped = ddp(layer(), state.group("dp_sp"))
    return found, refusal_of(lambda: dm.sync_gradients(wrapped))


def test_pieces_of_fsdp1_are_never_taken_for_copies():
    for found, of_ddp in torch_world(flat_refusals, world_size=WORLD):
        assert "DistributedDataParallel, which reduces its gradients itself" in of_ddp
        for refused in found.values():
            assert refused.pop("its own") < 1e-6
            assert [text for text in refused.values() if "FullyShardedDataParallel (FSDP1)" not in text] == []
