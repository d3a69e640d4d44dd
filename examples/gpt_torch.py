"""The GPT in torch.nn: per-rank modules, Megatron's tensor parallelism, Ulysses, rings, gradients summed at the end."""

import gpt
import torch
from torch import nn
from torch.nn import functional

import dualmesh as dm
from dualmesh.testing import Trained, tap

PLAN = dm.ShardingPlan(
    {
        **{f"layers.*.{name}.weight": dm.P("tp") for name in ("query", "key", "value", "up")},
        "layers.*.up.bias": dm.P("tp"),
        **{f"layers.*.{name}.weight": dm.P(None, "tp") for name in ("out", "down")},
    },
    default=dm.P(),
)
# Between `enter` and `leave` each rank of tp has the whole gradient of what it holds: no parts to sum.
WHOLE = gpt.TOKENS
SPLIT = dm.P("dp", "sp", "tp")


class Block(nn.Module):
    """One layer: heads and hidden units split over tp."""

    def __init__(self, name: str, tp: int) -> None:
        super().__init__()
        self.name, self.heads = name, gpt.HEADS // tp
        self.norm1, self.norm2 = nn.LayerNorm(gpt.WIDTH), nn.LayerNorm(gpt.WIDTH)
        self.query, self.key, self.value = (nn.Linear(gpt.WIDTH, gpt.WIDTH // tp, bias=False) for _ in range(3))
        self.out = nn.Linear(gpt.WIDTH // tp, gpt.WIDTH, bias=False)
        self.up = nn.Linear(gpt.WIDTH, gpt.HIDDEN // tp)
        self.down = nn.Linear(gpt.HIDDEN // tp, gpt.WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map this rank's tokens, (sequences, length, WIDTH)."""
        inputs = dm.ops.enter(tap(f"{self.name}.attn.in", self.norm1(x), WHOLE, grad_spec=WHOLE), "tp")
        mixed = tap(f"{self.name}.attn", self.attention(inputs), SPLIT)
        x = x + dm.ops.leave(self.out(mixed.flatten(2)), "tp")
        inputs = dm.ops.enter(tap(f"{self.name}.mlp.in", self.norm2(x), WHOLE, grad_spec=WHOLE), "tp")
        hidden = tap(f"{self.name}.mlp", functional.gelu(self.up(inputs)), SPLIT)
        # The bias is added once, after the sum over tp.
        x = x + dm.ops.leave(hidden @ self.down.weight.mT, "tp") + self.down.bias
        return tap(self.name, x, WHOLE, grad_spec=WHOLE)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        """Return causal attention of all tokens of a sequence, (sequences, own length, own heads, dim)."""
        query, key, value = (layer(x).unflatten(-1, (self.heads, -1)) for layer in (self.query, self.key, self.value))
        positions = dm.ops.all_gather(dm.sequence.sequence_positions(x, x.shape[1]), "ulysses")

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return dm.sequence.ring_attention(query, key, value, positions=positions)

        return dm.sequence.ulysses_attention(query, key, value, attend)


class GPT(nn.Module):
    """The model on this rank."""

    def __init__(self) -> None:
        super().__init__()
        tp = dm.ops.axis_size("tp")
        self.embed, self.position = nn.Embedding(gpt.VOCABULARY, gpt.WIDTH), nn.Embedding(gpt.LENGTH, gpt.WIDTH)
        self.layers = nn.ModuleList(Block(f"layers.{number}", tp) for number in range(gpt.LAYERS))
        self.norm, self.head = nn.LayerNorm(gpt.WIDTH), nn.Linear(gpt.WIDTH, gpt.VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of this rank's tokens."""
        first = dm.ops.axis_index("sp") * tokens.shape[1]
        x = self.embed(tokens) + self.position(torch.arange(first, first + tokens.shape[1]))
        x = tap("embed", x, WHOLE, grad_spec=WHOLE)
        for layer in self.layers:
            x = layer(x)
        return tap("logits", self.head(self.norm(x)), WHOLE, grad_spec=WHOLE)


def port(params: dict, batches: list) -> Trained:
    """Train, and return global losses, gradients and parameters."""
    specs = {name: PLAN.spec_of(name, value.shape) for name, value in params.items()}
    model = GPT().double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(own(params[name], specs[name]))
    optimizer = torch.optim.AdamW(model.parameters(), **gpt.OPTIMIZER)
    losses, gradients = [], {}
    for tokens, targets in batches:
        logits = model(own(tokens, gpt.TOKENS))
        targets = own(targets, gpt.TOKENS).flatten()
        loss_sum = functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
        objective, value = dm.token_mean(loss_sum, targets.numel())
        optimizer.zero_grad()
        losses.append(tap("loss", value))
        objective.backward()
        dm.sync_gradients(model)
        tap("norm.bias, summed", model.norm.bias.grad)
        if not gradients:
            gradients = {name: dm.shard_local(p.grad, specs[name]) for name, p in model.named_parameters()}
        optimizer.step()
    parameters = {name: dm.shard_local(p, specs[name]) for name, p in model.named_parameters()}
    return Trained(losses, gradients, parameters)


def own(whole: object, spec: dm.P) -> torch.Tensor:
    """Return this rank's block of a global numpy array."""
    return torch.from_numpy(whole[dm.local_slices(spec, whole.shape)].copy())
