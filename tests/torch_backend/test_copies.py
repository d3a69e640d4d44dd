"""How often Ulysses copies around its exchange: a copy costs as much as the exchange itself."""

import dualmesh as dm
from tests.worlds import torch_world

LAYOUTS = {  # shape of a block, dim of the sequence, dim of the heads
    "batch, seq, heads, dim": ((2, 6, 8, 5), 1, 2),
    "seq, heads, dim": ((6, 8, 5), 0, 1),
    "batch, heads, seq, dim": ((2, 8, 6, 5), 2, 1),
}
COPIES = {"clone", "copy_", "_to_copy", "cat", "stack", "contiguous", "index", "index_select", "constant_pad_nd"}


def copied():
    """Return, by layout, function, direction and dtype, the copies before and after the exchange."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Sides(TorchDispatchMode):
        """Counts copies of tensors before and after the exchange."""

        def __init__(self):
            super().__init__()
            self.sides = [0]

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            namespace, name = func._schema.name.split("::")
            if namespace == "c10d":
                self.sides.append(0)
            self.sides[-1] += name in COPIES
            return func(*args, **(kwargs or {}))

    state = dm.init_parallel_state(ulysses_size=4)
    rank = state.own_rank()
    found = {}
    for layout, (shape, seq, head) in LAYOUTS.items():
        for function in (dm.sequence.gather_seq_scatter_heads, dm.sequence.gather_heads_scatter_seq):
            for dtype in (torch.float32, torch.bfloat16):
                local = list(shape)
                local[seq] *= 4 if function is dm.sequence.gather_heads_scatter_seq else 1
                count = torch.Size(local).numel()
                x = ((torch.arange(float(count)) * 3 % 251).reshape(local) - rank).to(dtype).requires_grad_()
                with Sides() as forward:
                    y = function(x, seq_dim=seq, head_dim=head)
                cotangent = ((torch.arange(float(y.numel())) * 7 % 241).reshape(y.shape) + rank).to(dtype)
                with Sides() as backward:
                    y.backward(cotangent)
                for direction, sides in (("forward", forward.sides), ("backward", backward.sides)):
                    found[layout, function.__name__, direction, str(dtype)] = sides
    return found


def test_ulysses_copies_at_most_once_on_each_side_of_its_exchange():
    for found in torch_world(copied, world_size=4):
        assert len(found) == len(LAYOUTS) * 2 * 2 * 2
        for what, sides in found.items():
            assert len(sides) == 2, f"{what}: one exchange"
            assert max(sides) <= 1, f"{what}: {sides}"
