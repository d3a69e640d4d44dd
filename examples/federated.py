"""Two unequal federations train one small model on different text and average it every few steps.

torchrun --nproc-per-node 3 examples/federated.py --backend torch --curve torch.json
python examples/federated.py --backend jax --curve jax.json
"""

import argparse
import json
from pathlib import Path

import numpy as np
import text

import dualmesh as dm

SIZES = (2, 1)
LENGTH, BATCH, RATE = 16, 8, 2.0
SPEC = dm.FederatedSpec(SIZES, shard_size=1)


def batches(step: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (inputs, targets) of a step for every federation, each from its own half of the text."""
    halves = np.split(text.corpus()[: text.BUDGET // 2 * 2], 2)
    return [text.batch(half, step, size=BATCH, length=LENGTH) for half in halves]


def first_model() -> np.ndarray:
    """Return the table of a bigram model: the scores of the next byte, by byte."""
    return np.random.default_rng(0).normal(scale=0.02, size=(256, 256)).astype(np.float32)


def with_torch(steps: int, every: int) -> list[list[float]]:
    """Return the loss of every federation at every step."""
    import torch

    with dm.session(backend="torch"):
        state = dm.init_parallel_state(spec=SPEC, name="federation")
        number = state.spec.federation.federated_rank(state.own_rank())
        model = torch.from_numpy(first_model()).requires_grad_()
        losses = []
        for step in range(steps):
            inputs, targets = (torch.from_numpy(part).long() for part in batches(step)[number])
            loss = torch.nn.functional.cross_entropy(model[inputs].flatten(0, 1), targets.flatten())
            (gradient,) = torch.autograd.grad(loss, model)
            model = (model - RATE * gradient).detach()
            if (step + 1) % every == 0:
                model = dm.federated_mean(model, state, weights=SIZES)
            model.requires_grad_()
            every_loss = dm.host.all_gather(loss.item(), "world", state=state)
            losses.append([every_loss[state.spec.federation.communicating(f)[0]] for f in range(len(SIZES))])
        dm.host.barrier(state=state)  # who leaves first would close connections that others are using
    return losses


def with_jax(steps: int, every: int) -> list[list[float]]:
    """Return the loss of every federation at every step."""
    import jax
    import jax.numpy as jnp

    def loss_of(model, inputs, targets):
        scores = jax.nn.log_softmax(model[inputs])
        return -jnp.mean(jnp.take_along_axis(scores, targets[..., None], -1))

    @jax.jit
    def update(model, inputs, targets):
        loss, gradient = jax.value_and_grad(loss_of)(model, inputs, targets)
        return model - RATE * gradient, loss

    with dm.session(backend="jax", world_size=sum(SIZES)):
        state = dm.init_parallel_state(spec=SPEC, name="federation")
        ends = np.cumsum(SIZES)
        homes = [
            jax.sharding.Mesh(state.mesh.devices.flat[end - size : end], ("rank",))
            for end, size in zip(ends, SIZES, strict=True)
        ]
        layouts = [jax.sharding.NamedSharding(home, jax.P()) for home in homes]
        models = [jax.device_put(first_model(), layout) for layout in layouts]
        losses = []
        for step in range(steps):
            updated = []
            for model, layout, batch in zip(models, layouts, batches(step), strict=True):
                updated.append(update(model, *(jax.device_put(part, layout) for part in batch)))
            models = [model for model, _ in updated]
            losses.append([float(loss) for _, loss in updated])
            if (step + 1) % every == 0:
                models = dm.federated_mean(models, state, weights=SIZES)
        return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("torch", "jax"), required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=5, help="steps between averages")
    parser.add_argument("--curve", type=Path, required=True)
    options = parser.parse_args()
    curves = (with_torch if options.backend == "torch" else with_jax)(options.steps, options.every)
    options.curve.write_text(json.dumps(curves))
