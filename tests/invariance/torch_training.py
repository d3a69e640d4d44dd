"""Three ways to train the model of `model` with torch, each over any split: no size and no factor appears here.

lifted: DTensors through `dm.shard_map`. plain: per-rank parameters, `dm.sync_gradients`. fsdp2: `fully_shard` and
`dm.sum_gradients`, the experts on their view's mesh.
"""

import numpy as np
import torch
from torch.distributed.fsdp import fully_shard

import dualmesh as dm
from tests.invariance import model
from tests.invariance.comparison import differences
from tests.invariance.reference import BETAS, DECAY, EPSILON, LEARNING_RATE, STEPS


def lifted(accumulation, dtype, expected):
    """Train global arrays: parameters are DTensors, the loss is lifted."""
    parameters = {
        name: torch.nn.Parameter(dm.distribute(torch.from_numpy(value), model.STORED[name]))
        for name, value in model.initial_parameters(dtype).items()
    }
    specs = (model.STORED, model.TOKENS, model.TOKENS, dm.P())
    loss_of = dm.shard_map(model.global_loss, in_specs=specs, out_specs=dm.P())
    count = dm.shard_map(model.token_count, in_specs=(model.MICRO_BATCHES,), out_specs=dm.P())

    def backward(tokens, targets):
        total = count(dm.distribute(targets, model.MICRO_BATCHES))
        values = []
        for micro in zip(tokens, targets, strict=True):
            loss = loss_of(parameters, *(dm.distribute(part, model.TOKENS) for part in micro), total)
            loss.backward()
            values.append(dm.to_numpy(loss))
        return sum(values)

    read = {name: dm.to_numpy for name in parameters}
    return trained(parameters, accumulation, backward, read, expected)


def plain(accumulation, dtype, expected):
    """Train this rank's blocks as plain parameters."""
    parameters = blocks(dtype)
    experts = [parameters[name] for name in model.OF_EXPERTS]
    others = [parameter for name, parameter in parameters.items() if name not in model.OF_EXPERTS]

    def backward(tokens, targets):
        tokens, targets = (own(part) for part in (tokens, targets))
        total, values = model.token_count(targets), []
        for micro in zip(tokens, targets, strict=True):
            objective, value = model.objective_of(parameters, *micro, total)
            objective.backward()
            values.append(value.item())
        dm.sync_gradients(others)
        dm.sync_gradients(experts, ("ep_replicate", "ep_fsdp"))
        return sum(values)

    read = {name: lambda x: x.detach().numpy() for name in parameters}
    return trained(parameters, accumulation, backward, read, expected, cut)


def fsdp2(accumulation, dtype, expected):
    """Train modules that FSDP2 shards: the experts over their view, the rest over what shares parameters."""
    state = dm.get_parallel_state()
    network = Network(blocks(dtype))
    replicas = ("ep_replicate",) if state.enabled("ep_replicate") else ()
    fully_shard(network.experts, mesh=state.submesh(*replicas, "ep_fsdp"))
    fully_shard(network, mesh=state.fsdp_mesh)
    dm.sum_gradients(network)

    def backward(tokens, targets):
        tokens, targets = (own(part) for part in (tokens, targets))
        total, values = model.token_count(targets), []
        for micro in zip(tokens, targets, strict=True):
            objective, value = network(*micro, total)
            objective.backward()
            values.append(value.item())
        return sum(values)

    parameters = {name.removeprefix("experts."): value for name, value in network.named_parameters()}
    read = {name: lambda x: x.full_tensor().detach().numpy() for name in parameters}
    return trained(parameters, accumulation, backward, read, expected, cut)


def trained_by(form):
    """Return the function that trains in a form."""
    return {"lifted": lifted, "plain": plain, "fsdp2": fsdp2}[form]


class Network(torch.nn.Module):
    """The model as a module."""

    def __init__(self, parameters):
        super().__init__()
        self.experts = Experts({name: parameters.pop(name) for name in model.OF_EXPERTS})
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)

    def forward(self, tokens, targets, total):
        """Return (objective, value)."""
        weights = dict(self.named_parameters(recurse=False))
        return model.objective_of(weights, tokens, targets, total, experts=self.experts)


class Experts(torch.nn.Module):
    """The experts that this rank holds."""

    def __init__(self, parameters):
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)

    def forward(self, rows, which):
        """Return each row through its expert."""
        return model.applied_experts(self.experts_up, self.experts_down, rows, which)


def blocks(dtype):
    """Return this rank's blocks of the parameters that the model computes with."""
    values = model.initial_parameters(dtype)
    return {name: torch.nn.Parameter(torch.from_numpy(cut(name, value).copy())) for name, value in values.items()}


def cut(name, whole):
    """Return this rank's block of a parameter."""
    return whole[dm.local_slices(model.COMPUTED[name], whole.shape)]


def own(micro_batches):
    """Return this rank's part of every micro-batch."""
    return micro_batches[dm.local_slices(model.MICRO_BATCHES, micro_batches.shape)].contiguous()


def trained(parameters, accumulation, backward, read, expected, cut=lambda name, whole: whole):
    """Train and compare; `backward` of (micro-batches of tokens, of targets) leaves gradients and returns the loss."""
    options = {"lr": LEARNING_RATE, "weight_decay": DECAY, "betas": BETAS, "eps": EPSILON}
    optimizer = torch.optim.AdamW(parameters.values(), **options, fused=True)
    losses, gradients = [], None
    for step in range(STEPS):
        micro_batches = [torch.from_numpy(np.stack(np.split(part, accumulation))) for part in model.batch(step)]
        optimizer.zero_grad()
        losses.append(backward(*micro_batches))
        if gradients is None:
            gradients = {name: read[name](p.grad).copy() for name, p in parameters.items()}
        optimizer.step()
    return differences(losses, gradients, {name: read[name](p) for name, p in parameters.items()}, expected, cut)
