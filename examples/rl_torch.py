"""Reinforcement learning with three states over the same ranks: policy, reference and rollout.

The policy trains under FSDP2 on all ranks, the frozen reference is held as replicas of shards, rollouts run split by
tensor: each in the state that suits it, on weights that come from the policy after every step.

torchrun --nproc-per-node 4 examples/rl_torch.py --steps 10
"""

import argparse
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dualmesh as dm

PROMPTS, CONTEXT, HIDDEN, ACTIONS, PENALTY = 16, 6, 8, 5, 0.1
# How a rollout holds each weight: columns of the first layer, rows of the second.
ROLLOUT = {
    "up.weight": dm.P("tp"),
    "up.bias": dm.P("tp"),
    "down.weight": dm.P(None, "tp"),
    "down.bias": dm.P(),
}


class Net(nn.Module):
    """Scores of actions in a context."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(CONTEXT, HIDDEN), nn.Linear(HIDDEN, ACTIONS)
        self.double()

    def forward(self, context: torch.Tensor) -> torch.Tensor:
        """Return the logarithm of every action's probability, (rows, actions)."""
        return self.down(torch.tanh(self.up(context))).log_softmax(-1)


class Rollout(NamedTuple):
    """What was tried: contexts, actions and their rewards, rows of the batch."""

    context: torch.Tensor
    action: torch.Tensor
    reward: torch.Tensor


def register(world: int) -> None:
    """Register the three states; the policy's is the default."""
    pair = 2 if world % 2 == 0 else 1
    rest = world // pair
    dm.init_parallel_state(dp_shard_size=world, name="policy")
    dm.init_parallel_state(dp_replicate_size=pair, dp_shard_size=rest, name="reference")
    dm.init_parallel_state(dp_size=rest, tp_size=pair, name="rollout")


def sharded(net: Net, name: str) -> Net:
    """Return the net, sharded over a state and always run in it."""
    fully_shard(net, mesh=dm.get_parallel_state_by_name(name).fsdp_mesh)
    return dm.scoped(net, name)


@torch.no_grad()
def rollout_weights(policy: Net) -> dict[str, torch.Tensor]:
    """Return the policy's weights as a rollout holds them, one whole at a time. *Collective.*"""
    state, held = dm.get_parallel_state_by_name("rollout"), {}
    for name, weight in policy.named_parameters():
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        held[name] = whole[dm.local_slices(ROLLOUT[name], whole.shape, state=state)].clone()
    return held


@torch.no_grad()
@dm.use_parallel_state("rollout")
def rolled_out(weights: dict[str, torch.Tensor], step: int) -> Rollout:
    """Act in this rank's contexts and return the rows that the policy's rank trains on. *Collective.*"""
    context, noise, best = (torch.from_numpy(part) for part in world_of(step))
    state = dm.get_parallel_state()
    context, noise, best = (x.chunk(state.data_size)[state.data_index] for x in (context, noise, best))
    hidden = torch.tanh(context @ weights["up.weight"].T + weights["up.bias"])
    scores = dm.ops.all_reduce(hidden @ weights["down.weight"].T, "tp") + weights["down.bias"]
    action = (scores + noise).argmax(-1)  # the noise belongs to the prompt, so that no topology changes it
    reward = (action == best).double()
    # All ranks of a tp group hold the same rows; the policy splits them further.
    return Rollout(*(dm.ops.take_block(x, "tp", 0) for x in (context, action, reward)))


def world_of(step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (contexts, noise, best actions) of all prompts of a step."""
    draw = np.random.default_rng(step)
    context = draw.normal(size=(PROMPTS, CONTEXT))
    return context, draw.gumbel(size=(PROMPTS, ACTIONS)), np.abs(context[:, :ACTIONS]).argmax(1)


@dm.use_parallel_state("policy")
def objective_of(policy: Net, reference: Net, tried: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (objective, mean reward): advantages weigh what was done, a penalty holds the policy to the reference."""
    reward = dm.ops.all_reduce(tried.reward.sum(), "dp") / PROMPTS
    with torch.no_grad():
        held = reference(tried.context)
    log = policy(tried.context)
    done = log.gather(1, tried.action[:, None])[:, 0]
    divergence = (log.exp() * (log - held)).sum(-1)
    loss = -((tried.reward - reward) * done) + PENALTY * divergence
    return dm.token_mean(loss.sum(), len(loss))[0], reward


def train(steps: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """Return the mean reward of every step, and the policy's weights afterwards."""
    session = dm.init_distributed("torch")
    register(session.world_size)
    policy, reference = sharded(Net(), "policy"), sharded(Net().requires_grad_(False), "reference")
    dm.sum_gradients(policy)
    optimizer = torch.optim.SGD(policy.parameters(), lr=2.0, foreach=False)
    rewards = []
    for step in range(steps):
        tried = rolled_out(rollout_weights(policy), step)
        objective, reward = objective_of(policy, reference, tried)
        optimizer.zero_grad()
        with dm.use_parallel_state("policy"):
            objective.backward()
            dm.clip_grad_norm_(policy, 1.0)
        optimizer.step()
        rewards.append(reward.item())
        if dm.get_parallel_state().is_writer():
            print(f"step {step + 1:3d}  mean reward {rewards[-1]:.3f}", flush=True)
    weights = {name: weight.full_tensor().detach().numpy() for name, weight in policy.named_parameters()}
    session.close()
    return rewards, weights


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    train(parser.parse_args().steps)
