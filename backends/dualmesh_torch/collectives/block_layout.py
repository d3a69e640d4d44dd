"""Blocks of a tensor dim brought to the front and back: the layout work around an exchange, one copy at most.

What is exchanged is in `eager` and `traced`.
"""

import torch


def bring_to_front(x: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """Return a view (count, ...) of the blocks of a dim."""
    return torch.unflatten(x, dim, (count, x.shape[dim] // count)).movedim(dim, 0)


def join_blocks(blocks: torch.Tensor, dim: int) -> torch.Tensor:
    """Return blocks (count, ...) concatenated along a dim, contiguous; a copy unless they lie so already."""
    return blocks.movedim(0, dim).flatten(dim, dim + 1).contiguous()


def gathered_shape(x: torch.Tensor, dim: int, count: int) -> list[int]:
    """Return the shape of `count` blocks like `x` concatenated along a dim."""
    shape = list(x.shape)
    shape[dim] *= count
    return shape
