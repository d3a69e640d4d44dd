"""A module and its trainer's calls as they are written for the seed: only the import line names dualmesh.

Attention with Ulysses, twice: in the state named "thinker" split over its group, in a single process whole.
"""

import torch
from torch import nn

from dualmesh_torch.veomni import (
    gather_heads_scatter_seq,
    gather_outputs,
    gather_seq_scatter_heads,
    get_parallel_state,
    get_parallel_state_by_name,
    get_ulysses_sequence_parallel_group,
    init_parallel_state,
    set_parallel_state,
    slice_input_tensor,
    unpadding_tensor_for_seqeunce_parallel,
    use_parallel_state,
)

HEADS, WIDTH = 4, 8


class Attention(nn.Module):
    """Causal self-attention; the sequence is split over the ambient ulysses group, if there is one."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, unpadded_length):
        """Return the block's output; x is (batch, block, width)."""
        heads = (
            gather_seq_scatter_heads(
                layer(x).unflatten(-1, (HEADS, -1)), seq_dim=1, head_dim=2, unpadded_dim_size=unpadded_length
            )
            for layer in self.qkv
        )
        q, k, v = (one.transpose(1, 2) for one in heads)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.out(gather_heads_scatter_seq(mixed, head_dim=2, seq_dim=1).flatten(2))


def main(length):
    """Compare output and gradients of the split and the whole module."""
    world = torch.distributed.get_world_size()
    init_parallel_state(dp_size=world // 2, ulysses_size=2, device_type="cpu", name="thinker")
    init_parallel_state(dp_size=world, device_type="cpu", name="talker")
    torch.manual_seed(3)
    split, whole = Attention().double(), Attention().double()
    whole.load_state_dict(split.state_dict())
    x = torch.randn(2, length, WIDTH, dtype=torch.float64)

    with use_parallel_state("thinker"):
        group = get_ulysses_sequence_parallel_group()
        block = slice_input_tensor(x, dim=1, group=group).requires_grad_()
        made = split(block, length)
        weight = torch.arange(float(x.numel()), dtype=torch.float64).reshape(x.shape)
        (made * slice_input_tensor(weight, dim=1)).sum().backward()
    # The talker's state is ambient from here on: the explicit group says whose sequence is meant.
    with use_parallel_state("talker"):
        found = gather_outputs(
            made.detach(), gather_dim=1, padding_dim=1, unpad_dim_size=length, scale_grad=False, group=group
        )
        x_gradient = gather_outputs(block.grad, gather_dim=1, scale_grad=False, group=group)
        x_gradient = unpadding_tensor_for_seqeunce_parallel(x_gradient, 1, length, group)
    for parameter in split.parameters():
        torch.distributed.all_reduce(parameter.grad, group=group)

    before = set_parallel_state(None)
    assert before is get_parallel_state_by_name("thinker")
    assert get_parallel_state().world_size == 1
    assert get_ulysses_sequence_parallel_group() is None
    full = x.clone().requires_grad_()
    expected = whole(full, length)
    (expected * weight).sum().backward()
    assert set_parallel_state(before).world_size == 1

    torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(x_gradient, full.grad)
    for one, other in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    return True
