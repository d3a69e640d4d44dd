"""Norms and clipping count every element of a model once, however its parameters are held."""

import math

import numpy as np
import pytest

import dualmesh as dm
from tests.worlds import torch_world

ORDERS = (2.0, 1.0, 3.0, 0.5, math.inf)
SHAPES = {"dense": (8, 6), "vector": (5,), "experts": (4, 8, 3), "columns": (6, 4), "alike": (3,)}


def wholes():
    """Draw one global gradient of every kind; scales differ, so that one counted wrongly shows."""
    draw = np.random.default_rng(5)
    return {name: draw.normal(size=shape) * 3.0**i for i, (name, shape) in enumerate(SHAPES.items())}


def with_gradient(tensor):
    """Return a parameter whose gradient is the tensor."""
    import torch

    parameter = torch.nn.Parameter(torch.zeros_like(tensor))
    parameter.grad = tensor
    return parameter


def sharded(block, mesh):
    """Return a DTensor as FSDP2 makes it: dim 0 over the last mesh dim, replicas over the first of two."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    return distribute_tensor(block, mesh, [*[Replicate()] * (mesh.ndim - 1), Shard(0)])


def model(state):
    """Return parameters with gradients, and which of them are blocks: dense, experts over their view, columns."""
    import torch

    values = {name: torch.from_numpy(value) for name, value in wholes().items()}
    ep, tp = state.index("ep"), state.index("tp")
    replicas = ("ep_replicate",) if state.enabled("ep_replicate") else ()
    experts = values["experts"].chunk(state.size("ep"))[ep]
    parameters = {
        "dense": with_gradient(sharded(values["dense"], state.fsdp_mesh)),
        "vector": with_gradient(sharded(values["vector"], state.fsdp_mesh)),
        "experts": with_gradient(sharded(experts, state.submesh(*replicas, "ep_fsdp"))),
        "columns": with_gradient(values["columns"].chunk(state.size("tp"), 1)[tp].clone()),
        "alike": with_gradient(values["alike"].clone()),
    }
    return parameters, {"tp": [parameters["columns"]]}


def clipped(settings, order, max_norm):
    """Return the norm, the factor found in every gradient, and whether what was scaled is the same everywhere."""
    state = dm.init_parallel_state(**settings)
    parameters, blocks = model(state)
    locals_of = {name: _local(parameter.grad).clone() for name, parameter in parameters.items()}
    tied = [*parameters.values(), parameters["dense"]]
    norm = dm.clip_grad_norm_(tied, max_norm, order, blocks=blocks)
    factors = [
        (_local(parameters[name].grad) / before).flatten().numpy()
        for name, before in locals_of.items()
        if before.numel()
    ]
    return norm.item(), np.concatenate(factors), str(norm.dtype)


def _local(gradient):
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (4, {"dp_shard_size": 4, "ep_size": 2}),
        (4, {"dp_shard_size": 2, "tp_size": 2, "ep_size": 2}),
        (8, {"dp_replicate_size": 2, "dp_shard_size": 2, "tp_size": 2, "ep_size": 2}),
        (8, {"dp_shard_size": 2, "ulysses_size": 4, "ep_size": 4}),
    ],
)
def test_the_norm_of_a_whole_model_is_that_of_one_process(world, settings, order):
    flat = np.concatenate([value.reshape(-1) for value in wholes().values()])
    expected = np.abs(flat).max() if order == math.inf else (np.abs(flat) ** order).sum() ** (1 / order)
    for max_norm in (0.25 * expected, 4 * expected) if order == 2 else (0.25 * expected,):
        factor = min(1.0, max_norm / (expected + 1e-6))
        found = torch_world(clipped, settings, order, max_norm, world_size=world)
        assert len({norm for norm, _, _ in found}) == 1
        for norm, factors, dtype in found:
            assert dtype == "torch.float64"
            np.testing.assert_allclose(norm, expected, rtol=1e-13)
            np.testing.assert_allclose(factors, factor, rtol=1e-12)


PIPELINES = {
    "pp": (dm.parallel_spec(pp_size=4, dp_size=2), "pp"),
    "stage": (dm.TopologySpec({"stage": 4, "pp": 2}, roles={"data": "pp", "loss": "pp", "stages": "stage"}), "stage"),
    "two axes, one name": (
        dm.TopologySpec({"a": 2, "dp": 2, "b": 2}, {"p": ("a", "b")}, roles={"data": "dp", "stages": ("a", "b")}),
        "p",
    ),
    "a view's axis": (
        dm.TopologySpec({"all": 8}, views={"v": dm.View("all", {"s": 4, "d": 2})}, roles={"data": "d", "stages": "s"}),
        "s",
    ),
}
"""Specs of 4 stages of 2 ranks each, and the name of the axis of stages."""


def staged(spec, axis):
    """Clip a pipeline whose second stage has other parameters and whose third and fourth have none."""
    import torch

    state = dm.init_parallel_state(spec=spec)
    stage = state.index(axis)
    own = [[[3.0], [1.0, 2.0]], [[4.0, 5.0, 6.0], [7.0]], [], []][stage]
    parameters = [with_gradient(torch.tensor(value, dtype=torch.float64)) for value in own]
    alike = dm.clip_grad_norm_(parameters, 100.0, blocks={axis: []})
    largest = dm.clip_grad_norm_(parameters, 100.0, math.inf)
    norm = dm.clip_grad_norm_(iter(parameters), 1.0)
    return norm.item(), largest.item(), alike.item(), [parameter.grad.tolist() for parameter in parameters]


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_stages_of_a_pipeline_count_once_each_also_those_without_parameters(pipeline):
    """However its axes are spelt, and also where another axis is called `pp`."""
    spec, axis = PIPELINES[pipeline]
    expected = math.sqrt(sum(n * n for n in (3, 1, 2, 4, 5, 6, 7)))
    index = [spec.resolve(8).index(axis, rank) for rank in range(8)]
    for rank, (norm, largest, alike, gradients) in enumerate(torch_world(staged, spec, axis, world_size=8)):
        assert (norm, largest) == (pytest.approx(expected, rel=1e-7), 7.0)
        assert alike == pytest.approx(math.sqrt(expected**2 - 49), rel=1e-7)  # [3.0] and [7.0] counted as copies
        whole = [[[3.0], [1.0, 2.0]], [[4.0, 5.0, 6.0], [7.0]], [], []][index[rank]]
        for one, other in zip(whole, gradients, strict=True):
            np.testing.assert_allclose(other, np.array(one) / (expected + 1e-6), rtol=1e-6)


def copied_and_staged(spec):
    """Return the norm of one plain tensor, alike on all ranks but for its value per rank of the first axis."""
    import torch

    state = dm.init_parallel_state(spec=spec)
    value = [3.0, 4.0][state.index("pp")] if "stages" in state.topology.spec.roles else 3.0
    return dm.clip_grad_norm_([with_gradient(torch.tensor([value], dtype=torch.float64))], 1e9).item()


def test_an_axis_called_pp_has_copies_unless_the_role_says_stages():
    """A name is no role: copies along `pp` count once, and stages with the role each."""
    for roles, expected in (({"data": "pp", "loss": "pp"}, 3.0), ({}, 3.0), ({"stages": "pp"}, 5.0)):
        found = torch_world(copied_and_staged, dm.TopologySpec({"pp": 2}, roles=roles), world_size=2)
        assert found == [pytest.approx(expected, rel=1e-13)] * 2


def staged_elsewhere(spec):
    """Return the norm, in a state without stages, of DTensors on the mesh of a registered one that has some."""
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    base = dm.init_parallel_state(spec=dm.TopologySpec({"every": 4}), name="base")
    state = dm.init_parallel_state(spec=spec, name="staged")
    whole = torch.arange(1.0, 5.0, dtype=torch.float64) * (10.0 if state.index("x") else 1.0)
    own = with_gradient(distribute_tensor(whole, state.submesh("dp"), [Shard(0)], src_data_rank=None))
    with dm.use_parallel_state(base):
        return dm.clip_grad_norm_([own], 1e9).item()


def test_stages_of_another_registered_state_are_told_apart_by_its_role():
    """Along its stages every index has an array of its own."""
    one, ten = (float((np.arange(1.0, 5.0) ** 2).sum()) * scale for scale in (1, 100))
    spec = dm.TopologySpec({"x": 2, "dp": 2}, roles={"data": "dp", "stages": "x"})
    assert torch_world(staged_elsewhere, spec, world_size=4) == [pytest.approx(math.sqrt(one + ten), rel=1e-13)] * 4


def partly_held():
    """Return norms of tensors that the first rank, and others, do not hold."""
    import torch

    state = dm.init_parallel_state(dp_size=4)
    rank = state.index("dp")
    values = [{}, {"a": 3.0}, {"a": 3.0, "b": 4.0, "c": 5.0}, {"b": 4.0, "d": 6.0}][rank]
    sizes = {"a": 1, "b": 2, "c": 3, "d": 1}
    tree = {name: torch.full((sizes[name],), value, dtype=torch.float64) for name, value in values.items()}
    parameters = {name: with_gradient(value.clone()) for name, value in tree.items()}
    norms = [dm.global_norm(tree, order).item() for order in ORDERS]
    clipped = dm.clip_grad_norm_(parameters, 2.0).item()
    return norms, clipped, {name: parameter.grad[0].item() for name, parameter in parameters.items()}


def test_what_only_some_ranks_hold_counts_at_the_first_that_does():
    """`a` and `d` look alike; their names tell them apart."""
    every = np.repeat([3.0, 4.0, 5.0, 6.0], [1, 2, 3, 1])
    expected = [every.max() if order == math.inf else (every**order).sum() ** (1 / order) for order in ORDERS]
    for norms, clipped, gradients in torch_world(partly_held, world_size=4):
        np.testing.assert_allclose(norms, expected, rtol=1e-13)
        assert clipped == pytest.approx(expected[0], rel=1e-13)
        for name, value in gradients.items():
            assert value == pytest.approx({"a": 3, "b": 4, "c": 5, "d": 6}[name] * 2 / (expected[0] + 1e-6))


def of_several_states(named):
    """Return norms in base of modules that lie on the meshes of two other states, each on half of the ranks."""
    import torch
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    base = dm.init_parallel_state(dp_size=4, tp_size=2, name="base")
    thinker = dm.init_parallel_state(dp_shard_size=2, tp_size=2, ranks=range(4), name="thinker")
    talker = dm.init_parallel_state(dp_replicate_size=2, tp_size=2, ranks=range(4, 8), name="talker")
    name, state = ("thinker", thinker) if thinker.is_member else ("talker", talker)
    scale = 1.0 if name == "thinker" else 10.0
    whole = torch.arange(1.0, 9.0, dtype=torch.float64).reshape(4, 2) * scale
    module = torch.nn.Module()
    for place, (mesh, placements) in enumerate(
        [
            (state.fsdp_mesh, [Replicate()] * (state.fsdp_mesh.ndim - 1) + [Shard(0)]),
            (state.submesh("tp"), [Shard(1)]),
            (state.mesh, [Replicate()] * state.mesh.ndim),
        ][: 3 if named else 1]
    ):
        laid_out = distribute_tensor(whole * (place + 1), mesh, placements, src_data_rank=None)
        module.register_parameter(f"{name}{place}", with_gradient(laid_out))
    if named:
        module.register_parameter(name, with_gradient(torch.tensor([scale], dtype=torch.float64)))
    given = module if named else list(module.parameters())
    with dm.use_parallel_state(base):
        return [dm.clip_grad_norm_(given, 1e9, order).item() for order in ORDERS]


@pytest.mark.parametrize("named", [True, False], ids=["a module", "a list"])
def test_modules_of_several_states_are_clipped_together_in_one_that_has_all_ranks(named):
    whole = np.arange(1.0, 9.0)
    each = np.concatenate([whole, 2 * whole, 3 * whole, [1.0]]) if named else whole
    every = np.concatenate([each, 10 * each])
    expected = [every.max() if order == math.inf else (every**order).sum() ** (1 / order) for order in ORDERS]
    for norms in torch_world(of_several_states, named, world_size=8):
        np.testing.assert_allclose(norms, expected, rtol=1e-13)


def sparse():
    """Clip and sum gradients of an embedding that is used, and then sparse, on some ranks only."""
    import torch

    state = dm.init_parallel_state(dp_size=4)
    rank = state.index("dp")
    net = torch.nn.Module()
    net.table = torch.nn.Embedding(5, 2, sparse=True)
    net.scale = torch.nn.Parameter(torch.ones(1))
    if rank in (1, 2):
        (net.table(torch.tensor([rank, 3, 3])).sum() * (rank + 1)).backward()
    net.scale.grad = torch.full((1,), float(rank))
    dm.sync_gradients(net)
    summed = net.table.weight.grad.clone()
    net.table.weight.grad = net.table.weight.grad.to_sparse() if rank % 2 == 0 else net.table.weight.grad
    norm = dm.clip_grad_norm_(net, 1.0).item()
    return summed.numpy(), norm, net.table.weight.grad.to_dense().numpy(), net.scale.grad.item()


def test_sparse_gradients_of_some_ranks_count_and_are_summed_as_dense_ones_do():
    table = np.zeros((5, 2))
    table[1], table[2], table[3] = 2, 3, 2 * (2 + 3)
    expected = math.sqrt((table**2).sum() + 36)
    for summed, norm, scaled, scale in torch_world(sparse, world_size=4):
        np.testing.assert_array_equal(summed, table)
        assert norm == pytest.approx(expected, rel=1e-6)
        np.testing.assert_allclose(scaled, table / (expected + 1e-6), rtol=1e-6)
        assert scale == pytest.approx(6 / (expected + 1e-6))


def odd_values():
    """Return what norms say of NaN, infinity, nothing, half precision, and of values still to be summed."""
    import torch
    from torch.distributed.tensor import DTensor, Partial

    state = dm.init_parallel_state(dp_size=4)
    rank, said = state.index("dp"), {}
    mesh = state.fsdp_mesh
    partial = DTensor.from_local(torch.full((2,), float(rank)), mesh, [Partial()], run_check=False)
    for name, value in {
        "nan": torch.tensor([1.0, math.nan if rank == 2 else 0.0]),
        "infinite": torch.tensor([1.0, math.inf if rank == 3 else 0.0]),
        "half": torch.full((3,), 60000.0, dtype=torch.float16),
    }.items():
        for order in (2.0, math.inf):
            split = {"dp": [with_gradient(value.clone())]}
            said.setdefault(name, []).append(dm.clip_grad_norm_(split["dp"], 1e9, order, blocks=split).item())
    said["partial"] = dm.clip_grad_norm_([with_gradient(partial)], 1.0).item()
    said["scaled"] = partial.full_tensor().tolist()
    said["none"] = [
        dm.clip_grad_norm_([], 1.0).item(),
        dm.clip_grad_norm_([torch.nn.Parameter(torch.ones(2))], 1.0).item(),
    ]
    return said


def test_odd_values_are_said_on_every_rank():
    for said in torch_world(odd_values, world_size=4):
        assert np.isnan(said["nan"]).all()
        assert said["infinite"] == [math.inf, math.inf]
        assert said["half"] == [pytest.approx(60000 * math.sqrt(12)), 60000.0]
        assert said["partial"] == pytest.approx(6 * math.sqrt(2))
        np.testing.assert_allclose(said["scaled"], [1 / math.sqrt(2)] * 2, rtol=1e-6)
        assert said["none"] == [0.0, 0.0]


def refused():
    import torch

    dm.init_parallel_state(dp_size=2)
    parameter = with_gradient(torch.tensor([1.0, math.nan]))
    said = []
    for call in (
        lambda: dm.clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True),
        lambda: dm.clip_grad_norm_([], 1.0, blocks={"dp": [parameter]}),
        lambda: dm.clip_grad_norm_([parameter], -1.0),
        lambda: dm.clip_grad_norm_([parameter], 1.0, 0),
        lambda: dm.clip_grad_norm_([parameter], 1.0, blocks={"tpp": [parameter]}),
        lambda: dm.clip_grad_norm_([parameter], 1.0, blocks=[parameter]),
        lambda: dm.clip_grad_norm_(3, 1.0),
    ):
        try:
            call()
        except dm.DualmeshError as error:
            said.append((type(error).__name__, str(error)))
    return said, parameter.grad.tolist()[0]


def test_what_cannot_be_clipped_is_refused_by_name():
    wanted = [
        ("NonFiniteError", "the norm of order 2.0 is nan"),
        ("ArgumentError", "blocks['dp'] has a parameter of shape (2,) that is not among"),
        ("ArgumentError", "max_norm=-1.0. Give a number, at least 0"),
        ("ArgumentError", "norm_type=0. Give a number above 0, or inf"),
        ("UnknownAxisError", "'tpp'"),
        ("ArgumentError", "Give a dict of axes to parameters"),
        ("ArrayTypeError", "found a int. Give parameters or a module"),
    ]
    for said, untouched in torch_world(refused, world_size=2):
        assert [name for name, _ in said] == [name for name, _ in wanted]
        for (_, text), (_, part) in zip(said, wanted, strict=True):
            assert part in text
        assert untouched == 1.0


def refused_somewhere():
    """Return what every rank hears where one of them gives something that cannot be clipped."""
    import torch

    half = dm.init_parallel_state(dp_size=2, ranks=(0, 1), name="half")
    state = dm.init_parallel_state(dp_size=4, name="whole")
    rank, one = state.global_rank, torch.ones(2, dtype=torch.float64)
    wrong = [with_gradient(one), *([3] if rank == 2 else [])]
    unequal = [with_gradient(one) for _ in range(2 if rank == 3 else 1)]
    square = torch.eye(2).to_sparse_csr() if rank == 1 else torch.eye(2)
    calls = {
        "type": lambda: dm.clip_grad_norm_(wrong, 0.1, state=state),
        "unequal": lambda: dm.clip_grad_norm_(unequal, 0.1, state=state),
        "layout": lambda: dm.global_norm([square], state=state),
    }
    if half.is_member:
        wide = with_gradient(dm.distribute(np.ones(4), dm.P("dp"), state=state))
        calls["outside"] = lambda: dm.clip_grad_norm_([wide], 1.0, state=half)
    said = {}
    for name, call in calls.items():
        try:
            call()
        except dm.DualmeshError as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said, all(p.grad.max() == 1.0 for p in (wrong[0], *unequal))


def test_all_ranks_refuse_what_one_rank_cannot_clip():
    for rank, (said, untouched) in enumerate(torch_world(refused_somewhere, world_size=4)):
        assert untouched
        other = "ArgumentError: {}: another rank of State 'whole' refused what it was given"
        is_type, is_layout = "ArrayTypeError: clip_grad_norm_: found a int", "found a tensor of layout torch.sparse_csr"
        assert (is_type if rank == 2 else other.format("clip_grad_norm_")) in said["type"]
        assert (is_layout if rank == 1 else other.format("global_norm")) in said["layout"]
        assert "some ranks hold 1 tensors of shape (2,), others 2" in said["unequal"]
        assert ("outside" in said) == (rank < 2)
        assert rank > 1 or "(4,) lies on the ranks 0, 1, 2, 3, but State 'half' has 0, 1" in said["outside"]


def global_norms(settings):
    """Return `dm.global_norm` of what FSDP2 would hold, experts included."""
    state = dm.init_parallel_state(**settings)
    parameters, _ = model(state)
    tree = {name: parameters[name].grad for name in ("dense", "vector", "experts", "alike")}
    return [dm.global_norm(tree, order).item() for order in (2, math.inf)]


def test_a_global_norm_counts_experts_on_their_views_mesh_once():
    values = wholes()
    flat = np.concatenate([values[name].reshape(-1) for name in ("dense", "vector", "experts", "alike")])
    for found in torch_world(global_norms, {"dp_replicate_size": 2, "dp_shard_size": 2, "ep_size": 2}, world_size=4):
        np.testing.assert_allclose(found, [np.linalg.norm(flat), np.abs(flat).max()], rtol=1e-13)


def test_where_gradients_are_values_clipping_is_refused_with_the_formula():
    with dm.session(backend="sim", world_size=2):
        dm.init_parallel_state(dp_size=2)
        with pytest.raises(dm.DualmeshError, match=r"Multiply them by min\(1, max_norm"):
            dm.clip_grad_norm_([], 1.0)
