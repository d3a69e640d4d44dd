"""VeOmni's names, from `dualmesh_torch.veomni`, as its programs use them: states, imports, groups, a module.

Numbers of single functions, and the signatures, are in `test_veomni_numbers`.
"""

from types import SimpleNamespace

import numpy as np
import pytest

import dualmesh as dm
from tests.worlds import torch_world


@pytest.mark.parametrize(("world", "length"), [(4, 8), (4, 7), (8, 7)])
def test_a_module_written_for_the_seed_runs_split_and_whole(world, length):
    from tests.torch_backend import seed_module

    assert torch_world(_module, seed_module.__name__, length, world_size=world) == [True] * world


def _module(name, length):
    import importlib

    return importlib.import_module(name).main(length)


def registered():
    from dualmesh_torch import veomni

    found = {}
    unnamed = veomni.init_parallel_state(dp_size=4, name=None)
    other = veomni.init_parallel_state(dp_size=2, tp_size=2, name=None)
    try:
        veomni.get_parallel_state_by_name("base")
    except ValueError as error:
        found["base"] = "is not registered" in str(error)
    found["ambient"] = veomni.get_parallel_state() is unnamed and other is not unnamed
    found["adopted"] = veomni.init_parallel_state(4, name="base") is unnamed
    settings = SimpleNamespace(
        **{"dp_size": 2, "dp_replicate_size": 1, "dp_shard_size": 2, "tp_size": 1, "pp_size": 1, "cp_size": 1},
        **{"ulysses_size": 2, "extra_parallel_sizes": [2], "extra_parallel_placement_innermost": [False]},
        **{"extra_parallel_names": ["ep"], "fsdp_config": SimpleNamespace(fsdp_mode="ddp"), "enable_async": True},
    )
    talker = veomni.init_parallel_state_from_accelerator(settings, "talker")
    found["settings"] = (talker.dp_size, talker.sp_size, talker.ep_size, talker.dp_mode, talker.async_enabled)
    with veomni.use_parallel_state("talker"):
        try:
            veomni.set_parallel_state(unnamed)
        except dm.DualmeshError as error:
            found["inside"] = "'talker' is open" in str(error)
    found["set"] = veomni.set_parallel_state(talker) is unnamed and veomni.get_parallel_state() is talker
    return found


def test_states_are_registered_set_and_read_from_settings():
    for found in torch_world(registered, world_size=4):
        assert found == {
            "base": True,
            "ambient": True,
            "adopted": True,
            "settings": (2, 2, 2, "ddp", True),
            "inside": True,
            "set": True,
        }


def counted():
    """Return the registered names after anonymous states and single processes, asked for again and again."""
    from dualmesh.runtime.registry import registry
    from dualmesh_torch import veomni

    base = veomni.init_parallel_state(dp_size=2, name="base")
    before = registry.names()
    same = [veomni.init_parallel_state(dp_size=2, name=None) for _ in range(3)]
    anonymous = registry.names()
    alone = []
    for _ in range(3):
        veomni.set_parallel_state(None)
        alone.append(veomni.get_parallel_state())
        veomni.set_parallel_state(base)
    is_one = all(one is alone[0] for one in alone) and alone[0].world_size == 1
    return same == [base] * 3, before, anonymous, len(registry.names()) - len(before), is_one


def test_states_without_names_and_single_processes_do_not_fill_the_registry():
    assert torch_world(counted, world_size=2) == [(True, ["base"], ["base"], 1, True)] * 2


SEED_FILES = {
    "veomni/__init__.py": "version = 'installed'",
    "veomni/distributed/__init__.py": "",
    "veomni/distributed/clip.py": "from veomni.distributed.parallel_state import get_parallel_state",
    "veomni/distributed/parallel_state.py": "raise RuntimeError('the seed itself was imported')",
    "veomni/distributed/sequence_parallel/__init__.py": "raise RuntimeError('the seed itself was imported')",
    "veomni/models.py": "from .distributed.sequence_parallel.data import gather_outputs",
}


def stood_in(installed):
    """Import what the seed's code imports, with and without its package, and say what is found."""
    import importlib
    import sys

    from dualmesh_torch import veomni

    found = {}
    sys.path[:0] = [installed] if installed else []
    try:
        veomni.stand_in()
        veomni.stand_in()
        import veomni.distributed.parallel_state as states  # the module that stands in, by its dotted name
        from veomni.distributed import sequence_parallel
        from veomni.distributed.sequence_parallel import comm, gather_outputs
        from veomni.distributed.sequence_parallel.ulysses import _Gather, _SeqAllToAll, _Slice

        from dualmesh_torch import veomni as face

        seed = sys.modules["veomni"]
        found["same"] = gather_outputs is face.gather_outputs and comm.get_parallel_state is face.get_parallel_state
        found["private"] = (_Gather, _SeqAllToAll, _Slice) == (face._Gather, face._SeqAllToAll, face._Slice)
        found["attributes"] = seed.distributed.parallel_state is states and sequence_parallel.comm is comm
        found["before"] = states._PARALLEL_STATE
        state = states._init_parallel_state(dp_size=1, ulysses_size=2)
        found["ambient"] = states._PARALLEL_STATE is state
        found["registry"] = list(states._PARALLEL_STATE_REGISTRY)
        states._PARALLEL_STATE = None
        found["reset"] = states._PARALLEL_STATE.world_size
        states._PARALLEL_STATE = state
        found["version"] = getattr(seed, "version", None)
        if installed:
            models = importlib.import_module("veomni.models")
            found["others"] = models.gather_outputs is face.gather_outputs
            found["others"] &= importlib.import_module("veomni.distributed.clip").__file__.startswith(installed)
        try:
            from veomni.distributed.sequence_parallel import set_unified_sequence_parallel_group  # noqa: F401
        except ImportError as error:
            found["left out"] = str(error)
        try:
            states._PARALLEL_STATE_CACHE  # noqa: B018
        except ImportError as error:
            found["inside"] = str(error)
        found["unknown"] = hasattr(comm, "nothing")
        for name in [name for name in sys.modules if name.startswith("veomni.distributed.")]:
            del sys.modules[name]
        sys.modules["veomni.distributed.parallel_state"] = sys  # as if the seed had been imported before
        try:
            face.stand_in()
        except dm.DualmeshError as error:
            found["late"] = str(error)
        return found
    finally:
        sys.path[:] = [path for path in sys.path if path != installed]
        for name in [name for name in sys.modules if name.partition(".")[0] == "veomni"]:
            del sys.modules[name]


@pytest.mark.parametrize("is_installed", [False, True], ids=["alone", "beside the seed"])
def test_the_seeds_own_import_lines_find_these_names(is_installed, tmp_path):
    for name, text in SEED_FILES.items() if is_installed else ():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for found in torch_world(stood_in, str(tmp_path) if is_installed else "", world_size=2):
        assert "groups belong to states" in found.pop("left out")
        assert "patch what calls it" in found.pop("inside")
        assert "was imported before" in found.pop("late")
        assert found.pop("others", False) == is_installed
        assert found == {
            **{"same": True, "private": True, "attributes": True, "before": None, "ambient": True, "reset": 1},
            **{"registry": ["base"], "version": "installed" if is_installed else None, "unknown": False},
        }


def foreign():
    """Return what the seed's autograd functions make over groups that no state has."""
    import torch
    import torch.distributed as dist

    from dualmesh_torch import veomni

    groups = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    rank = dist.get_rank()
    group = groups[0 if rank in (0, 3) else 1]
    place, found = dist.get_rank(group), {}
    for scale, summed in ((False, True), (True, True), (False, False), (True, False)):
        x = torch.full((1 + place, 2), float(rank), dtype=torch.float64, requires_grad=True)
        whole = veomni._Gather.apply(group, x, 0, scale, summed)
        whole.backward(torch.arange(6.0, dtype=torch.float64).reshape(3, 2) + 10 * rank)
        found[scale, summed] = (whole[:, 0].tolist(), x.grad.numpy())
    x = torch.arange(4.0).reshape(2, 2).add(10 * rank).requires_grad_()
    traded = veomni._SeqAllToAll.apply(group, x, 0, 1)
    traded.backward(torch.ones_like(traded) * rank)
    whole = torch.arange(4.0, requires_grad=True)
    part = veomni._Slice.apply(dist.group.WORLD, whole, 0, False)
    part.backward(torch.full((1,), float(rank)))
    found["traded"], found["back"] = traded.tolist(), x.grad.tolist()
    found["sliced"] = (part.item(), whole.grad.tolist())
    found["asked"] = (veomni.get_ulysses_sequence_parallel_world_size(group), dm.scope_name())
    return found


@pytest.mark.filterwarnings("ignore")
def test_the_seeds_autograd_functions_take_any_group():
    for rank, found in enumerate(torch_world(foreign, world_size=4)):
        pair = (0, 3) if rank in (0, 3) else (1, 2)
        place = pair.index(rank)
        above = {one: np.arange(6.0).reshape(3, 2) + 10 * one for one in pair}
        block = slice(0, 1) if place == 0 else slice(1, 3)
        for scale in (False, True):
            factor = 2 if scale else 1
            for summed, gradient in ((True, sum(above.values())), (False, above[rank])):
                whole, own = found[scale, summed]
                assert whole == [pair[0], pair[1], pair[1]]
                np.testing.assert_array_equal(own, factor * gradient[block])
        row = 2 * place
        assert found["traded"] == [[value + 10 * one for one in pair for value in (row, row + 1)]]
        assert found["back"] == [[pair[0]] * 2, [pair[1]] * 2]
        assert found["sliced"] == (rank, [0, 1, 2, 3])
        assert found["asked"] == (2, None)


def projected(norm):
    """Return outputs and gradients of attention through the seed's projections, split over ulysses and whole."""
    import torch
    from torch.nn import functional

    from dualmesh_torch import veomni

    torch.manual_seed(5)
    state = dm.init_parallel_state(dp_size=1, ulysses_size=4)
    hidden = torch.randn(2, 8, 16, dtype=torch.float64)
    shapes = {"q": (32, 16), "k": (8, 16), "v": (8, 16), "o": (16, 32), "b": (32,), "nq": (4,), "nk": (4,)}
    results = []
    for size in (4, 1):
        weights = {name: torch.nn.Parameter(torch.ones(shape).double()) for name, shape in shapes.items()}
        for seed, weight in enumerate(weights.values()):
            torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(seed))
        with dm.use_parallel_state(state if size == 4 else dm.init_parallel_state(dp_size=4, name="whole")):
            x = (dm.sequence.slice_sequence(hidden, 1, "ulysses") if size == 4 else hidden).clone().requires_grad_()
            w = weights
            q, k, v = veomni.async_ulysses_qkv_projection(
                *(x, 1, 2, w["q"], w["b"], w["k"], None, w["v"], None),
                **{"norm_type": norm, "norm_q_weight": w["nq"], "norm_k_weight": w["nk"], "normalized_shape": 4},
                **{"eps": 1e-6, "unpadded_dim_size": 8, "head_dim": 4},
            )
            k, v = (one.repeat_interleave(q.shape[2] // one.shape[2], 2) for one in (k, v))
            mixed = functional.scaled_dot_product_attention(*(one.transpose(1, 2) for one in (q, k, v))).transpose(1, 2)
            made = veomni.async_ulysses_output_projection(mixed, 1, 2, w["o"], None, 8)
            factor = torch.arange(8.0, dtype=torch.float64)[None, :, None]
            factor = factor[:, 2 * state.index("ulysses") :][:, :2] if size == 4 else factor
            (made * factor).sum().backward()
        if size == 4:
            dm.sync_gradients(list(weights.values()), "ulysses", state=state)
            made, grad = (dm.sequence.gather_sequence(one, 1, "ulysses", state=state) for one in (made, x.grad))
        else:
            grad = x.grad
        used = [name for name in weights if norm or not name.startswith("n")]
        results.append([made.detach().numpy(), grad.numpy(), *(weights[name].grad.numpy() for name in used)])
    return results


@pytest.mark.parametrize("norm", [None, "rmsnorm", "layernorm"])
def test_the_seeds_overlapped_projections_keep_its_numbers_and_gradients(norm):
    for split, whole in torch_world(projected, norm, world_size=4):
        for one, other in zip(split, whole, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)


def traded(given):
    """Return what the functions make of this rank's part of known arrays, forward and backward."""
    import torch

    from dualmesh_torch import veomni

    state = dm.init_parallel_state(dp_size=2, ulysses_size=2, name="thinker")
    dm.init_parallel_state(dp_size=4, name="talker")
    group = {"none": None, "native": state.ulysses_group, "axis": "ulysses", "foreign": state.ulysses_group}[given]
    rank, dp = state.index("ulysses"), state.index("dp")
    whole = torch.arange(96.0, dtype=torch.float64).reshape(2, 6, 4, 2)[:, :, :, :] + 1000 * dp
    found = {}
    with dm.use_parallel_state("talker" if given == "foreign" else "thinker"):
        x = whole[:, 3 * rank : 3 * rank + 3].clone().requires_grad_()
        heads = veomni.gather_seq_scatter_heads(x, 1, 2, 5, group)
        found["heads"] = heads.detach().numpy()
        back = veomni.gather_heads_scatter_seq(heads, 2, 1, group)
        found["back"] = back.detach().numpy()
        back.backward(torch.full_like(back, rank + 1.0))
        found["gradient"] = x.grad.numpy()
        plain = x.detach()
        found["exchanged"] = veomni.all_to_all_tensor(plain, 2, 1, group).numpy()
        found["waited"] = veomni.all_to_all_tensor(plain, 2, 1, group, async_op=True)().numpy()
        found["rolled"] = veomni.roll_with_sequence_parallel(plain, 2, 1, group).numpy()
        padded = veomni.padding_tensor_for_seqeunce_parallel(whole[:, :5], 1, group)
        found["padded"] = padded.numpy()
        found["unpadded"] = veomni.unpadding_tensor_for_seqeunce_parallel(padded, 1, 5, group).numpy()
        found["own"] = veomni.remove_last_rank_padding(padded[:, 3 * rank : 3 * rank + 3], 1, 4, group).numpy()
        found["asked"] = (
            veomni.get_ulysses_sequence_parallel_rank(group) if given != "axis" else rank,
            veomni.get_ulysses_sequence_parallel_world_size(group) if given != "axis" else 2,
        )
    return found


@pytest.mark.parametrize("given", ["none", "native", "axis", "foreign"])
def test_sequences_and_heads_are_traded_over_the_group_meant(given):
    for place, found in enumerate(torch_world(traded, given, world_size=4)):
        rank, dp = place % 2, place // 2
        whole = np.arange(96.0).reshape(2, 6, 4, 2) + 1000 * dp
        block, heads = slice(3 * rank, 3 * rank + 3), slice(2 * rank, 2 * rank + 2)
        cut = np.concatenate([whole[:, :5], np.zeros_like(whole[:, :1])], axis=1)
        # The last position is cut and comes back as zeros, so that its gradient is zero.
        gradient = np.full((2, 3, 4, 2), rank + 1.0) * (np.arange(3 * rank, 3 * rank + 3) < 5)[:, None, None]
        expected = {
            "heads": whole[:, :5, heads],
            "back": cut[:, block],
            "gradient": gradient,
            "exchanged": whole[:, :, heads],
            "waited": whole[:, :, heads],
            "rolled": np.roll(whole, 2, axis=1)[:, block],
            "padded": cut,
            "unpadded": whole[:, :5],
            "own": whole[:, block.start : min(block.stop, 4)],
            "asked": (rank, 2),
        }
        assert set(found) == set(expected)
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)


def shared(layout, scale):
    """Return gradients of a gather and of another branch that shares its cotangent."""
    import torch

    from dualmesh_torch import veomni

    state = dm.init_parallel_state(dp_size=1, ulysses_size=2)
    rank = state.index("ulysses")
    local = torch.full((2, 3), float(rank), requires_grad=True)
    gathered = veomni.gather_outputs(local, 0, scale_grad=scale, group=state.ulysses_group)
    values = torch.arange(1.0, 13.0).reshape(4, 3) + rank * 10
    above = {
        "contiguous": values,
        "transposed": values.T.contiguous().T,
        "narrowed": torch.nn.functional.pad(values, (1, 1))[:, 1:4],
        "expanded": torch.tensor(rank + 1.0).expand(4, 3),
    }[layout]
    bias = torch.zeros_like(gathered, requires_grad=True)
    gradients = torch.autograd.grad(gathered + bias, (local, bias), grad_outputs=above)
    return [one.numpy() for one in (*gradients, above)]


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "narrowed", "expanded"])
def test_a_gathers_backward_changes_no_gradient_that_others_share(layout, scale):
    found = torch_world(shared, layout, scale, world_size=2)
    above = [np.arange(1.0, 13.0).reshape(4, 3) + rank * 10 for rank in range(2)]
    if layout == "expanded":
        above = [np.full((4, 3), rank + 1.0) for rank in range(2)]
    for rank, (local, bias, left) in enumerate(found):
        np.testing.assert_array_equal(local, sum(above)[2 * rank : 2 * rank + 2] * (2 if scale else 1))
        np.testing.assert_array_equal(bias, above[rank])
        np.testing.assert_array_equal(left, above[rank])


LENGTHS = [3, 1, 4, 2, 2]
MASK = np.array([[1, 1, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1]])


def images():
    """Encode images in equal runs, send them to the ranks that hold their tokens, and back-propagate."""
    import torch

    from dualmesh_torch import veomni

    state = dm.init_parallel_state(dp_size=1, ulysses_size=4)
    rank = state.index("ulysses")
    rows = np.split(np.arange(12.0), np.cumsum(LENGTHS)[:-1])[2 * rank : 2 * rank + 2]
    own = torch.from_numpy(np.concatenate([np.zeros(0), *rows]))[:, None].requires_grad_()
    send, receive, mask = veomni.vlm_images_a2a_meta(rank, 4, LENGTHS, torch.from_numpy(MASK))
    moved = veomni.all_to_all_images(own, send, receive)
    (moved * (rank + 1)).sum().backward()
    bad = None
    try:
        veomni.vlm_images_a2a_meta(rank, 4, [1, 2], torch.from_numpy(MASK))
    except dm.DualmeshError as error:
        bad = "add up to 3, but image_masks marks 12" in str(error)
    untouched = veomni.all_to_all_images(own, [], []) is own
    return moved.detach().numpy()[:, 0], own.grad.numpy()[:, 0], mask.numpy(), untouched and bad


def test_image_embeddings_go_to_the_ranks_that_hold_their_tokens():
    found = torch_world(images, world_size=4)
    parts = [MASK[:, 2 * rank : 2 * rank + 2] for rank in range(4)]
    held = np.split(np.arange(12.0), np.cumsum([part.sum() for part in parts])[:-1])
    owner = np.repeat(np.arange(4), [part.sum() for part in parts])
    encoded = np.split(np.arange(12), np.cumsum([4, 6, 2])[:3])
    for rank, (moved, gradient, mask, rest) in enumerate(found):
        np.testing.assert_array_equal(moved, held[rank])
        np.testing.assert_array_equal(gradient, owner[encoded[rank]] + 1.0)
        np.testing.assert_array_equal(mask, parts[rank])
        assert rest


def parts():
    import torch

    from dualmesh_torch import veomni

    weight, bias = torch.arange(12.0).reshape(6, 2), torch.arange(6.0)
    state = dm.init_parallel_state(dp_size=1, ulysses_size=2)
    rank = state.index("ulysses")
    loss = torch.tensor(float(2 + rank), requires_grad=True)
    mean = veomni.reduce_sequence_parallel_loss(loss, torch.tensor(3 - 2 * rank))
    mean.backward()
    qkv = torch.arange(24.0).reshape(2, 12)[rank : rank + 1]
    return {
        "weight": [one.tolist() for one in veomni.divide_qkv_linear_weight(weight, 0)],
        "bias": [one.tolist() for one in veomni.divide_qkv_linear_bias(bias, 0)],
        "no bias": veomni.divide_qkv_linear_bias(None, 0),
        "loss": (mean.item(), loss.grad.item()),
        "qkv": veomni.gather_seq_scatter_heads_qkv(qkv, 0).tolist(),
        "sliced": veomni.slice_input_tensor_scale_grad(torch.arange(4.0), 0).tolist(),
        "padded": veomni.sp_pad_and_slice(torch.arange(3.0), pad_value=9).tolist(),
        "scaled": veomni.sp_pad_and_slice(torch.arange(3.0), pad_scale=4).tolist(),
        "packed": [one if isinstance(one, int) else list(one) for one in veomni.sp_gather_seqs(qkv[0, : 1 + rank], 0)],
        "taken": veomni.sp_take_own_seq(torch.arange(3.0), 0, [1, 2], rank).tolist(),
    }


def test_the_smaller_functions_keep_the_seeds_numbers():
    for rank, found in enumerate(torch_world(parts, world_size=2)):
        lower = [[0, 1], [2, 3]]
        assert found["weight"] == [lower, (np.array(lower) + 4).tolist(), (np.array(lower) + 8).tolist()]
        assert found["bias"] == [[0, 1], [2, 3], [4, 5]]
        assert found["no bias"] == (None, None, None)
        assert found["loss"] == (2.25, [1.5, 0.5][rank])
        columns = np.array([0, 1, 4, 5, 8, 9]) + 2 * rank
        assert found["qkv"] == [columns.tolist(), (columns + 12).tolist()]
        assert found["sliced"] == [2 * rank, 2 * rank + 1]
        assert found["padded"] == [[0, 1], [2, 9]][rank]
        assert found["scaled"] == [[0, 1, 2, 0], [0, 0, 0, 0]][rank]
        assert found["packed"] == [[0, 12, 13], [1, 2], rank]
        assert found["taken"] == [[0], [1, 2]][rank]
