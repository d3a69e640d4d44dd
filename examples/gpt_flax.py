"""The GPT in flax NNX: one global program under jit; the compiler splits it, told only where parameters lie."""

import gpt
import jax
import optax
from flax import nnx
from jax import numpy as jnp

import dualmesh as dm
from dualmesh.testing import Trained, tap

PLAN = dm.ShardingPlan(
    {
        **{f"blocks.*.{name}.kernel": dm.P(None, "tp") for name in ("qkv", "up")},
        "blocks.*.up.bias": dm.P("tp"),
        **{f"blocks.*.{name}.kernel": dm.P("tp") for name in ("out", "down")},
    },
    default=dm.P(),
)
SPLIT = dm.P("dp", "sp", "tp")


def layer_norm(rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Return what torch calls LayerNorm: another epsilon than flax's, and the variance in two passes."""
    return nnx.LayerNorm(gpt.WIDTH, epsilon=1e-5, use_fast_variance=False, rngs=rngs)


class Block(nnx.Module):
    """One layer, with query, key and value in one kernel."""

    def __init__(self, name: str, rngs: nnx.Rngs) -> None:
        self.name = name
        self.norm1, self.norm2 = layer_norm(rngs), layer_norm(rngs)
        self.qkv = nnx.Linear(gpt.WIDTH, 3 * gpt.WIDTH, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(gpt.WIDTH, gpt.WIDTH, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(gpt.WIDTH, gpt.HIDDEN, rngs=rngs)
        self.down = nnx.Linear(gpt.HIDDEN, gpt.WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map all tokens, (sequences, LENGTH, WIDTH)."""
        inputs = tap(f"{self.name}.attn.in", self.norm1(x), gpt.TOKENS)
        mixed = tap(f"{self.name}.attn", self.attention(inputs), SPLIT)
        x = x + self.out(mixed.reshape(x.shape))
        inputs = tap(f"{self.name}.mlp.in", self.norm2(x), gpt.TOKENS)
        hidden = tap(f"{self.name}.mlp", nnx.gelu(self.up(inputs), approximate=False), SPLIT)
        return tap(self.name, x + self.down(hidden), gpt.TOKENS)

    def attention(self, x: jax.Array) -> jax.Array:
        """Return causal attention, (sequences, LENGTH, HEADS, dim)."""
        query, key, value = jnp.split(self.qkv(x).reshape(*x.shape[:2], 3 * gpt.HEADS, -1), 3, axis=2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[-1] ** -0.5
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)


class GPT(nnx.Module):
    """The whole model."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        # flax's Embed rounds what it looks up to the dtype that it was built with.
        self.embed = nnx.Embed(gpt.VOCABULARY, gpt.WIDTH, param_dtype=jnp.float64, rngs=rngs)
        self.position = nnx.Embed(gpt.LENGTH, gpt.WIDTH, param_dtype=jnp.float64, rngs=rngs)
        self.blocks = nnx.List([Block(f"layers.{number}", rngs) for number in range(gpt.LAYERS)])
        self.norm, self.head = layer_norm(rngs), nnx.Linear(gpt.WIDTH, gpt.VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the logits of all tokens."""
        x = tap("embed", self.embed(tokens) + self.position(jnp.arange(gpt.LENGTH)), gpt.TOKENS)
        for block in self.blocks:
            x = block(x)
        return tap("logits", self.head(self.norm(x)), gpt.TOKENS)


def port(params: dict, batches: list) -> Trained:
    """Train, and return losses, gradients and parameters as global arrays."""
    graph, state = nnx.split(nnx.eval_shape(lambda: GPT(nnx.Rngs(0))))  # its values come from `params`
    paths = {".".join(map(str, path)): path for path, _ in nnx.to_flat_state(state)}
    params = {name: dm.distribute(value, PLAN.spec_of(name, value.shape)) for name, value in params.items()}
    optimizer = optax.adamw(gpt.OPTIMIZER["lr"], weight_decay=gpt.OPTIMIZER["weight_decay"])

    def loss(params: dict, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        flat = [(path, nnx.Param(params[name])) for name, path in paths.items()]
        logits = nnx.merge(graph, nnx.from_flat_state(flat))(tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def update(params: dict, moments: object, tokens: jax.Array, targets: jax.Array) -> tuple:
        value, gradients = jax.value_and_grad(loss)(params, tokens, targets)
        value = tap("loss", value)
        tap("norm.bias, summed", gradients["norm.bias"])
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, value, gradients

    moments = jax.tree.map(replicated_scalar, optimizer.init(params))
    # Kept as they lie, or the second step would be compiled anew.
    kept = jax.tree.map(lambda x: x.sharding, (params, moments))
    update = jax.jit(update, out_shardings=(*kept, None, None))
    losses, first = [], None
    for batch in batches:
        params, moments, value, gradients = update(params, moments, *(dm.distribute(x, gpt.TOKENS) for x in batch))
        losses.append(value)
        first = gradients if first is None else first
    return Trained(losses, first, params)


def replicated_scalar(x: jax.Array) -> jax.Array:
    """Return an array as it lies, and a scalar on every device."""
    return x if x.ndim else dm.distribute(x, dm.P())
