"""The life of a JAX trainer with several states: set up, build, train, tear down. The twin of `composite_torch`.

The thinker (attention over split sequences) and the talker (experts) each have a state, and so has the trainer: base.
Base is the default, so that data, logging and callbacks need no scope. The step is one jit over all three; each part
enters its own state whoever calls it, its specs are in its own axis names, and no out_shardings are given.

python examples/composite_jax.py --world-size 4 --steps 20 --curve curve.json
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dualmesh as dm

VOCABULARY, WIDTH, HEADS, LENGTH, EXPERTS, BATCH, MAX_NORM = 32, 16, 4, 8, 4, 8, 1.0
# Each part's specs are in its state's names: the thinker has pieces of sequences, the talker whole ones, fewer rows.
TOKENS, ROWS = dm.P("dp", "ulysses"), dm.P("dp")
SPECS = {
    "thinker": {"embedding": dm.P("dp_shard_sp"), "qkv": dm.P(None, "dp_shard_sp")},
    "talker": {"experts": dm.P("ep"), "head": dm.P()},
}


def initial(name: str) -> dict[str, np.ndarray]:
    """Draw the parameters of one part, the same everywhere."""
    draw = np.random.default_rng(len(name))
    shapes = {
        "thinker": {"embedding": (VOCABULARY, WIDTH), "qkv": (3, WIDTH, WIDTH)},
        "talker": {"experts": (EXPERTS, WIDTH, WIDTH), "head": (WIDTH, VOCABULARY)},
    }[name]
    return {key: (draw.normal(size=shape) / WIDTH**0.5).astype(np.float32) for key, shape in shapes.items()}


def think(own: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
    """Return hidden states, in the layout of the tokens."""
    embedding = dm.ops.all_gather(own["embedding"], "dp_shard_sp", 0)
    x = embedding[tokens]
    layers = dm.ops.all_gather(own["qkv"], "dp_shard_sp", 1)
    heads = [(x @ layer).reshape(*x.shape[:2], HEADS, -1) for layer in layers]
    return x + dm.sequence.ulysses_attention(*heads, attend).reshape(x.shape)


def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Attend causally, (batch, length, heads, width) in and out."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def talk(own: dict[str, jax.Array], hidden: jax.Array) -> jax.Array:
    """Return logits; each row goes through the expert that its largest element chooses, wherever that is."""
    rows = dm.ops.all_gather(hidden.reshape(-1, WIDTH), "ep")
    chosen = jax.lax.stop_gradient(rows).argmax(1) % EXPERTS
    first = dm.ops.axis_index("ep") * len(own["experts"])
    parts = [jnp.tanh(rows @ up) * (chosen == first + i)[:, None] for i, up in enumerate(own["experts"])]
    mixed = dm.ops.reduce_scatter(sum(parts), "ep")
    return (hidden + mixed.reshape(hidden.shape)) @ own["head"]


def score(own: dict[str, jax.Array], hidden: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the mean loss over all tokens."""
    losses = optax.softmax_cross_entropy_with_integer_labels(talk(own, hidden), targets)
    objective, _ = dm.token_mean(losses.sum(), targets.size)
    return dm.ops.all_reduce(objective, "world")


class Trainer:
    """The life cycle, one method per phase."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.reports: list[str] = []
        self.callbacks: list[Callable[[int], None]] = []

    def set_up(self, world: int) -> None:
        """Start the world and register the states, all at once and before first use: they share one mesh."""
        self.session = dm.init_distributed("jax", world_size=world)
        ulysses, ep = (2, 2) if world % 2 == 0 else (1, 1)
        base = dm.parallel_spec(dp_size=world // ulysses, ulysses_size=ulysses)
        # Axes of one's own, so that "ep" is there on one device, too.
        talker = dm.TopologySpec(
            {"dp": world},
            views={"experts": dm.View(over=("dp",), axes={"ep_fsdp": world // ep, "ep": ep})},
            roles={"data": ("dp",), "params": ("dp",), "loss": ("dp",)},
        )
        dm.init_parallel_states({"base": base, "thinker": base, "talker": talker}, default="base")

    def build(self) -> None:
        """Build all that reads the ambient state when it is made."""
        self.parameters = {}
        for name, specs in SPECS.items():
            with dm.use_parallel_state(name):
                values = initial(name)
                self.parameters[name] = {key: dm.distribute(values[key], spec) for key, spec in specs.items()}
        thinker = dm.scoped(dm.shard_map(think, (SPECS["thinker"], TOKENS), TOKENS), "thinker")
        scored = dm.scoped(dm.shard_map(score, (SPECS["talker"], ROWS, ROWS), dm.P()), "talker")
        with dm.use_parallel_state("talker"):
            self.callbacks.append(dm.bind(self.report))  # keeps the talker's state, whoever calls it
        schedule = optax.linear_schedule(0.02, 0.01, 20)
        optimizer = optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.adamw(schedule))
        # Not under jit: zeros that depend on no values would lie whole on one device. So they lie as their parameters.
        self.optimizer_state = jax.tree.map(on_every_device, optimizer.init(self.parameters))
        self.data = batches()

        @jax.jit
        def update(parameters: Any, state: Any, tokens: jax.Array, targets: jax.Array) -> tuple[Any, Any, jax.Array]:
            def loss(parameters: Any) -> jax.Array:
                hidden = thinker(parameters["thinker"], tokens)
                hidden = dm.reshard(hidden, src=("thinker", TOKENS), dst=("talker", ROWS))
                return scored(parameters["talker"], hidden, targets)

            value, gradients = jax.value_and_grad(loss)(parameters)
            updates, state = optimizer.update(gradients, state, parameters)
            return optax.apply_updates(parameters, updates), state, value

        self.update = update

    def step(self, number: int) -> None:
        """Train one step; what needs a state names it, the rest does not."""
        tokens, targets = next(self.data)
        tokens = dm.distribute(tokens, TOKENS)
        targets = dm.distribute(targets, ROWS, state=dm.get_parallel_state_by_name("talker"))
        self.parameters, self.optimizer_state, loss = self.update(
            self.parameters, self.optimizer_state, tokens, targets
        )
        self.losses.append(float(loss))
        for callback in self.callbacks:
            callback(number)

    def report(self, number: int) -> None:
        """Say, in the state that this callback was bound in, what was reached."""
        worst = dm.ops.all_reduce(self.losses[-1], "world", "max")
        self.reports.append(f"{dm.scope_name()} step {number + 1}: {worst:.4f}")

    def tear_down(self) -> None:
        """End the session, forget the states."""
        self.callbacks.clear()
        self.session.close()
        dm.clear_parallel_state()


def on_every_device(x: jax.Array) -> jax.Array:
    """Return an array as it lies, but a count on every device, as a step returns it: else the second would compile."""
    return x if x.ndim else dm.distribute(x, dm.P())


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (tokens, targets), whole batches; two that come again, to be learnt."""
    windows = np.random.default_rng(1).integers(0, VOCABULARY, (2, BATCH, LENGTH + 1))
    while True:
        for batch in windows:
            yield batch[:, :-1], batch[:, 1:]


def train(world: int, steps: int) -> Trainer:
    """Run the life cycle; tear down also when a step raises."""
    trainer = Trainer()
    trainer.set_up(world)
    try:
        trainer.build()
        for number in range(steps):
            trainer.step(number)
    finally:
        trainer.tear_down()
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--curve", type=Path)
    options = parser.parse_args()
    trained = train(options.world_size, options.steps)
    print(f"loss {trained.losses[0]:.4f} -> {trained.losses[-1]:.4f}")
    if options.curve:
        options.curve.write_text(json.dumps(trained.losses))
