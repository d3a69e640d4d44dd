"""Every op and every function of `dm.sequence` in one compiled graph, forward and backward, by torch's backends.

The suite gives all of them to "aot_eager" and a part to the two backends around it; all of them to all three, as before
a release and with a new torch: `python -m tests.torch_backend.test_compile_all`, some minutes.
"""

import pytest

import dualmesh as dm
from tests.worlds import torch_pool, torch_world

seq = dm.sequence

OPS = {
    "all_reduce": lambda x: dm.ops.all_reduce(x, "sp"),
    "all_reduce mean": lambda x: dm.ops.all_reduce(x, "cp", op="mean"),
    "all_reduce max": lambda x: dm.ops.all_reduce(x.detach(), "sp", op="max"),
    "all_gather": lambda x: dm.ops.all_gather(x, "sp", dim=1),
    "reduce_scatter": lambda x: dm.ops.reduce_scatter(x, "sp", dim=-1),
    "reduce_scatter mean": lambda x: dm.ops.reduce_scatter(x, "cp", dim=0, op="mean"),
    "all_to_all": lambda x: dm.ops.all_to_all(x, "sp", 0, 2),
    "all_to_all same dim": lambda x: dm.ops.all_to_all(x, "ulysses", 1, 1),
    "broadcast": lambda x: dm.ops.broadcast(x, "sp", src=2),
    "shift": lambda x: dm.ops.shift(x, "sp", offset=-1),
    "shift no wrap": lambda x: dm.ops.shift(x, "cp", wrap=False),
    "permute": lambda x: dm.ops.permute(x, "sp", [(0, 2), (2, 1)]),
    "take_block": lambda x: dm.ops.take_block(x, "sp", 0),
    "axis_index": lambda x: x * dm.ops.axis_index("sp") + dm.ops.axis_size("sp"),
    "ragged_all_to_all": lambda x: (
        dm.ops.ragged_all_to_all(x, "cp", (1, 3), (1, 3), rows=5)
        if dm.ops.axis_index("cp") == 0
        else dm.ops.ragged_all_to_all(x, "cp", (3, 1), (3, 1), rows=5)
    ),
    "enter": lambda x: dm.ops.enter(x, "sp"),
    "leave": lambda x: dm.ops.leave(x, "sp"),
    "started": lambda x: dm.ops.all_gather(x, "sp", async_=True).wait(),
    "size 1": lambda x: dm.ops.all_reduce(x, "tp"),
    "tuple": lambda x: dm.ops.all_reduce(x, ("cp", "ulysses")),
    "state=": lambda x: dm.ops.all_reduce(x, "sp", state=dm.get_parallel_state()),
}
SEQUENCE = {
    "gather_seq_scatter_heads": lambda x: seq.gather_seq_scatter_heads(x, seq_dim=1, head_dim=2, unpadded_length=7),
    "gather_heads_scatter_seq": lambda x: seq.gather_heads_scatter_seq(x[:, :3], seq_dim=1, head_dim=2),
    "ulysses_attention": lambda x: seq.ulysses_attention(
        *(x.reshape(1, 4, 4, 8)[..., s] for s in (slice(0, 4), slice(4, 8), slice(2, 6))), lambda q, k, v: q * k + v
    ),
    "ring_attention": lambda x: seq.ring_attention(*(x.reshape(1, 4, 4, 8) / 9,) * 3),
    "ring_attention placed": lambda x: seq.ring_attention(
        *(x.reshape(1, 4, 4, 8) / 9,) * 3, positions=seq.sequence_positions(x, 4, "cp")
    ),
    "slice_sequence": lambda x: seq.slice_sequence(x, 0),
    "gather_sequence": lambda x: seq.gather_sequence(x, 1, unpadded_length=13),
    "pad and unpad": lambda x: seq.unpad_sequence(seq.pad_sequence(x[:3], 0), 0, 2),
    "roll": lambda x: seq.roll(x, 3, 1),
    "sequence_positions": lambda x: x + seq.sequence_positions(x, 8),
    "pad_tensor": lambda x: seq.unpad_tensor(seq.pad_tensor(x, 1, 3, 2.0), 1, 2),
    "sp_pad_and_slice": lambda x: seq.sp_pad_and_slice(x, -1, 7, 2),
    "sp_pad": lambda x: seq.sp_pad(x[:, :, :3]),
    "slice_input_tensor": lambda x: seq.slice_input_tensor(x, 0),
    "slice_input_tensor_scale_grad": lambda x: seq.slice_input_tensor_scale_grad(x, 1, "ulysses"),
    "gather_outputs": lambda x: seq.gather_outputs(x, 1, lengths=(4, 4, 4, 4)),
    "sp_gather_seqs": lambda x: seq.sp_take_own_seq(
        *seq.sp_gather_seqs(x, 0, lengths=(4, 4, 4, 4))[:1], 0, (4, 4, 4, 4), dm.ops.axis_index("sp")
    ),
    "qkv": lambda x: seq.gather_seq_scatter_heads_qkv(x[..., :6], 0),
    "loss": lambda x: seq.reduce_sequence_parallel_loss(x.mean(), 3),
    "getters": lambda x: (
        x
        * seq.get_ulysses_sequence_parallel_rank()
        * seq.get_unified_sequence_parallel_world_size()
        * seq.get_context_parallel_rank()
        * seq.get_data_parallel_world_size()
    ),
}
ALL = {**OPS, **SEQUENCE}


def against_eager(backend, names):
    """Return the names whose value or gradient differs between compiled and eager code, and compiles per run."""
    import torch
    from torch._dynamo.testing import CompileCounterWithBackend

    state = dm.init_parallel_state(ulysses_size=2, cp_size=2)
    state.warm_up(("cp", "ulysses"))
    torch._dynamo.reset()
    rank = state.own_rank()

    def everything(x):
        return {name: ALL[name](x) for name in names}

    counter = CompileCounterWithBackend(backend)
    results = []
    for run in (everything, torch.compile(everything, fullgraph=True, backend=counter)):
        x = (torch.arange(128.0, dtype=torch.float64).reshape(4, 4, 8).transpose(0, 1) * 0.03 + rank).requires_grad_()
        found = {}
        outputs = run(x)
        for name, y in outputs.items():
            found[name] = [y.detach()]
            if y.requires_grad:
                weight = torch.cos(torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape) + rank)
                found[name] += torch.autograd.grad((y * weight).sum(), x, retain_graph=True)
        results.append(found)
    one, two = results
    wrong = [
        name
        for name in names
        if len(one[name]) != len(two[name])
        or not all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(one[name], two[name], strict=True))
    ]
    return wrong, counter.frame_count, [name for name in names if len(one[name]) == 1]


BACKENDS = ("eager", "aot_eager", "inductor")


def check(backend, names):
    for wrong, graphs, without_gradient in torch_world(against_eager, backend, names, world_size=4, timeout_s=900):
        assert wrong == []
        assert graphs == 1
        assert without_gradient == [name for name in names if name == "all_reduce max"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_everything_compiles_into_one_graph_and_equals_eager_code(backend):
    # "eager" is the first half of what "aot_eager" does, and inductor compiles C++ in every process.
    step = {"eager": 5, "aot_eager": 1, "inductor": 12}[backend]
    check(backend, list(ALL)[::step])


if __name__ == "__main__":
    for name in BACKENDS:
        check(name, list(ALL))
        print(f"{name}: {len(ALL)} functions, forward and backward, are those of eager code")
    torch_pool.close()
