"""torch's LocalTensorMode runs one piece of code as all ranks: what depends on this rank is refused there by name."""

import dualmesh as dm
from tests.torch_backend.fake import fake_world


def simulated():
    import torch
    import torch.distributed as dist
    from torch.distributed._local_tensor import LocalTensorMode

    state = dm.init_parallel_state(spec=dm.TopologySpec({"dp": 2, "tp": 4}, roles={"data": ("dp",)}))
    lifted = dm.shard_map(lambda block: dm.ops.all_reduce(block, "tp"), dm.P("dp"), dm.P("dp"))
    outside = state.index("tp"), state.local_ranks
    said = {}
    with LocalTensorMode(8) as mode:
        x = mode.rank_map(lambda rank: torch.tensor([1.5 * rank]))
        asked = {
            "index": lambda: state.index("tp"),
            "axis_index": lambda: dm.ops.axis_index("tp"),
            "data_index": lambda: state.data_index,
            "ranks": lambda: state.ranks("tp"),
            "own_rank": lambda: state.own_rank(),
            "local_ranks": lambda: state.local_ranks,
            "is_writer": lambda: state.is_writer(),
            "all_reduce": lambda: dm.ops.all_reduce(x, "tp"),
            "shift": lambda: dm.ops.shift(x, "tp"),
            "take_block": lambda: dm.ops.take_block(x, "dp", 0),
            "started": lambda: dm.ops.all_gather(x, "tp", async_=True),
            "host": lambda: dm.host.all_gather(1, "tp"),
            "distribute": lambda: dm.distribute(torch.ones(8), dm.P("dp")),
            "shard_map": lambda: lifted(torch.ones(8)),
        }
        for name, ask in asked.items():
            try:
                said[name] = repr(ask())
            except dm.errors.RankError as error:
                said[name] = error.ranks, "LocalTensorMode" in str(error) and "Name a rank (rank=...)" in str(error)
            except dm.DualmeshError as error:
                said[name] = f"{type(error).__name__}: {error}"
        y = x.clone()
        dist.all_reduce(y, group=state.group("tp"))
        sums = [y._local_tensors[rank].item() for rank in range(8)]
        named = [state.index("tp", rank) for rank in range(8)]
    return outside, said, sums, named, (state.index("tp"), state.local_ranks)


def test_what_depends_on_this_rank_is_refused_where_torch_simulates_several():
    before, said, sums, named, after = fake_world(simulated, rank=0, world_size=8)
    assert said == dict.fromkeys(said, ((0, 1, 2, 3, 4, 5, 6, 7), True))
    assert sums == [9.0] * 4 + [33.0] * 4, "torch's own collectives on the state's groups"
    assert named == [0, 1, 2, 3] * 2
    assert before == after == (0, (0,))
