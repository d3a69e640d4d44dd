"""Train the composite model with torch: one gloo process per rank, torch autograd, torch.optim.AdamW.

torchrun --nproc-per-node 4 examples/torch_trainer.py --steps 60 --curve curve.json
"""

import argparse
import json
from pathlib import Path

import composite
import text
import topologies
import torch

import dualmesh as dm


def train(steps: int, path: str | None) -> list[float]:
    """Return the loss of every step."""
    world_size = dm.init_distributed("torch").world_size
    topologies.register(world_size)
    parameters = {
        name: torch.nn.Parameter(dm.distribute(torch.from_numpy(value), composite.SPECS[name]))
        for name, value in composite.initial_parameters().items()
    }
    specs = (composite.SPECS, composite.TOKENS, composite.TOKENS)
    loss_of = dm.shard_map(composite.loss, in_specs=specs, out_specs=dm.P())
    optimizer = torch.optim.AdamW(parameters.values(), lr=3e-3, weight_decay=0.01)
    corpus = text.corpus(path)
    losses = []
    for step in range(steps):
        batch = text.batch(corpus, step, size=topologies.BATCH, length=composite.LENGTH)
        inputs, targets = (dm.distribute(torch.from_numpy(part), composite.TOKENS) for part in batch)
        loss = loss_of(parameters, inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(dm.to_numpy(loss)))
        if dm.get_parallel_state().is_writer() and (step % 10 == 0 or step == steps - 1):
            print(f"torch  step {step + 1:3d}/{steps}  loss {losses[-1]:.4f}", flush=True)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--text")
    parser.add_argument("--curve", type=Path, required=True)
    options = parser.parse_args()
    curve = train(options.steps, options.text)
    if dm.get_parallel_state().is_writer():
        options.curve.write_text(json.dumps(curve))
    dm.init_distributed("torch").close()
