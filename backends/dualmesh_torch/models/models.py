"""Whole models in torch: the parameters of a module, or containers of tensors.

How FSDP2 wraps a module is in `fsdp`, how one is born sharded in `deferred_init`; plans are in `dualmesh.arrays.plan`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dualmesh.backend.plain_models import PlainModels
from dualmesh.errors import ArrayTypeError
from dualmesh.sharding.partition_spec import P, local_shape
from dualmesh_torch import private
from dualmesh_torch.arrays.assembly import assemble
from dualmesh_torch.models import deferred_init, fsdp

if TYPE_CHECKING:
    from dualmesh_torch.state import TorchState

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""What compile, FSDP and checkpointing put into a parameter's name."""

FLAT = (
    "{where}: found a parameter{called} of FullyShardedDataParallel (FSDP1), of which each rank holds a piece of a "
    "flat tensor that has no layout. Use what FSDP1 has itself (model.clip_grad_norm_(max_norm), its "
    "summon_full_params and state dicts), or shard by fully_shard(module, mesh=state.fsdp_mesh)."
)


class TorchModels(PlainModels):
    """Modules over the ranks of one state; a parameter that a module holds twice is one, under its first name."""

    _state: "TorchState"

    def parameters(self, model: Any) -> list[tuple[str, Any]]:
        if not isinstance(model, nn.Module):
            return super().parameters(model)
        found = [(clean(name), parameter) for name, parameter in model.named_parameters()]
        for name, parameter in found:
            refuse_flat("plan", parameter, name)
        return found

    def filled(self, model: Any, values: Sequence[Any]) -> Any:
        if not isinstance(model, nn.Module):
            return super().filled(model, values)
        return {path: value for (path, _), value in zip(self.parameters(model), values, strict=True)}

    def abstract(self, model: Any, specs: Sequence[P]) -> Any:
        leaves = [leaf for _, leaf in self.parameters(model)]
        found = [self._empty(leaf, spec, "meta") for leaf, spec in zip(leaves, specs, strict=True)]
        return self.filled(model, found)

    def apply(self, model: Any, specs: Sequence[P], units_: Mapping[str, tuple[str, ...] | None]) -> Any:
        if not isinstance(model, nn.Module):
            return super().apply(model, specs, units_)
        specs_of = {parameter: spec for (_, parameter), spec in zip(self.parameters(model), specs, strict=True)}
        if units_:
            return fsdp.wrap_units(model, specs_of, units_, self._state, clean)
        replace(model, {old: self.laid_out(old, spec) for old, spec in specs_of.items()})
        return model

    def init(self, fn: Callable[..., Any], specs_of: Callable[[Any], Sequence[P]], args: Sequence[Any]) -> Any:
        sketch = deferred_init.init_on_meta(fn, args)
        if not isinstance(sketch.model, nn.Module):
            return super().init(fn, specs_of, args)
        specs = specs_of(sketch.model)
        by_number = sketch.numbers([parameter for _, parameter in sketch.model.named_parameters()], specs)
        return deferred_init.materialize(fn, args, by_number, self.laid_out, sketch.count)

    def laid_out(self, parameter: nn.Parameter, spec: P) -> nn.Parameter:
        """Return a parameter cut for this rank; one without memory stays so. *Local.*"""
        if isinstance(parameter, DTensor):
            whole: Any = self._state.arrays.constrain(parameter, spec)
        elif parameter.is_meta:
            whole = self._empty(parameter, spec, "meta")
        else:
            whole = self._state.arrays.distribute(parameter, spec)
        found = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        found.__dict__.update(parameter.__dict__)
        return found

    def _empty(self, leaf: Any, spec: P, device: str) -> DTensor:
        mesh, placements = self._state.sharding(spec)
        shape = tuple(leaf.shape)
        block = torch.empty(local_shape(self._state.topology, spec, shape), dtype=leaf.dtype, device=device)
        return assemble(block, mesh, placements, shape)


def clean(name: str) -> str:
    """Return a parameter's or module's name without what wrappers put into it. *Pure.*

    >>> clean("_orig_mod.layers.0._checkpoint_wrapped_module.weight")
    'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def held_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield every place where a module holds a parameter itself: (owner, name, parameter), tied ones each time."""
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            yield owner, name, parameter


def replace(module: nn.Module, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Put new parameters wherever the module holds the old ones. *Local.*"""
    for owner, name, parameter in list(held_parameters(module)):
        if parameter in new:
            setattr(owner, name, new[parameter])


def named_tensors(where: str, given: Any, path: str | None = None) -> Iterator[tuple[str | None, torch.Tensor]]:
    """Yield (name, tensor) of a module, a tree or any iterable; None where only the place in a list tells it apart.

    *Pure.*
    """
    if isinstance(given, nn.Module):
        yield from ((clean(f"{path or ''}.{name}"), parameter) for name, parameter in given.named_parameters())
    elif isinstance(given, torch.Tensor):
        yield path, given
    elif isinstance(given, Mapping):
        for key, value in given.items():
            yield from named_tensors(where, value, f"{path or ''}.{key}")
    elif isinstance(given, Iterable) and not isinstance(given, str):
        for one in given:
            yield from named_tensors(where, one, path)
    elif given is not None:
        raise ArrayTypeError(f"{where}: found a {type(given).__qualname__}. Give parameters or a module.")


def refuse_flat(where: str, tensor: torch.Tensor, name: str | None = None) -> None:
    """Refuse a piece of FSDP1's flat parameter, which looks like a plain tensor that ranks hold alike. *Pure.*

    Raises:
        ArrayTypeError: It is one.
    """
    if private.is_fsdp1_shard(tensor):
        raise ArrayTypeError(FLAT.format(where=where, called="" if name is None else f" {name.strip('.')!r}"))
