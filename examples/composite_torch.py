"""The life of a PyTorch trainer with several states: set up, build, train, tear down.

The thinker (attention over split sequences) and the talker (experts) each have a state, and so has the trainer: base.
Base is the default, so that data, logging and callbacks need no scope. One scope surrounds building; at run time
scopes surround forward, loss, backward and clipping only, and each module enters its own state whoever calls it.

torchrun --nproc-per-node 4 examples/composite_torch.py --steps 20 --curve curve.json
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dualmesh as dm

VOCABULARY, WIDTH, HEADS, LENGTH, EXPERTS, BATCH, MAX_NORM = 32, 16, 4, 8, 4, 8, 1.0
# Each in the names of its own state: the thinker has pieces of sequences, the talker whole ones of fewer rows.
TOKENS, ROWS = dm.P("dp", "ulysses"), dm.P("dp")


class Thinker(nn.Module):
    """Causal attention; the sequence is split over ulysses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return hidden states, in the layout of the tokens."""
        x = self.embedding(tokens)
        heads = [layer(x).unflatten(-1, (HEADS, -1)) for layer in self.qkv]
        return x + dm.sequence.ulysses_attention(*heads, attend).flatten(2)


class Talker(nn.Module):
    """Experts, each on one index of ep, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of every token, in rows."""
        rows = hidden.flatten(0, 1)
        return self.head(rows + self.experts(rows))


class Experts(nn.Module):
    """All experts; each index of ep holds a run of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)

    def shard(self) -> None:
        """Split experts over ep and their rows over ep_fsdp: one DTensor of all, so that checkpoints have all."""
        state = dm.get_parallel_state()
        if state.ep_enabled:
            self.up = nn.Parameter(distribute_tensor(self.up.detach(), state.submesh("ep"), [Shard(0)]))
            fully_shard(self, mesh=state.submesh("ep_fsdp"), shard_placement_fn=lambda parameter: Shard(1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return each row through the expert that its largest element chooses, wherever that is."""
        axis = "ep" if dm.get_parallel_state().ep_enabled else "world"
        held = self.up.to_local() if isinstance(self.up, DTensor) else self.up
        every = dm.ops.all_gather(rows, axis)
        chosen = every.detach().argmax(1) % EXPERTS
        first = dm.ops.axis_index(axis) * len(held)
        own = [torch.tanh(every @ up) * (chosen == first + i)[:, None] for i, up in enumerate(held)]
        return dm.ops.reduce_scatter(torch.stack(own).sum(0), axis)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attend causally, (batch, length, heads, width) in and out."""
    heads = (x.transpose(1, 2) for x in (query, key, value))
    return nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)


class Trainer:
    """The life cycle, one method per phase."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.reports: list[str] = []
        self.callbacks: list[Callable[[int], None]] = []

    def set_up(self) -> None:
        """Start the world and register the states on every rank; the first is the default."""
        self.session = dm.init_distributed("torch")
        world = self.session.world_size
        ulysses, ep = (2, 2) if world % 2 == 0 else (1, 1)
        dm.init_parallel_state(dp_size=world // ulysses, ulysses_size=ulysses, name="base")
        dm.init_parallel_state(dp_size=world // ulysses, ulysses_size=ulysses, name="thinker")  # the same state
        dm.init_parallel_state(dp_size=world, ep_size=ep, name="talker")

    def build(self) -> None:
        """Build all that reads the ambient state when it is made, in one scope."""
        with dm.use_parallel_state("base") as base:
            torch.manual_seed(0)
            self.thinker = dm.scoped(Thinker().double(), "thinker")
            with dm.use_parallel_state("talker") as talker:
                self.talker = dm.scoped(Talker().double(), "talker")
                self.talker.experts.shard()
                fully_shard(self.talker, mesh=talker.fsdp_mesh)
                self.callbacks.append(dm.bind(self.report))  # keeps the talker's state, whoever calls it
            fully_shard(self.thinker, mesh=base.fsdp_mesh)
            self.model = nn.ModuleList([self.thinker, self.talker])
            dm.sum_gradients(self.model)
            self.data = batches(base.data_index, base.data_size)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02, foreach=False)
            self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.5, 20)

    def step(self, number: int) -> None:
        """Train one step; what needs groups is scoped, the rest is not."""
        tokens, targets = next(self.data)
        with dm.use_parallel_state("base"):
            hidden = self.thinker(dm.sequence.slice_sequence(tokens, 1))
            hidden = dm.reshard(hidden, src=("thinker", TOKENS), dst=("talker", ROWS))
            targets = dm.reshard(targets, src=("base", ROWS), dst=("talker", ROWS))
            logits = self.talker(hidden)
            loss = nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")
            objective, value = dm.token_mean(loss, targets.numel())
            objective.backward()
            dm.clip_grad_norm_(self.model, MAX_NORM)  # base has all ranks; whose meshes parameters lie on is seen
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.losses.append(value.item())
        for callback in self.callbacks:
            callback(number)

    def report(self, number: int) -> None:
        """Say, in the state that this callback was bound in, what was reached."""
        # An interface that takes a group gets one by name instead of a scope.
        worst = torch.tensor(self.losses[-1])
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=dm.get_parallel_state_by_name("base").group("world"))
        self.reports.append(f"{dm.scope_name()} step {number + 1}: {worst.item():.4f}")

    def tear_down(self) -> None:
        """Let go of what uses groups, end the world, forget the states: in this order, however far building came."""
        self.callbacks.clear()
        for name in ("scheduler", "optimizer", "data", "model", "thinker", "talker"):
            self.__dict__.pop(name, None)
        session = self.__dict__.pop("session", None)
        if session is not None:
            session.close()
        dm.clear_parallel_state()


def batches(index: int, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (tokens, targets) of this rank's rows, whole sequences; two batches that come again, to be learnt."""
    draw = torch.Generator().manual_seed(1)
    windows = torch.randint(0, VOCABULARY, (2, BATCH, LENGTH + 1), generator=draw)
    while True:
        for batch in windows:
            rows = batch.chunk(size)[index]
            yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def train(steps: int) -> Trainer:
    """Run the life cycle; tear down also when a phase raises."""
    trainer = Trainer()
    try:
        trainer.set_up()
        trainer.build()
        for number in range(steps):
            trainer.step(number)
    finally:
        trainer.tear_down()
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--curve", type=Path)
    options = parser.parse_args()
    trained = train(options.steps)
    if options.curve and os.environ.get("RANK", "0") == "0":
        options.curve.write_text(json.dumps(trained.losses))
