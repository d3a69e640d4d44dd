"""The tensor-parallel pair, with the sum as an argument: `eager` and `traced` have one each."""

from collections.abc import Callable

import torch

from dualmesh_torch.collectives.group_member import GroupMember


def enter(x: torch.Tensor, member: GroupMember) -> torch.Tensor:
    """Return `x`, whose gradient is summed. *Local.*"""
    return x.view_as(x)


def leave(all_reduce: Callable[..., torch.Tensor], x: torch.Tensor, member: GroupMember) -> torch.Tensor:
    """Return the sum: the gradient of `enter`. *Collective over the group.*"""
    return all_reduce(x, member, op="sum")
