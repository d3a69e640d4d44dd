"""A torch trainer updates a small language model; every few steps a JAX sampler gets its weights and writes text.

In one program, each process in both worlds:
    torchrun --nproc-per-node 2 examples/rollout.py --out run
As two worlds, which meet at an address that the trainer serves:
    torchrun --nproc-per-node 2 examples/rollout.py --role trainer --meet tcp://localhost:29700 --out run
    python examples/rollout.py --role sampler --meet tcp://localhost:29700 --out run
"""

import argparse
import json
import os
from pathlib import Path

import numpy as np
import text

import dualmesh as dm

CONTEXT, WIDTH, HIDDEN, BATCH, RATE = 8, 16, 64, 32, 1.0
SHAPES = {"embed": (256, WIDTH), "inner": (CONTEXT * WIDTH, HIDDEN), "outer": (HIDDEN, 256)}
TRAINING = {name: dm.P("fsdp") for name in SHAPES}
SAMPLING = {"embed": dm.P(None, "tp"), "inner": dm.P(None, "tp"), "outer": dm.P("tp")}
PROMPT = b"import "


def first_model() -> dict[str, np.ndarray]:
    """Return the parameters that both frameworks start from."""
    draw = np.random.default_rng(0)
    return {name: (draw.normal(size=shape) / shape[0] ** 0.5).astype(np.float32) for name, shape in SHAPES.items()}


def windows(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return contexts (BATCH, CONTEXT) and the byte after each, (BATCH,)."""
    inputs, targets = text.batch(text.corpus(), step, size=BATCH, length=CONTEXT)
    return inputs, targets[:, -1]


class Trainer:
    """The model in torch, every parameter split over fsdp; one step of plain gradient descent at a time."""

    def __init__(self) -> None:
        self.state = dm.init_parallel_state(spec=dm.TopologySpec({"fsdp": -1}), name="trainer", backend="torch")
        self.params = {name: dm.distribute(x, TRAINING[name], state=self.state) for name, x in first_model().items()}
        rows = dm.P("fsdp")
        lifted = dm.shard_map(self._loss, (TRAINING, rows, rows), dm.P(), state=self.state)
        self._graded = dm.value_and_grad(lifted, state=self.state)

    def _loss(self, params, inputs, targets):
        import torch

        whole = {name: dm.ops.all_gather(x, "fsdp", dim=0) for name, x in params.items()}
        hidden = torch.tanh(whole["embed"][inputs.long()].flatten(1) @ whole["inner"])
        loss = torch.nn.functional.cross_entropy(hidden @ whole["outer"], targets.long(), reduction="sum")
        return dm.ops.all_reduce(loss, "fsdp") / BATCH

    def step(self, number: int) -> float:
        with dm.use_parallel_state("trainer"):
            inputs, targets = (dm.distribute(x, dm.P("fsdp")) for x in windows(number))
            loss, gradients = self._graded(self.params, inputs, targets)
            self.params = {name: x - RATE * gradients[name] for name, x in self.params.items()}
            return float(dm.to_numpy(loss))

    def weights(self) -> dict[str, np.ndarray]:
        with dm.use_parallel_state("trainer"):
            return {name: dm.to_numpy(x) for name, x in self.params.items()}


class Sampler:
    """The same model in JAX, every parameter split over tp."""

    def __init__(self, state: dm.ParallelState) -> None:
        import jax

        self.state = state
        self._write = jax.jit(self._continued, static_argnums=2)

    def _continued(self, params, window, count):
        import jax
        import jax.numpy as jnp

        def one(window, _):
            hidden = jnp.tanh(params["embed"][window].reshape(-1) @ params["inner"])
            byte = jnp.argmax(hidden @ params["outer"]).astype(window.dtype)
            return jnp.append(window[1:], byte), byte

        return dm.constrain(jax.lax.scan(one, window, length=count)[1], dm.P())

    def text(self, params, count: int = 40) -> str:
        start = np.frombuffer(PROMPT.rjust(CONTEXT)[-CONTEXT:], np.uint8).astype(np.int32)
        with dm.use_parallel_state(self.state):
            return (PROMPT + bytes(dm.to_numpy(self._write(params, start, count)).tolist())).decode("latin-1")

    def weights(self, params) -> dict[str, np.ndarray]:
        with dm.use_parallel_state(self.state):
            return {name: dm.to_numpy(x) for name, x in params.items()}


def together(options: argparse.Namespace) -> None:
    """Train and sample in the same processes."""
    with dm.session(backend=("torch", "jax")):
        trainer = Trainer()
        sampler = Sampler(dm.init_parallel_state(spec=dm.TopologySpec({"tp": -1}), name="sampler", backend="jax"))
        losses, texts = [], {}
        for step in range(options.steps):
            losses.append(trainer.step(step))
            if (step + 1) % options.every == 0:
                params = dm.transfer(trainer.params, src="trainer", dst="sampler", specs=(TRAINING, SAMPLING))
                texts[step + 1] = sampler.text(params)
        kept = trainer.weights(), sampler.weights(params)
        if trainer.state.is_writer():
            write(options.out, "trainer", kept[0], losses=losses)
            write(options.out, "sampler", kept[1], texts=texts)
        dm.host.barrier(state=trainer.state)  # who leaves first would close connections that others are using


def as_trainer(options: argparse.Namespace) -> None:
    """Train in a torch world, and send the weights over a link."""
    with dm.session(backend="torch"):
        trainer = Trainer()
        losses = []
        with dm.transfer_link("policy", role="source", state=trainer.state, specs=TRAINING, store=options.meet) as link:
            for step in range(options.steps):
                losses.append(trainer.step(step))
                if (step + 1) % options.every == 0:
                    link.send(trainer.params, version=step + 1)
        weights = trainer.weights()
        if trainer.state.is_writer():
            write(options.out, "trainer", weights, losses=losses)
        dm.host.barrier(state=trainer.state)


def as_sampler(options: argparse.Namespace) -> None:
    """Receive weights in a JAX world of two devices, and write with them."""
    with dm.session(backend="jax", world_size=2):
        state = dm.init_parallel_state(spec=dm.TopologySpec({"tp": -1}), name="sampler")
        sampler = Sampler(state)
        params = {name: dm.distribute(np.zeros(shape, np.float32), SAMPLING[name]) for name, shape in SHAPES.items()}
        texts = {}
        with dm.transfer_link("policy", role="target", state=state, specs=SAMPLING, store=options.meet) as link:
            for _ in range(options.steps // options.every):
                version = link.receive(into=params)
                texts[version] = sampler.text(params)
        write(options.out, "sampler", sampler.weights(params), texts=texts)


def write(folder: Path, role: str, weights: dict[str, np.ndarray], **facts) -> None:
    """Write what a role ended with; print it."""
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / f"{role}.npz", **weights)
    (folder / f"{role}.json").write_text(json.dumps(facts))
    print(role, json.dumps(facts, indent=1))


ROLES = {"both": together, "trainer": as_trainer, "sampler": as_sampler}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role", choices=ROLES, default="both")
    parser.add_argument("--meet", default=os.environ.get("ROLLOUT_MEET"), help="where two worlds meet, tcp://host:port")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20, help="steps between transfers")
    parser.add_argument("--out", type=Path, required=True, help="folder for losses, texts and last weights")
    options = parser.parse_args()
    if options.role != "both" and not options.meet:
        parser.error(f"--role {options.role} needs --meet tcp://host:port, the same for both worlds")
    ROLES[options.role](options)
