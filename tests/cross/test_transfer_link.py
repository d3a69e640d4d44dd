"""A torch world and a JAX world, each of processes of its own: trees go over a link both ways, bit for bit."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

import dualmesh as dm
from dualmesh._support.ports import free_port
from dualmesh.testing import assert_same
from tests.worlds import jax_pool, torch_pool

P = dm.P
TORCH = {"w": P("tp", "dp"), "b": P("dp"), "half": P("tp"), "step": P()}
JAX = {"w": P(None, ("y", "x")), "b": P("x"), "half": P(None, "y"), "step": P()}


def values(seed):
    draw = np.random.default_rng(seed)
    return {
        "w": draw.normal(size=(8, 8)).astype("float32"),
        "b": draw.integers(-(2**30), 2**30, (6,)).astype("int32"),
        "half": draw.normal(size=(4, 6)).astype("float32"),  # travels as bfloat16
        "step": np.array(seed, "int32"),
    }


def on_torch(store, rank, method):
    """Send one tree, receive another into tensors that exist."""
    import torch

    with dm.session("torch", rank=rank, world_size=2, init_method=method):
        state = dm.init_parallel_state(spec=dm.TopologySpec({"tp": 2, "dp": 1}), name="trainer")

        def laid_out(seed):
            tree = {name: dm.distribute(x, TORCH[name]) for name, x in values(seed).items() if name != "half"}
            rows = np.split(values(seed)["half"], 2)[rank]
            return {**tree, "half": torch.from_numpy(rows).to(torch.bfloat16)}  # this rank's block

        with dm.transfer_link("there", role="source", state=state, specs=TORCH, store=store, timeout_s=100) as link:
            assert link.send(laid_out(5), version=5) == 5
            assert link.send({"b": laid_out(6)["b"]}, version=6) == 6
        into = laid_out(99)
        kept = into["w"]
        with dm.transfer_link("back", role="target", state=state, specs=TORCH, store=store, timeout_s=100) as link:
            assert link.receive(into=into) == 7
        assert into["w"] is kept
        read = {name: dm.to_numpy(x) for name, x in into.items() if name != "half"}
        return {**read, "half": into["half"].float().numpy()}


def on_jax(store):
    """Receive one tree and a part of another in place of arrays that exist, and send a third."""
    import jax.numpy as jnp

    with dm.session("jax", world_size=4):
        state = dm.init_parallel_state(spec=dm.TopologySpec({"x": 2, "y": 2}), name="sampler")

        def laid_out(seed):
            tree = {name: jnp.asarray(x) for name, x in values(seed).items()}
            tree["half"] = tree["half"].astype(jnp.bfloat16)
            return {name: dm.constrain(x, JAX[name]) for name, x in tree.items()}

        into = laid_out(99)
        with dm.transfer_link("there", role="target", state=state, specs=JAX, store=store, timeout_s=100) as link:
            assert link.receive(into=into) == 5
            first = {name: np.asarray(x if name != "half" else x.astype(jnp.float32)) for name, x in into.items()}
            assert link.receive(into=into) == 6
            for name, x in into.items():
                assert x.sharding.is_equivalent_to(state.sharding(JAX[name]), x.ndim)
        with dm.transfer_link("back", role="source", state=state, specs=JAX, store=store, timeout_s=100) as link:
            assert link.send(laid_out(7), version=7) == 7
        return first, np.asarray(into["b"])


def as_bfloat16(x):
    """Return the numbers rounded as both frameworks round them."""
    bits = x.view(np.uint32).astype(np.uint64)
    return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32)


def test_trees_go_from_torch_to_jax_and_back():
    method = f"tcp://127.0.0.1:{free_port()}"
    with dm.TransferStore() as served, ThreadPoolExecutor(2) as threads:
        store = f"tcp://localhost:{served.port}"
        torch_side = threads.submit(torch_pool.run, on_torch, [(store, rank, method) for rank in range(2)])
        jax_side = threads.submit(jax_pool.run, on_jax, [(store,)])
        ((first, b),) = jax_side.result()
        every = torch_side.result()
    sent, back = ({**values(seed), "half": as_bfloat16(values(seed)["half"])} for seed in (5, 7))
    assert_same("there", [sent, values(6)["b"]], [first, b], rtol=0)
    for rank, found in enumerate(every):
        assert_same(f"back on rank {rank}", {**back, "half": np.split(back["half"], 2)[rank]}, found, rtol=0)
