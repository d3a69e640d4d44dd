"""Rows exchanged in runs of different lengths, with the exchange as an argument: `eager` and `traced` have one each."""

from collections.abc import Callable

import torch

from dualmesh_torch.collectives.dtypes import carried, uncarried
from dualmesh_torch.collectives.group_member import Party

Counts = tuple[int, ...]
Exchange = Callable[[torch.Tensor, Party, Counts, Counts], torch.Tensor]


def all_to_all(
    exchange: Exchange,
    x: torch.Tensor,
    party: Party,
    *,
    send_counts: Counts,
    recv_counts: Counts,
    rows: int,
    sent_rows: int,
) -> torch.Tensor:
    """Send runs of rows, receive runs of rows, then zeros. *Collective over the party.*"""
    width = x[:1].numel() if x.shape[0] else x.new_empty((1, *x.shape[1:])).numel()
    sent = carried(x[: sum(send_counts)].reshape(sum(send_counts), width).contiguous())
    arrived = exchange(sent, party, recv_counts, send_counts) if party.size > 1 and width else sent
    found = uncarried(arrived, x.dtype).reshape(sum(recv_counts), *x.shape[1:])
    padding = x.new_zeros((rows - sum(recv_counts), *x.shape[1:]))
    return torch.cat([found, padding])
