"""Blocks that a per-rank function borrows from global arrays: it may neither change them nor return them as its own.

What happens at the boundary to gradients is in `boundary`.
"""

from collections.abc import Iterable
from typing import Any

import torch

from dualmesh.errors import ArgumentError
from dualmesh_torch import private

CHANGED = (
    "shard_map: the function changed its argument in place (block {place}, shape {shape}), and with it the array that "
    "the caller holds. Arguments are read only, as in JAX: work on a copy (x = x.clone())."
)


class Blocks:
    """The blocks of one call, as they were before it."""

    def __init__(self, blocks: Iterable[torch.Tensor]) -> None:
        self._blocks = [(block, private.version_of(block)) for block in blocks]

    def refuse_changed(self) -> None:
        """Refuse a call that wrote to a block. *Local.*

        Raises:
            ArgumentError: One was changed; the message counts blocks in the order of the arguments.
        """
        for place, (block, version) in enumerate(self._blocks):
            if private.version_of(block) != version:
                raise ArgumentError(CHANGED.format(place=place, shape=tuple(block.shape)), place=place)

    def own(self, result: Any) -> Any:
        """Return a result that shares no memory with a block: a copy where it does. *Local.*"""
        if not isinstance(result, torch.Tensor) or result.layout is not torch.strided:
            return result
        memory = result.untyped_storage().data_ptr()
        if memory and any(block.untyped_storage().data_ptr() == memory for block, _ in self._blocks):
            return result.clone(memory_format=torch.contiguous_format)
        return result
