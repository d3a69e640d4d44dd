"""The boundary of a lifted function: one node of the graph for all inputs, reached from every result.

Ranks may use different inputs. Were each input summed by a node of its own, a rank would sum only what it used, in an
order of its own, and meet the wrong partner.
"""

from collections.abc import Sequence
from typing import Any

import torch

from dualmesh.topology.topology import Axis
from dualmesh_torch.collectives import eager
from dualmesh_torch.collectives.group_member import GroupMember

Tensor = torch.Tensor
Shared = tuple[Axis, GroupMember] | None


def enter_blocks(blocks: Sequence[Tensor], shared: Sequence[Shared]) -> tuple[list[Tensor], Tensor]:
    """Return the blocks, gradients summed over the ranks that hold the same, and what ties results to them. *Local.*

    Args:
        blocks: The inputs that need a gradient, in the same order on every rank.
        shared: The group of the ranks that hold the same block, or None where no other rank does.
    """
    *found, tie = _Entered.apply(tuple(one[1] if one else None for one in shared), *blocks)  # type: ignore[no-untyped-call]
    return found, tie


def tie_result(result: Tensor, tie: Tensor) -> Tensor:
    """Return a result whose backward reaches the inputs on every rank, used there or not. *Local.*"""
    if not (result.is_floating_point() or result.is_complex()):
        return result
    found: Tensor = _Tied.apply(result, tie)  # type: ignore[no-untyped-call]
    return found


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, members: tuple[GroupMember | None, ...], *blocks: Tensor) -> tuple[Tensor, ...]:
        ctx.members = members
        return (*(block.view_as(block) for block in blocks), blocks[0].new_zeros((), dtype=torch.float32))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        # Collective order: by argument.
        pairs = zip(cotangents[:-1], ctx.members, strict=True)
        return None, *(_Summed.apply(one, member) if member else one for one, member in pairs)  # type: ignore[no-untyped-call]


class _Summed(torch.autograd.Function):
    """The sum over a group, whose gradient is the same sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, member: GroupMember) -> Tensor:
        ctx.member = member
        return eager.all_reduce(x, member, op="sum")

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None]:
        # The boundary counts a replicated block once, so what a gradient of a gradient brings passes as it is.
        return cotangents[0], None


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, tie: Tensor) -> Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, Tensor]:
        return cotangents[0], cotangents[0].new_zeros((), dtype=torch.float32)
