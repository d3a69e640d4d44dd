"""Two worlds, each of processes of its own, joined in one transfer group; one of them restarts."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import dualmesh as dm
from dualmesh._support.ports import free_port
from dualmesh.testing.pools import Pool
from tests.worlds import torch_pool

SHAPES = {"float32": (5, 3), "bfloat16": (7,), "int64": (2, 2)}


def weights(generation):
    """Return what the trainer's first rank sends; other on each element and in each generation."""
    import torch

    draw = torch.Generator().manual_seed(generation)
    return {name: (torch.randn(shape, generator=draw) * 100).to(getattr(torch, name)) for name, shape in SHAPES.items()}


def broadcast(group, tensors):
    """Return the numbers of transfer rank 0's tensors."""
    import torch.distributed as dist

    native = group.process_group
    assert (native.rank(), native.size()) == (group.rank, group.size)
    for x in tensors.values():
        dist.broadcast(x, group=native, group_src=0)
    dist.barrier(group=native)
    return {name: x.tolist() for name, x in tensors.items()}


def own_sum():
    """Return what the process' own world sums; it is none of the others' business."""
    import torch

    state = dm.get_parallel_state_by_name("own")
    return dm.ops.all_reduce(torch.tensor([2.0 ** state.own_rank()]), "dp").item()


def trainer(rank, world_size, method, store, size):
    """Send two generations: after the first the rollouts are ended, and start anew."""
    with dm.session("torch", rank=rank, world_size=world_size, init_method=method):
        dm.init_parallel_state(dp_size=world_size, name="own")
        found, old = [], None
        for generation in (1, 2):
            group = dm.transfer_group("weights", rank=rank, size=size, store=store, timeout_s=100)
            assert group.generation == generation
            assert own_sum() == 2.0**world_size - 1
            found.append(broadcast(group, weights(generation if rank == 0 else 99)))
            if old is None:
                old = group
                said = until_stale(group)
        for ask in (lambda: old.process_group, lambda: old.require_live("send")):
            with pytest.raises(dm.StaleStateError, match="it was replaced"):
                ask()
        group.close()
        dm.host.barrier(state=dm.get_parallel_state_by_name("own"))
        return found, said


def until_stale(group, patience_s=100.0):
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        try:
            group.require_live("send")
        except dm.StaleStateError as error:
            return str(error)
        time.sleep(0.05)
    return "nobody left"


def rollout(rank, world_size, method, store, size, first):
    """Receive one generation, in a world of its own where it has several processes, else in none."""
    if world_size > 1:
        session = dm.init_distributed("torch", rank=rank, world_size=world_size, init_method=method)
        dm.init_parallel_state(dp_size=world_size, name="own")
        assert own_sum() == 2.0**world_size - 1
    group = dm.transfer_group("weights", rank=first + rank, size=size, store=store, timeout_s=100, backend="torch")
    found = broadcast(group, weights(99))
    if world_size > 1:
        assert own_sum() == 2.0**world_size - 1
        session.close()
    return found  # and leaves without closing: its process is ended


@pytest.mark.parametrize(("trainers", "rollouts"), [(2, 1), (2, 2)])
def test_two_worlds_transfer_bits_before_and_after_one_restarts(trainers, rollouts):
    size, store = trainers + rollouts, f"tcp://localhost:{free_port()}"
    methods = [f"tcp://127.0.0.1:{free_port()}" for _ in range(3)]
    received = []
    with ThreadPoolExecutor(1) as threads:
        calls = [(rank, trainers, methods[0], store, size) for rank in range(trainers)]
        sent = threads.submit(torch_pool.run, trainer, calls)
        for method in methods[1:]:
            pool = Pool({"OMP_NUM_THREADS": "1"})
            calls = [(rank, rollouts, method, store, size, trainers) for rank in range(rollouts)]
            try:
                received.append(pool.run(rollout, calls))
            finally:
                pool.close()
        answers = sent.result()
    wanted = [{name: x.tolist() for name, x in weights(generation).items()} for generation in (1, 2)]
    for generation, every in enumerate(received):
        assert every == [wanted[generation]] * rollouts
    for found, said in answers:
        assert found == wanted
        assert "left" in said or "it was replaced" in said


def alone(store):
    group = dm.transfer_group("weights", rank=0, size=2, store=store, timeout_s=20, backend="torch")
    with pytest.raises(dm.DualmeshError, match="of the backends torch, sim"):
        group.process_group  # noqa: B018
    group.close()
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with dm.transfer_group("weights", rank=0, size=1, store=store, timeout_s=20, backend="torch") as group:
        assert group.process_group.size() == 1
        dist.destroy_process_group()
        with pytest.raises(dm.StaleStateError, match="its process group ended, with the world"):
            group.process_group  # noqa: B018


def test_a_group_without_torch_on_one_side_or_after_its_world_has_no_process_group():
    with dm.TransferStore() as served, ThreadPoolExecutor(1) as threads:
        store = f"tcp://localhost:{served.port}"
        ran = threads.submit(torch_pool.run, alone, [(store,)])
        dm.transfer_group("weights", rank=1, size=2, store=store, timeout_s=60, backend="sim").close()
        ran.result()
