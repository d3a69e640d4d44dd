"""What only an accelerator shows: NCCL worlds, and backward in autograd's worker threads."""

from tests.gpu import gpu, on_gpu

pytestmark = gpu


def test_backward_in_worker_threads_sees_the_scope_where_backward_was_called():
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
    y = Look.apply(torch.ones(2, device="cuda", requires_grad=True)).sum()
    with dm.use_parallel_state("other"):
        y.backward()
    Look.apply(torch.ones(2, device="cuda", requires_grad=True)).sum().backward()
print(seen)
"""
    assert on_gpu(code) == "[('other', False), ('base', False)]"


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
