"""Train the composite model with JAX: one process, one device per rank, value_and_grad under jit, optax AdamW.

python examples/jax_trainer.py --world-size 4 --steps 60 --curve curve.json
"""

import argparse
import json
from pathlib import Path

import composite
import jax
import optax
import text
import topologies

import dualmesh as dm


def train(world_size: int, steps: int, path: str | None) -> list[float]:
    """Return the loss of every step."""
    with dm.session(backend="jax", world_size=world_size):
        topologies.register(world_size)
        parameters = {
            name: dm.distribute(value, composite.SPECS[name]) for name, value in composite.initial_parameters().items()
        }
        specs = (composite.SPECS, composite.TOKENS, composite.TOKENS)
        loss_of = dm.shard_map(composite.loss, in_specs=specs, out_specs=dm.P())
        optimizer = optax.adamw(3e-3, weight_decay=0.01)
        # Not under jit, which would put the moments whole on one device; counts lie everywhere, as a step returns them.
        moments = optimizer.init(parameters)
        optimizer_state = jax.tree.map(lambda x: x if x.ndim else dm.distribute(x, dm.P()), moments)

        @jax.jit
        def update(parameters, optimizer_state, inputs, targets):
            loss, gradients = jax.value_and_grad(loss_of)(parameters, inputs, targets)
            updates, optimizer_state = optimizer.update(gradients, optimizer_state, parameters)
            return optax.apply_updates(parameters, updates), optimizer_state, loss

        corpus = text.corpus(path)
        losses = []
        for step in range(steps):
            batch = text.batch(corpus, step, size=topologies.BATCH, length=composite.LENGTH)
            inputs, targets = (dm.distribute(part, composite.TOKENS) for part in batch)
            parameters, optimizer_state, loss = update(parameters, optimizer_state, inputs, targets)
            losses.append(float(loss))
            if step % 10 == 0 or step == steps - 1:
                print(f"jax    step {step + 1:3d}/{steps}  loss {losses[-1]:.4f}", flush=True)
        return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--text")
    parser.add_argument("--curve", type=Path, required=True)
    options = parser.parse_args()
    options.curve.write_text(json.dumps(train(options.world_size, options.steps, options.text)))
