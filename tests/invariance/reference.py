"""The oracle: the model in numpy float64 on the global arrays, in one process, its backward by hand, and AdamW."""

import numpy as np

from tests.cross.dense import attention
from tests.invariance.model import EXPERTS, HEAD, VOCABULARY, batch, initial_parameters

LEARNING_RATE, DECAY, BETAS, STEPS = 1e-2, 0.01, (0.9, 0.999), 3
# AdamW moves a parameter by the sign of its gradient where that is far above epsilon: gradients of the size of
# float32's rounding must stay below it.
EPSILON = 1e-5


def trained(steps=STEPS):
    """Return {"losses": one per step, "gradients": of the first step, "parameters": after the last}."""
    w = initial_parameters()
    first, second = ({name: np.zeros_like(value) for name, value in w.items()} for _ in range(2))
    losses, kept = [], None
    for step in range(1, steps + 1):
        loss, gradients = value_and_grad(w, *batch(step - 1))
        losses.append(loss)
        kept = gradients if kept is None else kept
        for name, g in gradients.items():
            first[name] = BETAS[0] * first[name] + (1 - BETAS[0]) * g
            second[name] = BETAS[1] * second[name] + (1 - BETAS[1]) * g * g
            mean, square = first[name] / (1 - BETAS[0] ** step), second[name] / (1 - BETAS[1] ** step)
            w[name] = w[name] - LEARNING_RATE * (mean / (np.sqrt(square) + EPSILON) + DECAY * w[name])
    return {"losses": np.array(losses), "gradients": kept, "parameters": w}


def value_and_grad(w, tokens, targets):
    """Return the mean loss over all targets, and its gradient by every parameter."""
    d = {}
    x0 = w["embedding"][tokens] + w["position"]
    n1 = normalized(x0, w["attention_scale"])
    heads = (*tokens.shape, -1, HEAD)
    qkv = [(n1 @ w[f"attention_{name}"]).reshape(heads) for name in ("query", "key", "value")]
    mixed = attention(*qkv, np.zeros_like(qkv[0]), causal=True)[0].reshape(*tokens.shape, -1)
    x1 = x0 + mixed @ w["attention_output"]
    n2 = normalized(x1, w["mlp_scale"])
    hidden = n2 @ w["mlp_up"]
    x2 = x1 + silu(hidden) @ w["mlp_down"]
    n3 = normalized(x2, w["experts_scale"])
    made, back_of_experts = experts(w, n3.reshape(-1, n3.shape[-1]))
    x3 = x2 + made.reshape(x2.shape)
    n4 = normalized(x3, w["final_scale"])
    loss, d_logits = cross_entropy(n4 @ w["logits"], targets)

    d["logits"] = contracted(n4, d_logits)
    dx3, d["final_scale"] = normalized_back(x3, w["final_scale"], d_logits @ w["logits"].T)
    dn3, gradients = back_of_experts(dx3.reshape(-1, dx3.shape[-1]))
    d |= gradients
    dx, d["experts_scale"] = normalized_back(x2, w["experts_scale"], dn3.reshape(x2.shape))
    dx2 = dx3 + dx
    d["mlp_down"] = contracted(silu(hidden), dx2)
    d_hidden = dx2 @ w["mlp_down"].T * silu_slope(hidden)
    d["mlp_up"] = contracted(n2, d_hidden)
    dx, d["mlp_scale"] = normalized_back(x1, w["mlp_scale"], d_hidden @ w["mlp_up"].T)
    dx1 = dx2 + dx
    d["attention_output"] = contracted(mixed, dx1)
    d_mixed = (dx1 @ w["attention_output"].T).reshape(heads)
    dn1 = np.zeros_like(n1)
    for name, one in zip(("query", "key", "value"), attention(*qkv, d_mixed, causal=True)[1:], strict=True):
        one = one.reshape(*tokens.shape, -1)
        d[f"attention_{name}"] = contracted(n1, one)
        dn1 += one @ w[f"attention_{name}"].T
    dx, d["attention_scale"] = normalized_back(x0, w["attention_scale"], dn1)
    dx0 = dx1 + dx
    d["position"] = dx0.sum(0)
    d["embedding"] = np.zeros_like(w["embedding"])
    np.add.at(d["embedding"], tokens, dx0)
    return loss, d


def experts(w, x):
    """Return each row through the expert of its highest score, times that probability, and the backward of it."""
    scores = np.exp(x @ w["experts_router"])
    probability = scores / scores.sum(-1, keepdims=True)
    chosen = probability.argmax(-1)
    rows = [np.flatnonzero(chosen == e) for e in range(EXPERTS)]
    made, gate = np.zeros_like(x), probability[np.arange(len(x)), chosen][:, None]
    for e, own in enumerate(rows):
        made[own] = silu(x[own] @ w["experts_up"][e]) @ w["experts_down"][e]

    def back(d_out):
        d = {name: np.zeros_like(w[name]) for name in ("experts_up", "experts_down")}
        dx = np.zeros_like(x)
        for e, own in enumerate(rows):
            hidden, d_made = x[own] @ w["experts_up"][e], d_out[own] * gate[own]
            d["experts_down"][e] = silu(hidden).T @ d_made
            d_hidden = d_made @ w["experts_down"][e].T * silu_slope(hidden)
            d["experts_up"][e] = x[own].T @ d_hidden
            dx[own] = d_hidden @ w["experts_up"][e].T
        d_gate = (d_out * made).sum(-1, keepdims=True)
        d_scores = d_gate * gate * ((np.arange(EXPERTS) == chosen[:, None]) - probability)
        d["experts_router"] = x.T @ d_scores
        return dx + d_scores @ w["experts_router"].T, d

    return made * gate, back


def cross_entropy(logits, targets):
    """Return the mean over targets >= 0, and its gradient by the logits."""
    counted = (targets >= 0)[..., None]
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    hot = np.arange(VOCABULARY) == targets[..., None]
    return -np.log(probability[hot]).sum() / counted.sum(), (probability - hot) * counted / counted.sum()


def contracted(x, d):
    """Return the gradient of w in x @ w."""
    return x.reshape(-1, x.shape[-1]).T @ d.reshape(-1, d.shape[-1])


def normalized(x, scale):
    """Divide by the root mean square."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def normalized_back(x, scale, d):
    """Return the gradients of x and scale."""
    inverse = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    d_scale = (d * x * inverse).reshape(-1, x.shape[-1]).sum(0)
    d = d * scale
    return inverse * d - x * inverse**3 * (d * x).mean(-1, keepdims=True), d_scale


def silu(x):
    """Return x times its logistic function."""
    return x / (1 + np.exp(-x))


def silu_slope(x):
    """Return the derivative of `silu`."""
    s = 1 / (1 + np.exp(-x))
    return s * (1 + x * (1 - s))
