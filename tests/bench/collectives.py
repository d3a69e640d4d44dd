"""Each op against the fastest equivalent written by hand, and building states against only creating their groups.

`python -m tests.bench.collectives`: 4 gloo processes, 64 KiB and 16 MiB per rank, forward and forward + backward, the
median of interleaved repeats. By hand: `torch.distributed` into fresh results, layout copies included, in one autograd
function where there is a gradient. It runs twice: the ratio is to both together, and their own ratio says how much the
machine scatters.
"""

import os
import random
import statistics
import time

import dualmesh as dm
from tests.bench.timing import record
from tests.torch_backend.fake import fake_world, pool
from tests.worlds import torch_pool, torch_world

SIZE = 4
PASSES = {64: 16, 16_384: 1}
"""Size in KiB: passes in each repeat."""
SECONDS = 30
"""How long one row is repeated: repeats of one function scatter by a quarter, their median by that over their root."""


def by_hand(group, index):
    """Return {name: (dualmesh's, forward by hand, backward by hand)}, functions of one tensor (batch, seq, ...)."""
    import torch
    import torch.distributed as dist

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def all_reduce(x):
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    def all_gather(x):
        found = x.new_empty((SIZE * x.shape[0], *x.shape[1:]))
        gather(found, x.contiguous(), group=group)
        return found

    def reduce_scatter(x):
        found = x.new_empty((x.shape[0] // SIZE, *x.shape[1:]))
        scatter(found, x.contiguous(), group=group)
        return found

    def broadcast(x):
        found = x.clone() if index == 0 else torch.empty_like(x)
        dist.broadcast(found, group=group, group_src=0)
        return found

    def reduce(x):
        total = x.clone()
        dist.reduce(total, group=group, group_dst=0)
        return total if index == 0 else total.zero_()

    def shifted(step):
        def shift(x):
            found = torch.empty_like(x)
            receive = dist.irecv(found, group=group, group_src=(index - step) % SIZE)
            send = dist.isend(x, group=group, group_dst=(index + step) % SIZE)
            receive.wait()
            send.wait()
            return found

        return shift

    def traded(split, concat):
        def all_to_all(x):
            """One copy on each side of the exchange."""
            blocks = x.unflatten(split, (SIZE, x.shape[split] // SIZE)).movedim(split, 0).contiguous()
            found = torch.empty_like(blocks)
            dist.all_to_all_single(found.view(-1), blocks.view(-1), group=group)
            return found.movedim(0, concat).flatten(concat, concat + 1).contiguous()

        return all_to_all

    ops = dm.ops
    return {
        "all_reduce": (lambda x: ops.all_reduce(x, "a"), all_reduce, all_reduce),
        "all_gather": (lambda x: ops.all_gather(x, "a"), all_gather, reduce_scatter),
        "reduce_scatter": (lambda x: ops.reduce_scatter(x, "a"), reduce_scatter, all_gather),
        "broadcast": (lambda x: ops.broadcast(x, "a"), broadcast, reduce),
        "shift": (lambda x: ops.shift(x, "a"), shifted(1), shifted(-1)),
        "ulysses, 4 dims": (
            lambda x: dm.sequence.gather_seq_scatter_heads(x, seq_dim=1, head_dim=2, axis="a"),
            traded(2, 1),
            traded(1, 2),
        ),
        "ulysses, 3 dims": (
            lambda x: dm.sequence.gather_seq_scatter_heads(x, seq_dim=0, head_dim=1, axis="a"),
            traded(1, 0),
            traded(0, 1),
        ),
    }


def differentiable(forward, backward):
    """Return a function of one tensor with a backward by hand."""
    import torch

    class ByHand(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return forward(x)

        @staticmethod
        def backward(ctx, cotangent):
            return backward(cotangent)

    return ByHand.apply


def measured():
    """Return {(op, KiB, "forward" or "both"): seconds of (dualmesh, both by hand, one, the other)} on this rank."""
    import torch

    state = dm.init_parallel_state(spec=dm.TopologySpec({"a": SIZE}, roles={"sequence": "a"}))
    found = {}
    for kib, passes in PASSES.items():
        for name, (ours, forward, backward) in by_hand(state.group("a"), state.own_rank()).items():
            count = kib * 256
            shape = (1, count // 512, 8, 64) if "4 dims" in name else (count // 512, 8, 64)
            x = torch.arange(float(count)).reshape(shape) + state.own_rank()
            if not torch.equal(ours(x), forward(x)):
                raise AssertionError(name)
            hand = differentiable(forward, backward)
            found[name, kib, "forward"] = medians((ours, forward, forward), x, None, passes)
            cotangent = torch.ones_like(forward(x))
            found[name, kib, "both"] = medians((ours, hand, hand), x.requires_grad_(), cotangent, passes)
    return found


def medians(runs, x, cotangent, passes):
    """Return seconds of (dualmesh, both by hand, one, the other); with their gradients where there is a cotangent."""
    import torch
    import torch.distributed as dist

    times: list[list[float]] = [[], [], []]

    def repeat(number):
        for place in random.Random(number).sample(range(3), 3):  # the same order on every rank
            dist.barrier()
            start = time.perf_counter()
            for _ in range(passes):
                result = runs[place](x)
                if cotangent is not None:
                    torch.autograd.grad(result, x, cotangent)
            times[place].append((time.perf_counter() - start) / passes)

    for number in range(4):
        repeat(number)
    takes = torch.tensor(sum(map(min, times)) * passes)
    dist.all_reduce(takes, dist.ReduceOp.MAX)
    for warm in times:
        warm.clear()
    for number in range(max(31, int(SECONDS / takes))):
        repeat(number)
    return tuple(map(statistics.median, (times[0], times[1] + times[2], *times[1:])))


def building():
    """Return CPU seconds to build two states in a fake world, and to only create their distinct groups members-only."""
    import torch.distributed as dist

    from dualmesh.topology import communicators
    from dualmesh_torch import private

    world, rank = dist.get_world_size(), dist.get_rank()
    specs = {
        "thinker": dm.parallel_spec(dp_replicate_size=2, dp_shard_size=world // 4, ulysses_size=2, ep_size=2),
        "talker": dm.parallel_spec(dp_size=world, dp_shard_size=world),
    }
    needs = {need for spec in specs.values() for need in communicators.distinct(spec.resolve(world), rank)}
    ours, floor = [], []
    for repeat in range(25):  # one process that waits for nobody: its CPU time is what other work cannot disturb
        start = time.process_time()
        dm.init_parallel_states(specs)
        ours.append(time.process_time() - start)
        dm.clear_parallel_state()
        start = time.process_time()
        groups = [
            private.member_group(need.ranks, rank, f"floor/{repeat}/{place}", "fake", None, None)
            for place, need in enumerate(sorted(needs))
        ]
        floor.append(time.process_time() - start)
        for group in groups:
            dist.destroy_process_group(group)
    return statistics.median(ours), statistics.median(floor), len(needs)


def main():
    """Print all tables."""
    # Large tensors straight from the system: else glibc keeps them in heaps that grow in fragments, by GiB in a minute.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**20))
    ranks = torch_world(measured, world_size=SIZE, timeout_s=1_200)
    torch_pool.close()
    print("per rank, median over ranks of the medians: ms, ms by hand, ratio; by hand against itself")
    for key in ranks[0]:
        ours, hand, one, other = (statistics.median(rank[key][side] for rank in ranks) * 1e3 for side in range(4))
        name, kib, what = key
        print(f"  {name:16s} {kib:6d} KiB {what:8s} {ours:9.3f} {hand:9.3f} {ours / hand:6.2f}  {other / one:6.2f}")
        record("torch, gloo", f"{name}, {kib} KiB, {what}", ours / 1e3, "by hand", hand / 1e3)
    ours, floor, count = fake_world(building, rank=9_830, world_size=16_384)
    print(f"two states at 16,384 ranks: {ours * 1e3:.1f} ms; {count} groups alone: {floor * 1e3:.1f} ms")
    print(f"  ratio {ours / floor:.2f}")
    record("torch, fake", "two states at 16,384 ranks", ours, f"their {count} groups alone", floor)
    pool.close()


if __name__ == "__main__":
    main()
