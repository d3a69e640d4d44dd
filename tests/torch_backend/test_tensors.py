"""What tensors collectives take, however they lie in memory, and that their results are the caller's own."""

import numpy as np
import pytest

import dualmesh as dm
from tests.worlds import torch_world

OPS = {
    "all_gather": lambda x: dm.ops.all_gather(x, "a"),
    "all_reduce": lambda x: dm.ops.all_reduce(x, "a"),
    "reduce_scatter": lambda x: dm.ops.reduce_scatter(x, "a"),
    "all_to_all": lambda x: dm.ops.all_to_all(x, "a", 0, 0),
    "broadcast": lambda x: dm.ops.broadcast(x, "a", src=1),
    "shift": lambda x: dm.ops.shift(x, "a"),
    "permute": lambda x: dm.ops.permute(x, "a", [(1, 0)]),
    "take_block": lambda x: dm.ops.take_block(x, "a", 0),
    "ragged_all_to_all": lambda x: dm.ops.ragged_all_to_all(x, "a", [2, 2], [2, 2]),
    "started all_gather": lambda x: dm.ops.all_gather(x, "a", async_=True).wait(),
}


def changed_in_place():
    """Double every op's result in place; return the ops whose values or gradients are then not doubled."""
    import torch

    dm.init_parallel_state(spec=dm.TopologySpec({"a": 2}))
    wrong = []
    for dtype in (torch.float64, torch.complex128):
        for name, op in OPS.items():
            x, y = (torch.ones(4, 2, dtype=dtype, requires_grad=True) for _ in range(2))
            doubled = op(x).mul_(2)
            plain = op(y)
            doubled.abs().sum().backward()
            plain.abs().sum().backward()
            if not torch.equal(doubled, 2 * plain) or not torch.equal(x.grad, 2 * y.grad):
                wrong.append((name, dtype))
    return wrong


def test_results_may_be_changed_in_place():
    assert torch_world(changed_in_place, world_size=2) == [[], []]


def odd_tensors():
    """Give ops what is laid out oddly: a dim of size 1 of any stride, rows without elements, dual tensors."""
    import torch
    from torch.autograd import forward_ad

    rank = dm.init_parallel_state(spec=dm.TopologySpec({"a": 2})).own_rank()
    column = torch.arange(4, dtype=torch.int16).reshape(1, 4).t() + rank
    gathered = dm.ops.all_gather(column, "a").flatten().tolist()
    started = dm.ops.all_gather(column, "a", async_=True).wait().flatten().tolist()
    ragged = dm.ops.ragged_all_to_all(column, "a", [2, 2], [2, 2]).flatten().tolist()
    thin = dm.ops.ragged_all_to_all(torch.ones(4, 0), "a", (1, 1), (1, 1)).shape
    said = []
    for op in (op for name, op in OPS.items() if name != "take_block"):  # which communicates nothing
        with forward_ad.dual_level():
            said.append(refusal_of(lambda op=op: op(forward_ad.make_dual(torch.ones(4, 2), torch.ones(4, 2)))))
        said.append(refusal_of(lambda op=op: torch.func.jvp(op, (torch.ones(4, 2),), (torch.ones(4, 2),))))
    return gathered, started, ragged, tuple(thin), said


def refusal_of(act):
    try:
        act()
    except dm.DualmeshError as error:
        return type(error).__name__
    return None


def test_odd_tensors_move_or_are_refused_by_name():
    for rank, (gathered, started, ragged, thin, said) in enumerate(torch_world(odd_tensors, world_size=2)):
        assert gathered == started == [0, 1, 2, 3, 1, 2, 3, 4]
        assert ragged == ([0, 1, 1, 2] if rank == 0 else [2, 3, 3, 4])
        assert thin == (2, 0)
        assert set(said) == {"NotDifferentiableError"}


def shifted_by_turns():
    """Compile one function of the offset; return what it and its gradient give for several."""
    import torch

    rank = dm.init_parallel_state(spec=dm.TopologySpec({"a": 4})).own_rank()
    step = torch.compile(lambda x, offset: dm.ops.shift(x, "a", offset) * 1, backend="aot_eager", fullgraph=True)
    found = []
    for offset in (1, -1, 2, 3):
        x = torch.tensor([float(rank)], requires_grad=True)
        y = step(x, offset)
        (y * rank).sum().backward()
        found.append((y.item(), x.grad.item()))
    return found


def test_a_compiled_shift_takes_other_offsets():
    for rank, found in enumerate(torch_world(shifted_by_turns, world_size=4)):
        assert found == [((rank - offset) % 4, (rank + offset) % 4) for offset in (1, -1, 2, 3)]


def marked():
    """Apply every op to conjugates and negatives that are marks on other memory, and to copies without marks."""
    import torch

    state = dm.init_parallel_state(spec=dm.TopologySpec({"a": 2}))
    base = torch.arange(8.0).reshape(4, 2) + 10 * state.own_rank()
    whole = torch.complex(base, base + 0.5)
    inputs = {"conj": whole.conj(), "neg": whole.conj().imag, "dense neg": torch._neg_view(base)}
    wrong = []
    for kind, x in inputs.items():
        plain = x.resolve_conj().resolve_neg().clone()
        for name, op in OPS.items():
            for run in (op, torch.compile(op, fullgraph=True, backend="aot_eager")):
                if run is not op and (kind != "conj" or name.startswith("started")):
                    continue
                torch._dynamo.reset()
                found = run(x)
                if not np.array_equal(found.resolve_conj().resolve_neg().numpy(), op(plain).numpy()):
                    wrong.append((kind, name, run is op))
    try:
        dm.ops.all_reduce(torch.eye(2).to_sparse(), "a")
    except dm.DualmeshError as error:
        return wrong, str(error)
    return wrong, None


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_conjugates_and_negatives_that_are_only_marked_move_as_values():
    for wrong, sparse in torch_world(marked, world_size=2):
        assert wrong == []
        assert "found a tensor of layout torch.sparse_coo" in sparse
