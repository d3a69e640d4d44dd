"""The norm of many tensors at once: shards of DTensors, each element once, and plain tensors.

Gradients themselves are in `gradients`.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial

from dualmesh_torch import private
from dualmesh_torch.party import Party


@torch.no_grad()
def of(tensors: Sequence[torch.Tensor], order: float, party: Party | None) -> torch.Tensor:
    """Return the norm of all tensors together, on every rank; no gradient. *Collective over the meshes.*

    Tensors whose shards lie over the same groups are reduced together, in the order of first appearance.
    """
    is_largest = order == float("inf")
    parts: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups, local = _split(tensor)
        size = local.abs()
        size = size.float() if size.itemsize < 4 else size
        part = (size.max() if size.numel() else size.new_zeros(())) if is_largest else (size**order).sum()
        parts.setdefault(groups, []).append(part)
    if not parts:
        return torch.zeros(())
    reduce = dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM
    totals = []
    for groups, own in parts.items():
        total = torch.stack(own).max() if is_largest else torch.stack(own).sum()
        for group in groups:
            dist.all_reduce(total, reduce, group=group)
        totals.append(total)
    total = torch.stack(totals).max() if is_largest else torch.stack(totals).sum()
    if party is not None:
        dist.all_reduce(total, reduce, group=party.group)
    return total if is_largest else total ** (1 / order)


def _split(tensor: torch.Tensor) -> tuple[tuple[dist.ProcessGroup, ...], torch.Tensor]:
    """Return the groups over which a tensor's shards lie, and this rank's shard."""
    if not isinstance(tensor, DTensor):
        return (), tensor
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(isinstance(one, Partial) for one in placements):
        whole = [torch.distributed.tensor.Replicate() if isinstance(one, Partial) else one for one in placements]
        tensor, placements = tensor.redistribute(mesh, whole), tuple(whole)
    split = [dim for dim, one in enumerate(placements) if one.is_shard() or private.split_factor_of(one) is not None]
    return tuple(mesh.get_group(dim) for dim in split if mesh.size(dim) > 1), tensor.to_local()
