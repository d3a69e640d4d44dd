"""Checking that results declared replicated are: every rank's block by its hash, compared by all.

Used by `shard_map(check_replicated=True)`; costs a round of objects over the whole state.
"""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from dualmesh.errors import ShardingError
from dualmesh.sharding.partition_spec import P, slices_of

if TYPE_CHECKING:
    from dualmesh_torch.state import TorchState


def check_replicated(state: "TorchState", arrays: Sequence[DTensor], specs: Sequence[P]) -> None:
    """Refuse results that differ between ranks which hold the same slice. *Collective over the state.*

    Raises:
        ShardingError: They differ; the message names two ranks. Raised on every rank.
    """
    found = [digest_of(x.to_local().detach()) for x in arrays]
    everywhere = state.host.all_gather(found, "world") if state.world_size > 1 else [found]
    for place, (x, spec) in enumerate(zip(arrays, specs, strict=True)):
        if spec.partial:
            continue
        first: dict[tuple[tuple[int, int], ...], tuple[int, str]] = {}
        for member, digests in zip(state.ranks("world"), everywhere, strict=True):
            cut = slices_of(state.topology, spec, x.shape, state.grid_rank(member))
            other, digest = first.setdefault(tuple((part.start, part.stop) for part in cut), (member, digests[place]))
            if digest != digests[place]:
                raise ShardingError(
                    f"shard_map: {spec!r} declares the result equal on ranks {other} and {member}, but it differs. "
                    f"Reduce it over the axes that out_specs leaves out, or name them there.",
                    ranks=(other, member),
                    spec=spec,
                )


def digest_of(block: torch.Tensor) -> str:
    """Return what tells the bytes of a block from others. *Local.*"""
    flat = block.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"").hexdigest()
