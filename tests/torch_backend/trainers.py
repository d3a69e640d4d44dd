"""One small model with experts, and every way in which PyTorch trains it: wrapped, split, staged, saved and loaded.

Each way returns how far it ends from the one-process run. No size and no factor appears in a training step.
"""

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import dualmesh as dm

WIDTH, HIDDEN, EXPERTS, ROWS, STEPS, MAX_NORM = 8, 16, 4, 16, 4, 0.5
EXPERTS_PLAN = dm.ShardingPlan({"up": dm.P("ep", "ep_fsdp")})


class Block(nn.Module):
    """Two layers around a residual."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        """Return x and what the layers make of it."""
        return x + self.down(torch.tanh(self.up(x)))


class Experts(nn.Module):
    """Experts of which each ep index holds a run; row i goes to the expert that its first element chooses."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)
        self.axis = "cp"  # of size 1, where there is no ep

    def split(self, state, wrapping):
        """Keep this rank's experts: a plain block, or a DTensor of all of them, by hand or by a plan."""
        if not state.ep_enabled:
            return
        self.axis = "ep"
        if wrapping == "plain":
            self.up = nn.Parameter(self.up.detach().chunk(state.ep_size)[state.ep_rank].clone())
        elif wrapping == "plan":
            EXPERTS_PLAN.apply(self, units="")
        else:
            self.up = nn.Parameter(distribute_tensor(self.up.detach(), state.submesh("ep"), [Shard(0)]))
            replicas = ("ep_replicate",) if state.enabled("ep_replicate") else ()
            mesh = state.submesh(*replicas, "ep_fsdp")
            fully_shard(self, mesh=mesh, shard_placement_fn=lambda parameter: Shard(1))

    def forward(self, x):
        """Return x and every row through its expert, wherever that is."""
        rows = dm.ops.all_gather(x, self.axis)
        chosen = (rows[:, 0] * 1000).detach().abs().long() % EXPERTS
        held = self.up.to_local() if isinstance(self.up, DTensor) else self.up
        first = dm.ops.axis_index(self.axis) * held.shape[0]
        own = torch.stack([torch.tanh(rows @ up) * (chosen == first + i)[:, None] for i, up in enumerate(held)])
        return x + dm.ops.reduce_scatter(own.sum(0), self.axis)


class Network(nn.Module):
    """Layers in order, by name."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.first, self.last = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        self.a, self.b, self.experts = Block(), Block(), Experts()
        self.order = ("first", "a", "experts", "b", "last")
        self.double()

    def forward(self, x):
        """Return (rows, 3)."""
        for name in self.order:
            x = getattr(self, name)(x)
        return x


def batch(step):
    """Return the whole batch of a step."""
    draw = np.random.default_rng(step)
    return torch.from_numpy(draw.normal(size=(ROWS, 4))), torch.from_numpy(draw.normal(size=(ROWS, 3)))


def own_rows(step):
    """Return this rank's rows of the batch: it is split over the axes of the loss."""
    state = dm.get_parallel_state()
    axis = state.topology.role("loss")
    return [part.chunk(state.size(axis))[state.index(axis)] for part in batch(step)]


def objective_of(made, wanted, total=None):
    """Return (objective, value) of the mean squared error."""
    return dm.token_mean((made - wanted).square().sum(), len(made), total=total)


def network(wrapping, *, compiled=False):
    """Return the model, split and wrapped for the ambient state: parallelize, compile, shard, in this order."""
    state, net = dm.get_parallel_state(), Network()
    if state.enabled("tp"):
        plan = {
            f"{name}.{half}": way()
            for name in "ab"
            for half, way in (("up", ColwiseParallel), ("down", RowwiseParallel))
        }
        parallelize_module(net, state.submesh("tp"), plan)
    if state.enabled("pp"):
        net.order = (net.order[:3], net.order[3:])[state.index("pp")]
        for name in {"first", "a", "experts", "b", "last"} - set(net.order):
            delattr(net, name)
    if compiled:
        for name in {"a", "b", "experts"} & set(net.order):
            getattr(net, name).compile(backend="aot_eager", fullgraph=True)
    if "experts" in net.order:
        net.experts.split(state, wrapping)
    if wrapping in ("fsdp2", "plan"):
        sharded(net, state)
    if wrapping == "ddp":
        net = DistributedDataParallel(net, process_group=state.group("dp_sp"))
    if wrapping != "plain":
        dm.sum_gradients(net)
    return net


def sharded(net, state):
    """Shard over what shares parameters all that is not sharded yet."""
    for name in {"a", "b"} & set(net.order):
        fully_shard(getattr(net, name), mesh=state.fsdp_mesh)
    fully_shard(net, mesh=state.fsdp_mesh)


def optimizer_of(net):
    """Return an optimizer with a state per parameter."""
    return torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9, foreach=False)


def step_of(net, wrapping):
    """Return the function that does forward and backward of a step and returns the loss."""
    if dm.get_parallel_state().enabled("pp"):
        return staged_step(net)

    def step(number):
        x, wanted = own_rows(number)
        objective, value = objective_of(net(x), wanted)
        objective.backward()
        if wrapping == "plain":
            experts = set(net.experts.parameters())
            dm.sync_gradients([p for p in net.parameters() if p not in experts])
            dm.sync_gradients(experts, ("ep_replicate", "ep_fsdp"))
        return value.item()

    return step


def staged_step(net):
    """Return the step of a pipeline: two stages, two micro-batches, one total."""
    state = dm.get_parallel_state()

    def loss(made, wanted):
        return objective_of(made, wanted, total=ROWS)[0]

    stage = PipelineStage(net, state.pp_rank, state.pp_size, torch.device("cpu"), group=state.group("pp"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=loss, scale_grads=False)

    def step(number):
        x, wanted = own_rows(number)
        if not state.is_last_pp_stage:
            schedule.step(*([x] if state.is_first_pp_stage else []))
            return None
        objectives = []
        schedule.step(target=wanted, losses=objectives)
        return dm.ops.all_reduce(sum(objectives).detach(), state.topology.role("loss")).item()

    return step


def trained(net, wrapping, optimizer, numbers):
    """Train over the steps of some numbers; return losses and norms before clipping."""
    step, losses, norms = step_of(net, wrapping), [], []
    plain_experts = wrapping == "plain" and dm.get_parallel_state().ep_enabled
    blocks = {"ep": list(net.experts.parameters())} if plain_experts else {}
    for number in numbers:
        optimizer.zero_grad()
        losses.append(step(number))
        norms.append(dm.clip_grad_norm_(net.parameters(), MAX_NORM, blocks=blocks).item())
        optimizer.step()
    return losses, norms


def whole(net):
    """Return this rank's view of the parameters: whole, but of its own experts and its own stage only."""
    return {
        name.removeprefix("module."): (p.full_tensor() if isinstance(p, DTensor) else p).detach().numpy().copy()
        for name, p in net.named_parameters()
    }


def in_one_process():
    """Train in a single process with torch's own clipping; return losses, norms and parameters after every step."""
    dm.init_parallel_state(dp_size=1)
    net = Network()
    optimizer = optimizer_of(net)
    losses, norms = [], []
    for number in range(STEPS):
        x, wanted = batch(number)
        optimizer.zero_grad()
        loss = (net(x) - wanted).square().sum() / ROWS
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM).item())
        optimizer.step()
    return losses, norms, whole(net)


def compared(expected, losses, norms, found):
    """Return the largest relative difference to the one-process run, by what differs."""
    own = {name: value for name, value in expected[2].items() if name in found}
    state = dm.get_parallel_state()
    if "experts.up" in own and len(found["experts.up"]) < EXPERTS:
        own["experts.up"] = np.split(own["experts.up"], state.ep_size)[state.ep_rank]
    start = STEPS - len(losses)
    worst = {name: _difference(found[name], own[name]) for name in found}
    worst["loss"] = max(
        (_difference(a, b) for a, b in zip(losses, expected[0][start:], strict=True) if a is not None), default=0.0
    )
    worst["norm"] = _difference(norms, expected[1][start:])
    return worst


def _difference(found, expected):
    return float(np.max(np.abs(np.asarray(found) - expected)) / np.max(np.abs(expected)))


def run(wrapping, settings, compiled, expected):
    """Train in a topology; return the differences."""
    torch.compiler.reset()  # one process runs all topologies, more than the compiler keeps of one function
    dm.init_parallel_state(**settings)
    net = network(wrapping, compiled=compiled)
    losses, norms = trained(net, wrapping, optimizer_of(net), range(STEPS))
    return compared(expected, losses, norms, whole(net))


def handed_on(topologies, path, expected):
    """Train a part of the steps in each topology, saved by one and loaded by the next; return the differences.

    Experts are laid out by hand in the first topology, by a plan in the second, and so on.
    """
    losses, norms = [], []
    for place, settings in enumerate(topologies):
        dm.init_parallel_state(**settings)
        torch.manual_seed(1)
        net = network(("fsdp2", "plan")[place % 2])
        optimizer = optimizer_of(net)
        if place > 0:
            for parameter in net.parameters():
                torch.nn.init.constant_(parameter, 0.5)
            model, states = get_state_dict(net, optimizer)
            dcp.load({"model": model, "optimizer": states}, checkpoint_id=f"{path}/{place - 1}")
            set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=states)
        numbers = np.array_split(np.arange(STEPS), len(topologies))[place]
        for whole_run, part in zip((losses, norms), trained(net, "fsdp2", optimizer, numbers.tolist()), strict=True):
            whole_run += part
        if place + 1 < len(topologies):
            model, states = get_state_dict(net, optimizer)
            dcp.save({"model": model, "optimizer": states}, checkpoint_id=f"{path}/{place}")
            dm.clear_parallel_state()
    return compared(expected, losses, norms, whole(net))
