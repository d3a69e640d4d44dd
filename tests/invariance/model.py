"""A small transformer with experts, written once over the array API, `dm.ops` and `dm.sequence`.

Per-rank blocks in, this rank's loss out; it names no framework, no rank and no factor. The same in numpy on the global
arrays, with its backward by hand, is in `reference`.
"""

import numpy as np
from array_api_compat import array_namespace

import dualmesh as dm

VOCABULARY, WIDTH, HEADS, HEAD, HIDDEN, EXPERTS, LENGTH = 16, 8, 8, 2, 16, 8, 16
SHAPES = {
    "embedding": (VOCABULARY, WIDTH),
    "position": (LENGTH, WIDTH),
    "attention_scale": (WIDTH,),
    "attention_query": (WIDTH, HEADS * HEAD),
    "attention_key": (WIDTH, HEADS * HEAD),
    "attention_value": (WIDTH, HEADS * HEAD),
    "attention_output": (HEADS * HEAD, WIDTH),
    "mlp_scale": (WIDTH,),
    "mlp_up": (WIDTH, HIDDEN),
    "mlp_down": (HIDDEN, WIDTH),
    "experts_scale": (WIDTH,),
    "experts_router": (WIDTH, EXPERTS),
    "experts_up": (EXPERTS, WIDTH, HIDDEN),
    "experts_down": (EXPERTS, HIDDEN, WIDTH),
    "final_scale": (WIDTH,),
    "logits": (WIDTH, VOCABULARY),
}
OF_EXPERTS = ("experts_up", "experts_down")
# What the model computes with: columns and rows over tp, whole experts over ep, the rest whole.
COLUMNS, ROWS = dm.P(None, "tp"), dm.P("tp")
COMPUTED = {
    **{name: dm.P() for name in SHAPES},
    **{f"attention_{name}": COLUMNS for name in ("query", "key", "value")},
    **{"attention_output": ROWS, "mlp_up": COLUMNS, "mlp_down": ROWS},
    **{"experts_up": dm.P("ep", None, "tp"), "experts_down": dm.P("ep", "tp")},
}
# What a rank stores: matrices are split over the ranks that share parameters too, and gathered where they are used.
GATHERED = {
    **{name: ("dp_shard_sp", 0) for name, shape in SHAPES.items() if len(shape) == 2},
    **{"attention_output": ("dp_shard_sp", 1), "mlp_down": ("dp_shard_sp", 1)},
    **{"experts_up": ("ep_fsdp", 1), "experts_down": ("ep_fsdp", 2)},
}
TOKENS, MICRO_BATCHES = dm.P("dp", "sp"), dm.P(None, "dp", "sp")


def stored(name):
    """Return the spec in which a parameter is stored."""
    entries = [*COMPUTED[name].entries, None, None, None][: len(SHAPES[name])]
    if name in GATHERED:
        axis, dim = GATHERED[name]
        entries[dim] = axis
    return dm.P(*entries)


STORED = {name: stored(name) for name in SHAPES}


def initial_parameters(dtype="float64"):
    """Draw the global parameters."""
    draw = np.random.default_rng(11)
    drawn = {}
    for name, shape in SHAPES.items():
        drawn[name] = draw.normal(0.0, shape[-2] ** -0.5 if len(shape) > 1 else 0.3, shape)
    return {name: (1.0 + v if v.ndim == 1 else v).astype(dtype) for name, v in drawn.items()}


def batch(step, sequences=16):
    """Return tokens and targets of a step, (sequences, LENGTH); -1 is no target: sequences end anywhere, one at 0."""
    draw = np.random.default_rng(100 + step)
    tokens, targets = draw.integers(0, VOCABULARY, (2, sequences, LENGTH))
    ends = draw.integers(1, LENGTH + 1, sequences)
    ends[draw.integers(0, sequences)] = 0
    return tokens, np.where(np.arange(LENGTH) < ends[:, None], targets, -1)


def token_count(targets):
    """Return the number of targets of all ranks, and of all micro-batches in `targets`."""
    xp = array_namespace(targets)
    return dm.ops.all_reduce(xp.sum(xp.astype(targets >= 0, targets.dtype)), "dp_sp")


def global_loss(parameters, tokens, targets, total):
    """Return the global loss from stored blocks: what `dm.shard_map` lifts, where every rank's copy counts a part."""
    weights = {
        name: dm.ops.all_gather(block, *GATHERED[name]) if name in GATHERED else block
        for name, block in parameters.items()
    }
    objective, _ = objective_of(weights, tokens, targets, total, pair=(_unchanged, dm.ops.all_reduce))
    return dm.ops.all_reduce(objective, "dp_sp")


def objective_of(weights, tokens, targets, total, pair=(dm.ops.enter, dm.ops.leave), experts=None):
    """Return (objective, value) of `token_mean` from blocks that are laid out as `COMPUTED` says.

    Args:
        pair: What enters and leaves a tensor-parallel region; by default of per-rank code, whose loss counts once.
        experts: The experts as a function of (rows, which of this rank's experts each row is for).
    """
    xp = array_namespace(weights["embedding"])
    if experts is None:

        def experts(rows, which):
            return applied_experts(weights["experts_up"], weights["experts_down"], rows, which, pair)

    x = xp.reshape(xp.take(weights["embedding"], xp.reshape(tokens, (-1,)), axis=0), (*tokens.shape, WIDTH))
    x = x + dm.sequence.slice_sequence(weights["position"], 0)
    x = x + _attention(xp, _normalized(xp, x, weights["attention_scale"]), weights, pair)
    enter, leave = pair
    hidden = enter(_normalized(xp, x, weights["mlp_scale"]), "tp") @ weights["mlp_up"]
    x = x + leave(_silu(xp, hidden) @ weights["mlp_down"], "tp")
    flat = xp.reshape(_normalized(xp, x, weights["experts_scale"]), (-1, WIDTH))
    x = x + xp.reshape(_routed(xp, flat, weights["experts_router"], experts), x.shape)
    logits = _normalized(xp, x, weights["final_scale"]) @ weights["logits"]
    return dm.token_mean(_loss_sum(xp, logits, targets), xp.sum(xp.astype(targets >= 0, logits.dtype)), total=total)


def applied_experts(up, down, rows, which, pair=(dm.ops.enter, dm.ops.leave)):
    """Return each row through its expert: up (experts here, width, hidden / tp), rows (n, width), which (n,)."""
    xp = array_namespace(rows)
    enter, leave = pair
    hidden = xp.sum(enter(rows, "tp")[:, :, None] * xp.take(up, which, axis=0), axis=1)
    return leave(xp.sum(_silu(xp, hidden)[:, :, None] * xp.take(down, which, axis=0), axis=1), "tp")


def _attention(xp, x, weights, pair):
    enter, leave = pair
    x = enter(x, "tp")
    sizes = (*x.shape[:2], -1, HEAD)
    query, key, value = (xp.reshape(x @ weights[f"attention_{name}"], sizes) for name in ("query", "key", "value"))
    positions = dm.ops.all_gather(dm.sequence.sequence_positions(x, x.shape[1]), "ulysses")

    def attend(query, key, value):
        return dm.sequence.ring_attention(query, key, value, positions=positions)

    mixed = dm.sequence.ulysses_attention(query, key, value, attend)
    return leave(xp.reshape(mixed, (*x.shape[:2], -1)) @ weights["attention_output"], "tp")


def _routed(xp, x, router, experts):
    """Send every row to its expert, wherever that is, and weigh what comes back by the router's probability."""
    scores = x @ router
    scores = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
    chosen = xp.argmax(scores, axis=-1)
    hot = chosen[:, None] == xp.arange(EXPERTS)
    gate = xp.sum(xp.where(hot, scores / xp.sum(scores, axis=-1, keepdims=True), xp.zeros_like(scores)), axis=-1)
    order = xp.argsort(chosen, stable=True)
    holders = dm.ops.axis_size("ep")
    send = xp.sum(xp.reshape(xp.sum(xp.astype(hot, chosen.dtype), axis=0), (holders, -1)), axis=1)
    receive = dm.ops.all_to_all(send, "ep", 0, 0)
    room = holders * x.shape[0]
    rows = dm.ops.ragged_all_to_all(xp.take(x, order, axis=0), "ep", send, receive, rows=room)
    which = dm.ops.ragged_all_to_all(xp.take(chosen, order, axis=0), "ep", send, receive, rows=room)
    made = experts(rows, which % (EXPERTS // holders))
    back = dm.ops.ragged_all_to_all(made, "ep", receive, send, rows=x.shape[0])
    return xp.take(back, xp.argsort(order), axis=0) * gate[:, None]


def _loss_sum(xp, logits, targets):
    shifted = logits - xp.max(logits, axis=-1, keepdims=True)
    chosen = xp.arange(VOCABULARY) == targets[..., None]
    own = xp.sum(xp.where(chosen, shifted, xp.zeros_like(shifted)), axis=-1)
    each = xp.log(xp.sum(xp.exp(shifted), axis=-1)) - own
    return xp.sum(xp.where(targets >= 0, each, xp.zeros_like(each)))


def _normalized(xp, x, scale):
    return x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale


def _silu(xp, x):
    return x / (1.0 + xp.exp(-x))


def _unchanged(x, axis):
    return x
