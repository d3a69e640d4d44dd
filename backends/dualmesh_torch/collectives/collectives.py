"""Per-rank collectives with gradients: one autograd function, driven by the core's op table.

What moves is in `eager`, for compiled code in `traced`, and with other work meanwhile in `pending`.
"""

import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

from dualmesh.backend.collectives import Collectives, Kind
from dualmesh.backend.pending import Pending
from dualmesh.backend.state import AxisTable
from dualmesh.backend.transpose_rules import Call, call
from dualmesh.errors import ArrayTypeError, NotDifferentiableError
from dualmesh.runtime.debug import call_site, switch
from dualmesh.topology.topology import Axis
from dualmesh_torch import private
from dualmesh_torch.collectives import eager, exchanges, pending, traced
from dualmesh_torch.collectives.dtypes import KINDS, resolve_memory
from dualmesh_torch.collectives.group_member import GroupMember

if TYPE_CHECKING:
    from dualmesh_torch.state import TorchState

Tensor = torch.Tensor
_unpack_dual: Any = forward_ad.unpack_dual


class TorchCollectives(Collectives):
    """The verbs on torch tensors. Backward uses the group that forward used, whatever is ambient then."""

    def __init__(self, state: "TorchState") -> None:
        self._state = state
        self._parties: AxisTable = AxisTable(state.member)
        self._is_simulated = not state.is_real

    def know(self, axis: Axis, member: GroupMember) -> None:
        """Keep the group of an axis that exists from the start. *Local.*"""
        self._parties[axis] = member

    def clear(self) -> None:
        """Forget the groups. *Local.*"""
        self._parties.clear()

    def admit(self, where: str, x: Any, axis: Axis) -> Kind:
        if self._is_simulated:
            self._state.refuse_simulated(where)
        # The exact class first: every collective comes by here, and whether it is a subclass takes longer to say.
        if type(x) is Tensor or (isinstance(x, Tensor) and not isinstance(x, DTensor)):
            # torch.compile refuses the question for a layout in the rule of an autograd.Function.
            if (x.is_sparse or x.is_sparse_csr) if torch.compiler.is_compiling() else x.layout is not torch.strided:
                raise ArrayTypeError(
                    f"{where}: found a tensor of layout {x.layout}. Collectives take dense tensors: call x.to_dense().",
                    found=x.layout,
                )
            return KINDS[x.dtype]
        if isinstance(x, DTensor):
            raise ArrayTypeError(
                f"{where}: found a DTensor of shape {tuple(x.shape)}, a global array. Collectives take per-rank "
                f"blocks: pass it to the function given to dm.shard_map as an argument (a captured one has no block), "
                f"or call x.to_local().",
                found=type(x),
            )
        raise ArrayTypeError(
            f"{where}: found a {type(x).__module__}.{type(x).__qualname__}. Blocks of the torch backend are tensors: "
            f"convert it with torch.as_tensor.",
            found=type(x),
        )

    def all_reduce(self, x: Any, axis: Axis, *, op: str) -> Any:
        return self._applied("all_reduce", x, axis, {"op": op})

    def all_gather(self, x: Any, axis: Axis, *, dim: int) -> Any:
        return self._applied("all_gather", x, axis, {"dim": dim})

    def reduce_scatter(self, x: Any, axis: Axis, *, dim: int, op: str) -> Any:
        return self._applied("reduce_scatter", x, axis, {"dim": dim, "op": op})

    def all_to_all(self, x: Any, axis: Axis, *, split_dim: int, concat_dim: int) -> Any:
        return self._applied("all_to_all", x, axis, {"split_dim": split_dim, "concat_dim": concat_dim})

    def broadcast(self, x: Any, axis: Axis, *, src: int) -> Any:
        return self._applied("broadcast", x, axis, {"src": src})

    def permute(self, x: Any, axis: Axis, *, pairs: tuple[tuple[int, int], ...]) -> Any:
        return self._applied("permute", x, axis, {"pairs": pairs})

    def shift(self, x: Any, axis: Axis, *, offset: int, wrap: bool, size: int) -> Any:
        return self._applied("shift", x, axis, {"offset": offset, "wrap": wrap})

    def ragged_all_to_all(
        self, x: Any, axis: Axis, *, send_counts: Any, recv_counts: Any, rows: int, sent_rows: int
    ) -> Any:
        settings = {"send_counts": send_counts, "recv_counts": recv_counts, "rows": rows, "sent_rows": sent_rows}
        return self._applied("ragged_all_to_all", x, axis, settings)

    def enter(self, x: Any, axis: Axis) -> Any:
        return self._applied("enter", x, axis, {})

    def leave(self, x: Any, axis: Axis) -> Any:
        return self._applied("leave", x, axis, {})

    def take_block(self, x: Any, axis: Axis, *, dim: int) -> Any:
        width = x.shape[dim] // self._state.size(axis)
        return x.narrow(dim, self.axis_index(axis) * width, width).clone(memory_format=torch.contiguous_format)

    def axis_index(self, axis: Axis) -> Any:
        return self._state.index(axis)

    def stop_gradient(self, x: Any) -> Any:
        return x.detach()

    def known_number(self, x: Any) -> float | None:
        if torch.compiler.is_compiling() or not isinstance(x, Tensor) or x.device.type != "cpu":
            return None
        return float(x.detach())

    def started(self, verb: str, x: Any, axis: Axis, **settings: Any) -> Pending:
        member: GroupMember = self._parties[axis]
        if torch.compiler.is_compiling() or not x.numel():
            return super().started(verb, x, axis, **settings)
        if private.dual_level() >= 0:
            _refuse_dual(verb, x, axis)
        work = pending.start(verb, resolve_memory(x.detach()), member, **settings)
        if x.requires_grad and torch.is_grad_enabled():
            return pending.UnderWay(
                work, lambda result: _apply(x, call(verb, axis, member.size, **settings), member, result)
            )
        return pending.UnderWay(work)

    def _applied(self, verb: str, x: Tensor, axis: Axis, settings: dict[str, Any]) -> Tensor:
        member: GroupMember = self._parties[axis]
        if torch.compiler.is_compiling():
            return traced.apply_collective(verb, x, axis, member, settings)
        if private.dual_level() >= 0:
            _refuse_dual(verb, x, axis)
        if x.requires_grad and torch.is_grad_enabled():
            found: Tensor = _apply(x, _call(verb, axis, member.size, **settings), member, None)
            return found
        return _move(verb, x, member, settings)


def _refuse_dual(verb: str, x: Tensor, axis: Axis) -> None:
    """Refuse a dual tensor, whose tangent would stay where it is."""
    if _unpack_dual(x).tangent is not None:
        raise NotDifferentiableError(
            f"ops.{verb}: found a dual tensor. Collectives have no forward-mode derivative (torch.func.jvp, "
            f"torch.autograd.forward_ad). Use reverse mode: torch.autograd.grad or dm.value_and_grad.",
            axis=axis,
        )


def _move(verb: str, x: Tensor, member: GroupMember, settings: dict[str, Any]) -> Tensor:
    if x.is_neg() or x.is_conj():
        x = resolve_memory(x)
    if switch.on:
        exchanges.compare(f"ops.{verb}", member, x, _forward.site, **settings)
    try:
        return eager.VERBS[verb](x, member, **settings)
    except RuntimeError as error:
        exchanges.refuse_failure(f"ops.{verb}", member, error)
        raise


def _carried_out(x: Tensor, what: Call, member: GroupMember, result: Tensor | None) -> Tensor:
    """Return what a collective makes of a block, or `result` where it has run already."""
    if result is not None:
        return result.detach()
    found = _move(what.verb, x, member, dict(what.settings))
    return found if what.scale == 1.0 else found * what.scale


class _Forward(threading.local):
    """The line that called the forward of what this thread's backward is computing, in debug mode."""

    def __init__(self) -> None:
        self.site: str | None = None


_forward = _Forward()


class _Linear(torch.autograd.Function):
    """Any collective and, as its gradient, the one that the op table names."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Call, member: GroupMember, result: Tensor | None) -> Tensor:
        ctx.held = forward, member, f"the backward of {call_site('torch')}" if switch.on else None
        found = _carried_out(x, forward, member, result)
        # What a function returns may be changed in place only where it is no view.
        return found.detach() if private.is_view(found) and forward.verb != "enter" else found

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        forward, member, site = ctx.held
        (cotangent,) = cotangents
        if torch.compiler.is_compiling():
            return traced.backward(cotangent, forward, member), None, None, None
        # The graph of a gradient is kept only where gradients of gradients are asked for.
        run = _apply if torch.is_grad_enabled() and cotangent.requires_grad else _carried_out
        _forward.site = site
        try:
            return run(cotangent, forward.backward, member, None), None, None, None
        finally:
            _forward.site = None


_apply: Any = _Linear.apply
_call = lru_cache(1024)(call)
