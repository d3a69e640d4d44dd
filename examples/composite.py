"""A composite language model over bytes, written once for torch, JAX and numpy.

The *thinker*, a causal attention trunk, splits batch and sequence; the *talker*, a causal decoder head over the
thinker's hidden states, splits the batch only. Both run in one step, each in its own parallel state. Nothing here
names a framework, a group or a world size.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from array_api_compat import array_namespace

import dualmesh as dm

VOCABULARY = 256
WIDTH = 64
HEADS = 4
LENGTH = 128
TRUNK_BLOCKS = 2

# Matrices are split over all ranks that share parameters and gathered where they are used; vectors are replicated.
SPLIT = dm.P("dp_shard_sp")
TOKENS = dm.P("dp", "ulysses")
_ATTENTION = {"query": (WIDTH, WIDTH), "key": (WIDTH, WIDTH), "value": (WIDTH, WIDTH), "output": (WIDTH, WIDTH)}
_MLP = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
_BLOCK = {**_ATTENTION, **_MLP, "attention_scale": (WIDTH,), "mlp_scale": (WIDTH,)}

SHAPES: dict[str, tuple[int, ...]] = {
    "embedding": (VOCABULARY, WIDTH),
    "position": (LENGTH, WIDTH),
    **{f"thinker.{i}.{name}": shape for i in range(TRUNK_BLOCKS) for name, shape in _BLOCK.items()},
    **{f"talker.{name}": shape for name, shape in _BLOCK.items()},
    "talker.scale": (WIDTH,),
    "talker.logits": (WIDTH, VOCABULARY),
}
SPECS: dict[str, dm.P] = {name: SPLIT if len(shape) == 2 else dm.P() for name, shape in SHAPES.items()}


def initial_parameters(seed: int = 0) -> dict[str, np.ndarray]:
    """Draw the parameters, float32, equal on every process."""
    draw = np.random.default_rng(seed)
    parameters = {}
    for name, shape in SHAPES.items():
        value = np.ones(shape) if len(shape) == 1 else draw.normal(0.0, 0.7 / prod(shape[:1]) ** 0.5, shape)
        parameters[name] = value.astype(np.float32)
    return parameters


def loss(parameters: Mapping[str, Any], inputs: Any, targets: Any) -> Any:
    """Return the mean loss per byte of the whole batch, from one rank's blocks; runs under `dm.shard_map`.

    Args:
        parameters: Blocks by name, split as `SPECS` says.
        inputs: Bytes, (batch / dp, length / ulysses), integers.
        targets: The bytes that follow, of the same shape.
    """
    xp = array_namespace(parameters["embedding"])
    with dm.use_parallel_state("thinker"):
        whole = _gathered(parameters)
        hidden = xp.take(whole["embedding"], xp.reshape(inputs, (-1,)), axis=0)
        hidden = xp.reshape(hidden, (*inputs.shape, WIDTH)) + dm.sequence.slice_sequence(whole["position"], 0)
        for i in range(TRUNK_BLOCKS):
            hidden = _block(xp, hidden, whole, f"thinker.{i}.")
        hidden, targets = _hand_over(hidden), _hand_over(targets)
    with dm.use_parallel_state("talker"):
        hidden = _block(xp, hidden, whole, "talker.")
        logits = _normalized(xp, hidden, whole["talker.scale"]) @ whole["talker.logits"]
        loss_sum = xp.sum(_cross_entropy(xp, logits, targets))
        objective, _ = dm.token_mean(loss_sum, prod(targets.shape))
        return dm.ops.all_reduce(objective, "world")


def _gathered(parameters: Mapping[str, Any]) -> dict[str, Any]:
    split = {name for name, spec in SPECS.items() if spec == SPLIT}
    return {
        name: dm.ops.all_gather(block, "dp_shard_sp") if name in split else block for name, block in parameters.items()
    }


def _hand_over(x: Any) -> Any:
    """Trade split sequences for a finer split of the batch: the thinker's layout to the talker's."""
    return dm.ops.all_to_all(x, "ulysses", split_dim=0, concat_dim=1)


def _block(xp: Any, x: Any, weights: Mapping[str, Any], prefix: str) -> Any:
    own = {name: weights[prefix + name] for name in _BLOCK}
    x = x + _attention(xp, _normalized(xp, x, own["attention_scale"]), own)
    return x + _gelu(xp, _normalized(xp, x, own["mlp_scale"]) @ own["up"]) @ own["down"]


def _attention(xp: Any, x: Any, weights: Mapping[str, Any]) -> Any:
    """Attend causally over the whole sequence; Ulysses where the ambient state splits it."""
    batch, length, _ = x.shape
    split = (batch, length, HEADS, WIDTH // HEADS)
    query, key, value = (
        dm.sequence.gather_seq_scatter_heads(xp.reshape(x @ weights[name], split), seq_dim=1, head_dim=2)
        for name in ("query", "key", "value")
    )
    query, key, value = (xp.permute_dims(heads, (0, 2, 1, 3)) for heads in (query, key, value))
    scores = query @ xp.permute_dims(key, (0, 1, 3, 2)) / (WIDTH // HEADS) ** 0.5
    past = xp.tril(xp.ones(scores.shape[-2:], dtype=xp.bool))
    mixed = _softmax(xp, xp.where(past, scores, xp.full_like(scores, -1e9))) @ value
    mixed = dm.sequence.gather_heads_scatter_seq(xp.permute_dims(mixed, (0, 2, 1, 3)), seq_dim=1, head_dim=2)
    return xp.reshape(mixed, (batch, length, WIDTH)) @ weights["output"]


def _normalized(xp: Any, x: Any, scale: Any) -> Any:
    return x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale


def _gelu(xp: Any, x: Any) -> Any:
    return 0.5 * x * (1.0 + xp.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


def _softmax(xp: Any, x: Any) -> Any:
    weights = xp.exp(x - xp.max(x, axis=-1, keepdims=True))
    return weights / xp.sum(weights, axis=-1, keepdims=True)


def _cross_entropy(xp: Any, logits: Any, targets: Any) -> Any:
    shifted = logits - xp.max(logits, axis=-1, keepdims=True)
    log_total = xp.log(xp.sum(xp.exp(shifted), axis=-1))
    chosen = xp.arange(VOCABULARY) == targets[..., None]
    return log_total - xp.sum(xp.where(chosen, shifted, xp.zeros_like(shifted)), axis=-1)
