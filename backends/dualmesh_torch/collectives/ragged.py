"""Rows exchanged in runs of different lengths, with the exchange as an argument: `eager` and `traced` have one each."""

from collections.abc import Callable

import torch

from dualmesh_torch.collectives.dtypes import from_carried, to_carried
from dualmesh_torch.collectives.group_member import GroupMember

Counts = tuple[int, ...]
Exchange = Callable[[torch.Tensor, GroupMember, Counts, Counts], torch.Tensor]


def all_to_all(
    exchange: Exchange,
    x: torch.Tensor,
    member: GroupMember,
    *,
    send_counts: Counts,
    recv_counts: Counts,
    rows: int,
    sent_rows: int,
) -> torch.Tensor:
    """Send runs of rows, receive runs of rows, then zeros. *Collective over the group.*"""
    width = x[:1].numel() if x.shape[0] else x.new_empty((1, *x.shape[1:])).numel()
    sent = to_carried(x[: sum(send_counts)].reshape(sum(send_counts), width).contiguous())
    arrived = exchange(sent, member, recv_counts, send_counts) if member.size > 1 and width else sent
    found = from_carried(arrived, x.dtype).reshape(sum(recv_counts), *x.shape[1:])
    padding = x.new_zeros((rows - sum(recv_counts), *x.shape[1:]))
    return torch.cat([found, padding])
