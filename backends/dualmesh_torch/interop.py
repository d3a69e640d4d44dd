"""Tensors and DTensors at the border to another framework, and torch functions that another framework computes.

What may pass is in `dualmesh.interop`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import dlpack

from dualmesh.backend.array_bridge import Border, Linear, Piece, require_state
from dualmesh.backend.state import ParallelState
from dualmesh.errors import ArrayTypeError
from dualmesh.sharding import tree
from dualmesh_torch.arrays.assembly import assemble

HAS_GRADIENT = (
    "{where}: a tensor of shape {shape} requires a gradient, which does not travel with its values. Differentiate "
    "across the border with dm.interop.call_jax(fn), or give tensor.detach()."
)
STRIDED = (
    "{where}: copy=False, but the tensor of shape {shape} and strides {strides} leaves gaps in memory, which other "
    "frameworks do not read. Give tensor.contiguous(), or copy=True."
)


class TorchBorder(Border):
    """Torch's side of `dm.interop`."""

    def owns(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor)

    def piece(self, where: str, x: Any, state: ParallelState | None, *, copy: bool) -> Piece:
        if x.requires_grad and torch.is_grad_enabled():
            raise ArrayTypeError(HAS_GRADIENT.format(where=where, shape=tuple(x.shape)), found=x.dtype)
        spec, block = None, x.detach()
        if isinstance(x, DTensor):
            known: Any = require_state(where, state, f"a DTensor of shape {tuple(x.shape)}")
            spec, block = known.spec_of(x), x.to_local().detach()
        if copy:
            block = block.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        elif block.is_conj() or block.is_neg() or not _is_dense(block):
            text = STRIDED.format(where=where, shape=tuple(block.shape), strides=block.stride())
            raise ArrayTypeError(text, found=block.stride())
        return Piece(block, tuple(x.shape), str(x.dtype).removeprefix("torch."), spec, is_fresh=copy)

    def array(self, where: str, piece: Piece, state: ParallelState | None, *, copy: bool) -> Any:
        try:
            block: torch.Tensor = dlpack.from_dlpack(piece.block)
        except (RuntimeError, BufferError, TypeError, AttributeError) as error:
            raise ArrayTypeError(
                f"{where}: torch cannot take an array of {piece.dtype}: {error}. Convert it first.", found=piece.dtype
            ) from error
        if copy and not piece.is_fresh:
            block = block.clone(memory_format=torch.contiguous_format)
        if piece.spec is None:
            return block
        mesh, placements = require_state(where, state, f"an array of shape {piece.shape}").sharding(piece.spec)
        return assemble(block, mesh, placements, piece.shape)

    def linearized(self, fn: Callable[..., Any], state: ParallelState | None) -> Callable[[Sequence[Any]], Linear]:
        def call(arrays: Sequence[torch.Tensor]) -> Linear:
            inputs = [x.detach().requires_grad_(_is_differentiable(x)) for x in arrays]
            with torch.enable_grad():
                returned = fn(*inputs)
            outputs = list(tree.leaves(returned))

            def rebuild(values: Sequence[Any]) -> Any:
                rest = iter(values)
                return tree.mapped(lambda _leaf: next(rest), returned)

            def pullback(cotangents: Sequence[Any]) -> list[Any]:
                pairs = [(y, g) for y, g in zip(outputs, cotangents, strict=True) if y.requires_grad and g is not None]
                wrt = [x for x in inputs if x.requires_grad]
                if not pairs or not wrt:
                    return [torch.zeros_like(x) if x.requires_grad else None for x in inputs]
                ends, given = zip(*pairs, strict=True)
                found = iter(torch.autograd.grad(ends, wrt, given, allow_unused=True, materialize_grads=True))
                return [next(found) if x.requires_grad else None for x in inputs]

            return Linear([y.detach() for y in outputs], rebuild, pullback)

        return call

    def function(self, where: str, call: Callable[[Sequence[Any]], Linear]) -> Callable[..., Any]:
        def differentiable(*arrays: torch.Tensor) -> Any:
            kept: list[Linear] = []
            found = _Crossing.apply(call, kept, *arrays)  # type: ignore[no-untyped-call]
            return kept[0].rebuild(found)

        return differentiable


class _Crossing(torch.autograd.Function):
    """A node of torch's graph whose two directions another framework computes."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[Sequence[Any]], Linear], kept: list[Linear], *arrays: torch.Tensor) -> Any:
        linear = call(arrays)
        kept.append(linear)
        ctx.pullback = linear.pullback
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(y for y in linear.results if not _is_differentiable(y)))
        return tuple(linear.results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *cotangents: Any) -> Any:
        return (None, None, *ctx.pullback(cotangents))


def _is_differentiable(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _is_dense(x: torch.Tensor) -> bool:
    """Tell whether a tensor fills its memory without gaps, in whatever order of dims."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True
