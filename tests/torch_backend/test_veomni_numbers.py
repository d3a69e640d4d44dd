"""The VeOmni drop-in against VeOmni's formulas, as numbers, and its signatures against the table of the source.

The table and the formulas are those of commit d9774494. What runs as a trainer is in `test_veomni`.
"""

import importlib
import inspect
import json
from pathlib import Path

import numpy as np
import pytest

import dualmesh as dm
from tests.worlds import torch_world

TABLE = json.loads((Path(__file__).parents[1] / "cases" / "veomni_signatures.json").read_text())["names"]


def unlike_the_table():
    """Return what differs from the source in the modules that stand in: missing names, kinds, signatures."""
    import sys

    from dualmesh_torch import veomni

    veomni.stand_in()
    wrong = []
    try:
        for name, entry in TABLE.items():
            for where in entry["where"]:
                found = getattr(importlib.import_module(where), name, None)
                if found is None or inspect.isclass(found) != (entry["kind"] == "class"):
                    wrong.append((where, name, repr(found)))
                elif entry["kind"] == "function":
                    own = [
                        [one.name, None if one.default is inspect.Parameter.empty else repr(one.default), one.kind.name]
                        for one in inspect.signature(found).parameters.values()
                    ]
                    wrong += [(where, name, own)] if own != entry["parameters"] else []
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "veomni"]:
            del sys.modules[name]
    return wrong


def test_every_name_of_the_source_is_where_it_was_with_its_parameters_and_defaults():
    """Names, places, order, defaults and kinds of parameters are VeOmni's."""
    assert torch_world(unlike_the_table, world_size=1) == [[]]


def test_the_drop_in_has_the_names_of_the_source_and_few_more():
    """What is not in the table is dualmesh's own `stand_in`, and what other releases of VeOmni have."""
    from dualmesh_torch import veomni

    more = {"init_parallel_state_from_accelerator", "stand_in"}
    assert set(veomni.__all__) == {*TABLE, *more}
    assert all(hasattr(veomni, name) for name in veomni.__all__)


def losses():
    """Return values and gradients of the reduced loss, with tokens 3 and 1, then with none at all."""
    import torch

    from dualmesh_torch import veomni

    state = dm.init_parallel_state(dp_size=1, ulysses_size=2)
    rank = state.index("sp")
    found = []
    for reduce in (veomni.reduce_sequence_parallel_loss, veomni.ReduceLoss.apply):
        for value, count in ((2.0 + rank, 3 - 2 * rank), (float("nan"), 0)):
            loss = torch.tensor(value, dtype=torch.float64, requires_grad=True)
            mean = reduce(loss, torch.tensor(count))
            mean.backward()
            found.append((mean.item(), loss.grad.item()))
    return found


def test_the_gradient_of_a_reduced_loss_is_size_times_the_own_share():
    """Size * own / total: 2 * 3 / 4 and 2 * 1 / 4; nobody's tokens give 0."""
    for rank, found in enumerate(torch_world(losses, world_size=2)):
        assert found == [(2.25, [1.5, 0.5][rank]), (0.0, 0.0)] * 2


def trained(counts):
    """Return the gradient of a trainer written for VeOmni: FSDP2 averages over dp and sp, the loss takes it back."""
    import torch
    from torch.distributed.fsdp import fully_shard

    from dualmesh_torch import veomni

    veomni.init_parallel_state(dp_size=2, ulysses_size=2, device_type="cpu")
    state = veomni.get_parallel_state()
    layer = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
    torch.nn.init.ones_(layer.weight)
    fully_shard(layer, mesh=state.fsdp_mesh)
    data = torch.arange(24.0, dtype=torch.float64).reshape(2, 4, 3)[state.dp_rank] / 10
    x = veomni.slice_input_tensor(data, 0)[: counts[state.global_rank]]
    veomni.reduce_sequence_parallel_loss(layer(x).square().mean(), torch.tensor(len(x))).backward()
    return layer.weight.grad.full_tensor().numpy()


def test_a_trainer_written_for_veomni_gets_its_gradient():
    """The mean over data ranks of the gradient of each sequence's mean over tokens, whatever sp is."""
    data = np.arange(24.0).reshape(2, 4, 3) / 10
    tokens = [data[0], data[1][[0, 1, 2]]]  # rank 3 holds one token of its block of two
    expected = np.mean([2 * (rows.sum(1)[:, None] * rows).mean(0) for rows in tokens], axis=0)
    for gradient in torch_world(trained, [2, 2, 2, 1], world_size=4):
        np.testing.assert_allclose(gradient, expected[None], rtol=1e-12)


def gathers():
    """Return what gathers and slices give by default, evenly and not, with their gradients."""
    import torch

    from dualmesh_torch import veomni

    state = dm.init_parallel_state(dp_size=1, ulysses_size=4)
    rank, found = state.index("sp"), {}
    for name, options in (("plain", {}), ("scaled", {"scale_grad": True})):
        x = torch.tensor([10.0 * rank, 10.0 * rank + 1]).requires_grad_()
        whole = veomni.gather_outputs(x, 0, **options)
        whole.backward(torch.arange(8.0) + rank)
        found[name] = (whole.tolist(), x.grad.tolist())
    x = torch.tensor([2.0 * rank, 2.0 * rank + 1])
    found["cut"] = veomni.gather_outputs(x, 0, 0, 7).tolist()
    found["even"] = veomni.gather_outputs(x, 0, 0, 4).tolist()  # 4 divides: nothing was padded, nothing is cut
    found["uneven"] = [veomni.slice_input_tensor(torch.arange(float(n)), 0, padding=False).tolist() for n in (5, 3, 8)]
    found["padded"] = veomni.slice_input_tensor(torch.arange(5.0), 0, padding_value=-1).tolist()
    return found


def test_gathers_and_slices_have_the_sources_defaults():
    """No scaled gradient by default; slices without padding are ceil(n / size) long and then what is left."""
    for rank, found in enumerate(torch_world(gathers, world_size=4)):
        whole = [10.0 * one + step for one in range(4) for step in (0, 1)]
        own = [4.0 * (2 * rank + step) + 6 for step in (0, 1)]
        assert found["plain"] == (whole, own)
        assert found["scaled"] == (whole, [4 * one for one in own])
        assert found["cut"] == [0, 1, 2, 3, 4, 5, 6]
        assert found["even"] == [0, 1, 2, 3, 4, 5, 6, 7]
        assert found["uneven"] == [
            [[0, 1], [2, 3], [4], []][rank],
            [[0], [1], [2], []][rank],
            [2 * rank, 2 * rank + 1],
        ]
        assert found["padded"] == [[0, 1], [2, 3], [4, -1], [-1, -1]][rank]


def unlike_ranks():
    """Return what sequences of unlike dtypes and shapes become, and what is said where that cannot be."""
    import torch

    from dualmesh_torch import veomni

    state = dm.init_parallel_state(dp_size=1, ulysses_size=2)
    rank, found = state.index("sp"), {}
    for name, pair in {
        "mixed": (torch.bfloat16, torch.float32),
        "halves": (torch.float16, torch.bfloat16),
        "doubles": (torch.float64, torch.float16),
    }.items():
        x = torch.full((2 + rank,), 1.0 + rank, dtype=pair[rank], requires_grad=True)
        for gather in (lambda x: veomni.sp_gather_seqs(x, 0)[0], lambda x: veomni.gather_outputs(x, 0)):
            x.grad = None
            whole = gather(x)
            (whole * (rank + 1)).sum().backward()
            found.setdefault(name, []).append((whole.tolist(), str(whole.dtype), x.grad.tolist(), str(x.grad.dtype)))
    for name, x in {
        "integers": torch.ones(2, dtype=(torch.int64, torch.int32)[rank]),
        "float and integer": torch.ones(2, dtype=(torch.float32, torch.int32)[rank]),
        "widths": torch.ones(2, 3 + rank),
        "dims": torch.ones(2, 3).reshape((2, 3) if rank else (2, 3, 1)),
    }.items():
        for gather in (lambda x: veomni.sp_gather_seqs(x, 0), lambda x: veomni.gather_outputs(x, 0)):
            try:
                gather(x)
                found.setdefault(name, []).append("accepted")
            except dm.DualmeshError as error:
                found.setdefault(name, []).append(f"{type(error).__name__}: {error}")
    return found


def test_unlike_floats_are_promoted_and_unlike_others_refused_on_every_rank():
    """A rank with bfloat16 beside one with float32 gets float32 values and a bfloat16 gradient."""
    for rank, found in enumerate(torch_world(unlike_ranks, world_size=2)):
        own = {"mixed": ("bfloat16", "float32"), "halves": ("float16", "bfloat16"), "doubles": ("float64", "float16")}
        common = {"mixed": "float32", "halves": "float32", "doubles": "float64"}
        for name, dtypes in own.items():
            expected = ([1, 1, 2, 2, 2], f"torch.{common[name]}", [3.0] * (2 + rank), f"torch.{dtypes[rank]}")
            assert found[name] == [expected] * 2
        for name in ("integers", "float and integer"):
            assert all(said.startswith("ArrayTypeError: sequence lengths: ranks hold unlike") for said in found[name])
        for name in ("widths", "dims"):
            assert all(said.startswith("ShapeError: sequence lengths: ranks hold arrays") for said in found[name])


def alone():
    """Return what functions give where ulysses has size 1."""
    import torch

    from dualmesh_torch import veomni

    dm.init_parallel_state(dp_size=2)
    qkv, x = torch.arange(12.0).reshape(2, 6), torch.arange(5.0)
    return (
        veomni.gather_seq_scatter_heads_qkv(qkv, 0, restore_shape=False) is qkv,
        veomni.gather_outputs(x, 0, 0, 3).tolist(),
        veomni.slice_input_tensor(x, 0, padding=False).tolist(),
        veomni.get_ulysses_sequence_parallel_group(),
    )


def test_without_sequence_parallelism_the_input_comes_back():
    """As in the source, nothing is cut and nothing reshaped where there is no group."""
    assert torch_world(alone, world_size=2) == [(True, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], None)] * 2


def projected(norm, length):
    """Return outputs and gradients of attention through the projections of `async_ulysses_dit`, split and whole."""
    import sys

    import torch
    from torch.nn import functional

    from dualmesh_torch import veomni

    veomni.stand_in()
    from veomni.distributed.sequence_parallel import async_ulysses
    from veomni.distributed.sequence_parallel import async_ulysses_dit as dit

    try:
        torch.manual_seed(5)
        state = dm.init_parallel_state(dp_size=1, ulysses_size=4)
        hidden = torch.randn(2, length, 16, dtype=torch.float64)
        shapes = {"q": (16, 16), "k": (16, 16), "v": (16, 16), "o": (16, 16), "b": (16,), "nq": (16,), "nk": (16,)}
        results = []
        for size in (4, 1):
            w = {name: torch.nn.Parameter(torch.ones(shape).double()) for name, shape in shapes.items()}
            for seed, weight in enumerate(w.values()):
                torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(seed))
            if size == 4:
                x = veomni.slice_input_tensor(hidden, 1).requires_grad_()
                q, k, v = dit.AsyncUlyssesQKVProjection.apply(
                    *(x, 1, 2, w["q"], w["b"], w["k"], None, w["v"], None, norm, w["nq"], None, w["nk"], None),
                    *(16, 1e-6, length, None, state.ulysses_group),
                )
            else:
                x = hidden.clone().requires_grad_()
                q, k, v = (functional.linear(x, w[name], w["b"] if name == "q" else None) for name in "qkv")
                if norm == "rmsnorm":
                    q, k = (functional.rms_norm(one, (16,), w[n], 1e-6) for one, n in ((q, "nq"), (k, "nk")))
                if norm == "layernorm":
                    q, k = (functional.layer_norm(one, (16,), w[n], None, 1e-6) for one, n in ((q, "nq"), (k, "nk")))
            split = [one.unflatten(-1, (-1, 4)).transpose(1, 2) for one in (q, k, v)]  # heads of 4
            mixed = functional.scaled_dot_product_attention(*split).transpose(1, 2).flatten(-2)
            factor = torch.arange(1.0, length + 1, dtype=torch.float64)[None, :, None]
            if size == 4:
                made = dit.AsyncUlyssesOutputProjection.apply(mixed, 1, 2, w["o"], None, length, state.ulysses_group)
                (made * veomni.slice_input_tensor(factor, 1)).sum().backward()
                dm.sync_gradients(list(w.values()), "ulysses", state=state)
                made, grad = (veomni.gather_outputs(one, 1, 1, length) for one in (made.detach(), x.grad))
            else:
                made = functional.linear(mixed, w["o"])
                (made * factor).sum().backward()
                grad = x.grad
            used = [name for name in w if norm or not name.startswith("n")]
            results.append([made.detach().numpy(), grad.numpy(), *(w[name].grad.numpy() for name in used)])
        return results, async_ulysses.AsyncUlyssesQKVProjection is veomni.AsyncUlyssesQKVProjection
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "veomni"]:
            del sys.modules[name]


@pytest.mark.parametrize(("norm", "length"), [(None, 8), ("rmsnorm", 7), ("layernorm", 8)])
def test_projections_of_dit_normalize_the_whole_hidden_dim_before_the_exchange(norm, length):
    """Split over 4 ranks they give what one process gives, whatever the length; gradients too."""
    for (split, whole), is_apart in torch_world(projected, norm, length, world_size=4):
        assert is_apart
        for one, other in zip(split, whole, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)


def rest():
    """Return what the names give that the source has beside the functions of sequences."""
    import torch
    import torch.distributed as dist

    from dualmesh.runtime.registry import registry
    from dualmesh_torch import veomni

    found, said = {}, []
    veomni.set_ulysses_sequence_parallel_group(dist.group.WORLD)
    try:
        found["set"] = (
            veomni.get_ulysses_sequence_parallel_group() is dist.group.WORLD,
            veomni.get_ulysses_sequence_parallel_world_size(),
            veomni.get_ulysses_sequence_parallel_rank(),
            veomni.is_ulysses_sequence_parallel_initialized(),
            veomni.gather_heads_scatter_seq(torch.arange(4.0).reshape(4, 1) + 10 * dist.get_rank(), 1, 0).tolist(),
            veomni.padding_tensor_for_seqeunce_parallel(torch.ones(3), 0).tolist(),
        )
    finally:
        veomni.set_ulysses_sequence_parallel_group(None)
    state = veomni.init_parallel_state(dp_size=2)
    found["taken back"] = veomni.get_ulysses_sequence_parallel_group()
    with veomni.use_parallel_state(parallel_state=state) as ambient:
        found["scope"] = ambient is state

    class Holder:
        def __init__(self, device_mesh):
            self.device_mesh = device_mesh

        @veomni.requires_mesh
        def size(self, times):
            return times * self.device_mesh.size()

    found["mesh"] = (Holder(state.device_mesh).size(times=3), Holder.size.__name__)
    for call in (
        lambda: Holder(None).size(3),
        lambda: veomni.ParallelState(dp_size=2),
        lambda: veomni.init_parallel_state(dp_shard_size=2, name="half said"),
        lambda: veomni.async_ulysses_qkv_projection(torch.ones(2, 2), 0, 1),
        lambda: veomni.all2all_splits([1, 2], [1, 1], 2, 0),
    ):
        try:
            call()
            said.append("accepted")
        except ValueError as error:
            said.append(str(error))
    found["names"] = registry.names()
    return found, said


def test_the_other_names_of_the_source_do_what_they_do_there():
    """A group that was set stands for ulysses; states without a mesh, and by hand, are refused by name."""
    for rank, (found, said) in enumerate(torch_world(rest, world_size=2)):
        block = [[0.0, 10.0], [1.0, 11.0]] if rank == 0 else [[2.0, 12.0], [3.0, 13.0]]
        assert found["set"] == (True, 2, rank, True, block, [1, 1, 1, 0])
        assert found["taken back"] is None
        assert found["scope"]
        assert found["mesh"] == (6, "size")
        assert "half said" not in found["names"]
        for part, text in zip(
            ("device_mesh", "Call init_parallel_state(...)", "dp_size", "head_dim", "add up to 3"), said, strict=True
        ):
            assert part in text


def test_images_are_split_by_overlap():
    """Five images of 12 rows, encoded by 2, 2 and 1, whose tokens lie 5, 4 and 3 on the ranks."""
    from dualmesh_torch import veomni

    assert veomni.has_overlap(0, 4, 2, 9) == (True, 2)
    assert veomni.has_overlap(0, 4, 6, 9) == (False, -2)
    assert veomni.all2all_splits([3, 1, 4, 2, 2], [5, 4, 3], 3, 0) == ([4, 0, 0], [4, 1, 0])
    assert veomni.all2all_splits([3, 1, 4, 2, 2], [5, 4, 3], 3, 1) == ([1, 4, 1], [0, 4, 0])
    assert veomni.all2all_splits([3, 1, 4, 2, 2], [5, 4, 3], 3, 2) == ([0, 0, 2], [0, 1, 2])


def meshes():
    """Return what VeOmni's callers read off `device_mesh`, with sequence parallelism, replicas and experts."""
    import torch
    import torch.distributed as dist

    from dualmesh_torch import veomni

    found = {}
    for name, sizes in {
        "sp": {"dp_size": 2, "ulysses_size": 2},
        "hsdp": {"dp_size": 4, "dp_replicate_size": 2, "dp_shard_size": 2},
        "experts": {"dp_size": 4, "extra_parallel_sizes": (2,)},
    }.items():
        state = veomni.init_parallel_state(**sizes, device_type="cpu", name=name)
        mesh = state.device_mesh
        axes = ["dp", "dp_shard", "dp_shard_sp", "dp_sp"] + (["sp", "ulysses"] if name == "sp" else [])
        found[name] = {
            "ranks": [dist.get_process_group_ranks(mesh.get_group(axis)) for axis in axes],
            "cut": [mesh[axis].mesh.tolist() for axis in axes],
            "indices": [mesh.get_local_rank(axis) for axis in axes],
            "fsdp": (state.fsdp_mesh.mesh_dim_names, list(state.fsdp_mesh.shape)),
            "is a mesh": isinstance(mesh, dist.DeviceMesh) and mesh == state.mesh and mesh.size() == 4,
        }
    both = veomni.get_parallel_state_by_name("hsdp").device_mesh["dp_replicate", "dp_shard_sp"]
    found["two"] = (both.mesh_dim_names, both.get_group("dp_replicate").size())
    state = veomni.get_parallel_state_by_name("experts")
    found["experts' mesh"] = (state.ep_fsdp_mesh.mesh_dim_names, state.ep_fsdp_mesh.mesh.tolist())
    found["extra"] = state.extra_parallel_fsdp_device_mesh["ep"].mesh.tolist()
    x = dist.tensor.distribute_tensor(torch.arange(4.0), state.device_mesh, [dist.tensor.Replicate()] * mesh.ndim)
    found["compiled"] = torch.compile(lambda x: x.sum(), backend="eager", fullgraph=True)(x).full_tensor().item()
    try:
        state.device_mesh["dq_shard"]
    except KeyError as error:
        found["unknown"] = str(error)
    return found


def test_the_device_mesh_knows_the_combined_axes_as_the_sources_does():
    """`["dp"]`, `.get_group("dp_sp")`, `.get_local_rank("sp")`, and FSDP meshes that are called as in VeOmni."""
    for rank, found in enumerate(torch_world(meshes, world_size=4)):
        everyone, pair = [0, 1, 2, 3], [rank // 2 * 2, rank // 2 * 2 + 1]
        strided = [rank % 2, rank % 2 + 2]
        groups = {
            "sp": [strided, strided, everyone, everyone, pair, pair],
            "hsdp": [everyone, pair, pair, everyone],
            "experts": [everyone] * 4,
        }
        for name, ranks in groups.items():
            assert found[name]["ranks"] == found[name]["cut"] == ranks
            assert found[name]["indices"] == [group.index(rank) for group in ranks]
            assert found[name]["is a mesh"]
        assert found["sp"]["fsdp"] == (("dp_shard_sp",), [4])
        assert found["hsdp"]["fsdp"] == (("dp_replicate", "dp_shard"), [2, 2])
        assert found["experts"]["fsdp"] == (("dp_shard",), [4])
        assert found["two"] == (("dp_replicate", "dp_shard_sp"), 2)
        assert found["experts' mesh"] == (("ep", "ep_fsdp"), [[0, 2], [1, 3]])
        assert found["extra"] == [[0, 1], [2, 3]]
        assert found["compiled"] == 6
        assert "Did you mean 'dp_shard'" in found["unknown"]


def planned():
    """Return what VeOmni's `ParallelPlan.apply` reads off `extra_parallel_fsdp_device_mesh`."""
    from dualmesh_torch import veomni

    state = veomni.init_parallel_state(
        dp_size=4,
        device_type="cpu",
        extra_parallel_sizes=(2, 1),
        extra_parallel_placement_innermost=(False, False),
        extra_parallel_names=("ep", "emb"),
    )
    meshes = state.extra_parallel_fsdp_device_mesh
    inner = {name: mesh[name] if mesh is not None else None for name, mesh in meshes.items()}
    return (
        state.extra_parallel_names,
        state.extra_parallel_sizes,
        {name: None if mesh is None else (mesh.size(-1), mesh.ndim) for name, mesh in inner.items()},
        [state.extra_parallel_group(name) is None for name in state.extra_parallel_names],
    )


def test_a_plan_goes_through_extra_parallels_of_size_one():
    """With ep=2 and emb=1 both are there; the second has no mesh and no group."""
    expected = (("ep", "emb"), {"ep": 2, "emb": 1}, {"ep": (2, 1), "emb": None}, [False, True])
    assert torch_world(planned, world_size=4) == [expected] * 4
