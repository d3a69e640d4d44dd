"""A DTensor put together from this rank's block, without communication.

Which mesh and placements a spec means is in `meshes`.
"""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor, Placement

from dualmesh_torch import private

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def assemble(
    block: torch.Tensor,
    mesh: "DeviceMesh",
    placements: Sequence[Placement],
    shape: Sequence[int],
    grad_placements: Sequence[Placement] | None = None,
) -> DTensor:
    """Return the DTensor of a global shape whose block on this rank is `block`; communicates nothing. *Local.*"""
    stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return private.from_local(block, mesh, placements, torch.Size(shape), stride, grad_placements)
