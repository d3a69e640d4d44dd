"""Whole trees moved between states on every backend, bit for bit; on torch, messages that are the plan's own."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.testing import assert_same
from tests.worlds import worlds

P = dm.P
EXPERTS = dm.TopologySpec({"dp": 4}, views={"expert": dm.View(over=("dp",), axes={"ep_fsdp": 2, "ep": 2})})


def grid(**sizes):
    return dm.TopologySpec(sizes)


CHAINS = {
    2: [("tp", grid(tp=2), None), ("dp", grid(dp=2), (1, 0)), ("one", grid(x=1), (1,))],
    3: [("tp", grid(tp=3), None), ("pair", grid(tp=2), (2, 0)), ("dp", grid(dp=3), (2, 0, 1))],
    4: [
        ("tp4", grid(tp=4), None),
        ("tp2dp2", grid(dp=2, tp=2), None),
        ("fsdp4", grid(dp=4), None),
        ("experts", EXPERTS, None),
        ("left", grid(tp=2), (0, 1)),
        ("right", grid(dp=2), (3, 2)),
        ("trainers", grid(dp=3), (0, 1, 2)),
        ("rollout", grid(tp=1), (3,)),
    ],
    6: [
        ("grid", grid(dp=2, tp=3), None),
        ("two", grid(dp=3, tp=2), (5, 3, 1, 4, 2, 0)),
        ("part", grid(tp=4), (1, 2, 4, 5)),
    ],
    8: [("grid", grid(dp=2, tp=4), None), ("cube", grid(dp=2, cp=2, tp=2), None), ("half", grid(dp=4), (7, 5, 3, 1))],
}
"""The states that a tree goes through, by world: (name, spec, ranks)."""


def specs_of(spec):
    """Return how the tree lies over a grid: as many axes as there are."""
    axes = [*spec.axes, None, None]
    if spec == EXPERTS:
        return {"w": P(("ep", "ep_fsdp")), "layers.0.b": P("ep"), "layers.1.b": P(None, "ep"), "steps": P()}
    return {"w": P(axes[0], axes[1]), "layers.0.b": P(axes[0]), "layers.1.b": P(None, axes[1]), "steps": P()}


def tree():
    draw = np.random.default_rng(7)
    return {
        "w": draw.normal(size=(24, 24)).astype("float32"),
        "layers": [
            {"b": draw.integers(-(2**30), 2**30, (12,)).astype("int32")},
            {"b": draw.normal(size=(4, 24)).astype("float16")},
        ],
        "steps": np.array(41, "int32"),
    }


def placed(values, specs, state):
    def laid_out(path, x):
        return dm.distribute(x, specs[path], state=state)

    first, second = values["layers"]
    layers = [{"b": laid_out("layers.0.b", first["b"])}, {"b": laid_out("layers.1.b", second["b"])}]
    return {"w": laid_out("w", values["w"]), "layers": layers, "steps": laid_out("steps", values["steps"])}


def chained(chain):
    """Move a tree from state to state; return its value after each step, where this process is a member."""
    states = [dm.init_parallel_state(spec=spec, ranks=ranks, name=name) for name, spec, ranks in chain]
    specs = [specs_of(spec) for _, spec, _ in chain]
    moved = placed(tree(), specs[0], states[0]) if states[0].is_member else None
    found = []
    for number in range(1, len(chain)):
        moved = dm.transfer(
            moved,
            src=chain[number - 1][0],
            dst=chain[number][0],
            specs=(specs[number - 1], specs[number]),
            buffer_bytes=(256, 1 << 20)[number % 2],
            checksum=number % 3 == 0,
        )
        assert (moved is not None) == states[number].is_member
        if moved is not None:
            read = {"w": moved["w"], "b0": moved["layers"][0]["b"], "b1": moved["layers"][1]["b"], "s": moved["steps"]}
            found.append({name: dm.to_numpy(x, state=states[number]) for name, x in read.items()})
    return found


@pytest.mark.parametrize("world_size", CHAINS)
@pytest.mark.parametrize("backend", ["sim", "torch", "jax"])
def test_a_tree_keeps_its_bits_through_every_state(backend, world_size):
    x, chain = tree(), CHAINS[world_size]
    expected = {"w": x["w"], "b0": x["layers"][0]["b"], "b1": x["layers"][1]["b"], "s": x["steps"]}
    every = worlds()[backend](chained, chain, world_size=world_size)
    for rank, found in enumerate(every):
        member = [ranks is None or rank in ranks or backend != "torch" for _, _, ranks in chain[1:]]
        assert len(found) == sum(member)
        for step, values in enumerate(found):
            assert_same(f"step {step}, rank {rank}", expected, values, rtol=0)


def counted():
    """Return, per rank, the bytes that torch was asked to send and receive, and the plan's figures."""
    import torch.distributed as dist

    from dualmesh.weights.plan import plan_transfer

    source = dm.init_parallel_state(spec=grid(dp=2, tp=2), name="source")
    target = dm.init_parallel_state(spec=grid(tp=2), ranks=(3, 1), name="target")
    specs = specs_of(source.spec), specs_of(target.spec)
    moved = {"send": 0, "receive": 0}
    real = dist.isend, dist.irecv

    def noting(what, fn):
        def call(buffer, **where):
            moved[what] += buffer.numel() * buffer.element_size()
            return fn(buffer, **where)

        return call

    dist.isend, dist.irecv = noting("send", real[0]), noting("receive", real[1])
    try:
        dm.transfer(placed(tree(), specs[0], source), src=source, dst=target, specs=specs)
    finally:
        dist.isend, dist.irecv = real
    x = tree()
    flat = {"w": x["w"], "layers.0.b": x["layers"][0]["b"], "layers.1.b": x["layers"][1]["b"], "steps": x["steps"]}
    known = {path: (value.shape, value.dtype.itemsize) for path, value in flat.items()}
    plan = plan_transfer(known, src=(source, specs[0]), dst=(target, specs[1]))
    rank = source.own_rank()
    return moved, {"send": plan.bytes_sent(rank), "receive": plan.bytes_received(rank)}


def test_the_bytes_that_torch_moves_are_the_plans():
    every = worlds()["torch"](counted, world_size=4)
    for moved, planned in every:
        assert moved == planned
    assert sum(moved["send"] for moved, _ in every) > 0


QKV = {"q": 8, "k": 4, "v": 4}


def fused_and_refused():
    import torch

    source = dm.init_parallel_state(spec=grid(tp=4), name="source")
    target = dm.init_parallel_state(spec=grid(dp=2, tp=2), name="target")
    rank, draw = source.own_rank(), np.random.default_rng(5)
    parts = {f"attn.{name}": draw.normal(size=(size, 3)) for name, size in QKV.items()}

    def fused(shards, index):
        return torch.from_numpy(np.concatenate([np.split(x, shards)[index] for x in parts.values()]))

    specs = {"attn.qkv": dm.Fused(P("tp"), QKV)}
    again = dm.transfer({"attn.qkv": fused(4, rank)}, src=source, dst=target, specs=specs)
    assert_same("fused", fused(2, target.index("tp")), again["attn.qkv"], rtol=0)
    separate = dm.transfer(
        {"attn.qkv": fused(4, rank)}, src=source, dst=target, specs=(specs, dict.fromkeys(parts, P("tp")))
    )
    halves = {path: np.split(x, 2)[target.index("tp")] for path, x in parts.items()}
    assert_same("apart", halves, separate, rtol=0)
    renamed = dm.transfer(
        {"w": torch.full((2,), float(rank))},
        src=source,
        dst=target,
        specs=({"w": P("tp")}, {"v": P()}),
        renames={"v": "w"},
    )
    assert renamed["v"].tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    said = {}
    for name, call in {
        "shapes": lambda: dm.transfer({"w": torch.ones(2 + rank // 3)}, src=source, dst=target, specs=P("tp")),
        "kinds": lambda: dm.transfer({"w": torch.ones(2) if rank else 3}, src=source, dst=target, specs=P("tp")),
        "sizes": lambda: dm.transfer({"w": torch.ones(1, 3)}, src=source, dst=target, specs=(P("tp"), P(None, "tp"))),
        "specs": lambda: dm.transfer({"w": torch.ones(2)}, src=source, dst=target, specs={"v": P("tp")}),
    }.items():
        try:
            call()
        except dm.DualmeshError as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def test_torch_takes_fused_blocks_and_refuses_trees_that_differ_on_every_rank():
    for rank, said in enumerate(worlds()["torch"](fused_and_refused, world_size=4)):
        assert "AgreementError: transfer: ranks 0 and 3 gave different trees: w: ((8,)" in said["shapes"]
        assert ("ArrayTypeError" if rank == 0 else "rank 0 refused its tree") in said["kinds"]
        assert "'w' is a int" in said["kinds"]
        assert "dst: 'w' of shape (4, 3): dim 1 has size 3" in said["sizes"]
        assert "src has no spec for 'w'" in said["specs"]


def fused_of_global_arrays(fused):
    """Take a fused array apart on the way, and fuse its parts again on the way back."""
    source = dm.init_parallel_state(spec=grid(tp=4), name="source")
    target = dm.init_parallel_state(spec=grid(dp=2, tp=2), name="target")
    together = {"attn.qkv": dm.Fused(P("tp"), QKV)}
    apart = {"attn.q": P("tp"), "attn.k": P("dp"), "attn.v": P()}
    x = {"attn.qkv": dm.distribute(fused, P("tp"), state=source)}
    moved = dm.transfer(x, src=source, dst=target, specs=(together, apart))
    again = dm.transfer(moved, src=target, dst=source, specs=(apart, together))
    read = {path: dm.to_numpy(part, state=target) for path, part in moved.items()}
    return read, dm.to_numpy(again["attn.qkv"], state=source)


@pytest.mark.parametrize("backend", ["sim", "jax"])
def test_fused_arrays_are_taken_apart_and_fused_where_arrays_move_one_by_one(backend):
    draw = np.random.default_rng(5)
    parts = {f"attn.{name}": draw.normal(size=(size, 3)).astype("float32") for name, size in QKV.items()}
    fused = np.concatenate([np.split(part, 4)[rank] for rank in range(4) for part in parts.values()])
    for read, again in worlds()[backend](fused_of_global_arrays, fused, world_size=4):
        assert_same("", {**parts, "fused": fused}, {**read, "fused": again}, rtol=0)


def tied():
    """Return an array at two places of the target, and what is said of renames and trees that lose one."""
    source = dm.init_parallel_state(spec=grid(tp=4), name="source")
    target = dm.init_parallel_state(spec=grid(dp=2, tp=2), name="target")
    tree = {
        name: dm.distribute(np.arange(8, dtype="float32") + 10 * n, P("tp"), state=source)
        for n, name in enumerate(("embed", "other"))
    }
    where = {"embed": P("dp"), "head": P("tp"), "other": P()}
    moved = dm.transfer(tree, src=source, dst=target, specs=(P("tp"), where), renames={"head": "embed"})
    read = {name: dm.to_numpy(x, state=target).tolist() for name, x in moved.items()}
    said = []
    listed = {"embed": P("tp"), "other": P("tp")}
    for renames, given, specs in (
        ({"other": "embed"}, tree, P("tp")),
        ({"x": "embde"}, tree, P("tp")),
        (None, {"a.b": tree["embed"], "a": {"b": tree["other"]}}, P("tp")),
        (None, {1: tree["embed"], "1": tree["other"]}, P("tp")),
        (None, tree, (P("tp"), {**listed, "head": P("tp")})),
        (None, tree, (dm.ShardingPlan({"**": P("tp")}), {**listed, "head": P("tp")})),
        (None, tree, (P("tp"), {**listed, "qk": dm.Fused(P("tp"), {"q": 4, "k": 4})})),
        (None, {1: tree["embed"]}, (P("tp"), {1: P("tp"), "1": P("dp")})),
    ):
        try:
            dm.transfer(given, src=source, dst=target, specs=specs, renames=renames)
            said.append("accepted")
        except dm.DualmeshError as error:
            said.append(str(error))
    return read, said


@pytest.mark.parametrize("backend", ["sim", "torch", "jax"])
def test_tied_arrays_arrive_twice_and_no_array_is_lost_on_any_backend(backend):
    """The same answers and the same refusals everywhere."""
    embed, other = np.arange(8.0).tolist(), (np.arange(8.0) + 10).tolist()
    for read, said in worlds()[backend](tied, world_size=4):
        assert read == {"embed": embed, "head": embed, "other": other}
        for text, part in zip(
            said,
            (
                "'other' of the source goes nowhere",
                "'embde', which",
                "the path 'a.b'",
                "the path '1'",
                "dst asks for 'head', which the source does not hold. It holds: embed, other",
                "dst asks for 'head', which the source does not hold. It holds: embed, other",
                "dst asks for 'qk', fused of q, k too, which the source does not hold",
                "dst: two specs have the path '1'",
            ),
            strict=True,
        ):
            assert part in text
