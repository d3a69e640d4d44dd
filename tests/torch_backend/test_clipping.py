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


def staged():
    """Clip a pipeline whose second stage has other parameters and whose third and fourth have none."""
    import torch

    state = dm.init_parallel_state(pp_size=4, dp_size=2)
    stage = state.index("pp")
    own = [[[3.0], [1.0, 2.0]], [[4.0, 5.0, 6.0]], [], []][stage]
    parameters = [with_gradient(torch.tensor(value, dtype=torch.float64)) for value in own]
    alike = dm.clip_grad_norm_(parameters, 100.0, blocks={"pp": []})
    largest = dm.clip_grad_norm_(parameters, 100.0, math.inf)
    norm = dm.clip_grad_norm_(iter(parameters), 1.0)
    return norm.item(), largest.item(), alike.item(), [parameter.grad.tolist() for parameter in parameters]


def test_stages_of_a_pipeline_count_once_each_also_those_without_parameters():
    expected = math.sqrt(sum(n * n for n in (3, 1, 2, 4, 5, 6)))
    for rank, (norm, largest, alike, gradients) in enumerate(torch_world(staged, world_size=8)):
        assert (norm, largest) == (pytest.approx(expected, rel=1e-7), 6.0)
        assert alike == pytest.approx(math.sqrt(14), rel=1e-7)  # counted as equal: the first stage's
        whole = [[[3.0], [1.0, 2.0]], [[4.0, 5.0, 6.0]], [], []][rank // 2]
        for one, other in zip(whole, gradients, strict=True):
            np.testing.assert_allclose(other, np.array(one) / (expected + 1e-6), rtol=1e-6)


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
