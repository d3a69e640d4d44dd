"""What only an accelerator shows: NCCL worlds, and backward in autograd's worker threads."""

import pytest

from tests.gpu import gpu, on_gpu

pytestmark = gpu


def test_backward_in_worker_threads_sees_the_scope_of_the_forward_and_leaves_that_of_the_call():
    code = """
import threading, torch, dualmesh as dm
seen = []
class Look(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, g):
        seen.append((dm.scope_name(), threading.get_ident() == main))
        return g
main = threading.get_ident()
with dm.session(backend="torch"):
    dm.init_parallel_state(dp_size=1)
    dm.init_parallel_state(dp_size=1, dp_mode="ddp", name="other")
    x = torch.ones(2, device="cuda", requires_grad=True)
    x.register_hook(lambda g: seen.append((dm.scope_name(), threading.get_ident() == main)))
    with dm.use_parallel_state("other"):
        y = Look.apply(x) * 2
        y.register_hook(lambda g: seen.append((dm.scope_name(), threading.get_ident() == main)))
    y.sum().backward()
    y = Look.apply(x).sum()
    with dm.use_parallel_state("other"):
        y.backward()
print(seen)
"""
    hook, rule, leaf, second, its_leaf = eval(on_gpu(code))
    assert (hook, rule, leaf) == (("other", False), ("other", False), ("base", False))
    assert (second, its_leaf) == (("base", False), ("other", False))


def test_nccl_world_trains_under_fsdp2():
    code = """
import torch, torch.distributed as dist, dualmesh as dm
from torch.distributed.fsdp import fully_shard
with dm.session(backend="torch"):
    state = dm.init_parallel_state(dp_size=1)
    net = torch.nn.Linear(4, 2).cuda()
    fully_shard(net, mesh=state.fsdp_mesh)
    dm.sum_gradients(net)
    net(torch.ones(3, 4, device="cuda")).sum().backward()
    print(dist.get_backend(), state.device_type, net.bias.grad.full_tensor().tolist())
"""
    assert on_gpu(code).endswith("cuda [3.0, 3.0]")


def test_a_world_bound_to_its_device_makes_member_groups_and_stays_bound():
    code = """
import torch, torch.distributed as dist, dualmesh as dm
device = torch.device("cuda:0")
store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
state = dm.init_parallel_state(dp_size=1, own_groups=True)
state.warm_up()
group = state.group("dp")
x = torch.full((2,), 3.0, device=device)
dist.all_reduce(x, group=group)
print(group is not dist.group.WORLD, dist.group.WORLD.bound_device_id == device, x.tolist(), dist.get_backend(group))
dm.clear_parallel_state()
dist.destroy_process_group()
"""
    assert on_gpu(code) == "True True [3.0, 3.0] nccl"


def test_members_alone_make_groups_in_a_world_bound_to_devices():
    code = """
import torch, torch.distributed as dist, torch.multiprocessing as mp, dualmesh as dm

def run(rank, port):
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, device_id=device
    )
    base = dm.init_parallel_state(spec=dm.TopologySpec({"a": 2}))
    if rank == 0:  # rank 1 makes no group here: splitting the default communicator would wait for it
        alone = dm.init_parallel_state(spec=dm.TopologySpec({"b": 1}), ranks=(0,), name="alone", own_groups=True)
        alone.warm_up()
    total = dm.ops.all_reduce(torch.tensor([rank + 1.0], device=device), "a", state=base).item()
    assert total == 3.0 and dist.group.WORLD.bound_device_id == device
    dm.clear_parallel_state()
    dist.destroy_process_group()

if torch.cuda.device_count() < 2:
    print("one device")
else:
    import socket
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.start_processes(run, (port,), nprocs=2, start_method="fork")
    print("done")
"""
    said = on_gpu(code)
    if said == "one device":
        pytest.skip("this machine has one GPU, and an NCCL world needs one for each rank")
    assert said == "done"
