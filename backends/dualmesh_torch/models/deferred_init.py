"""A module born sharded: sketched on the meta device, then made for real, each part cut as soon as it is made.

What a parameter becomes is in `models`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from dualmesh.errors import ShardingError
from dualmesh.sharding.partition_spec import P

Cut = Callable[[nn.Parameter, P], nn.Parameter]

_NUMBER = "dualmesh_number"
_RANDOM = frozenset(
    {*("normal_", "uniform_", "bernoulli_", "exponential_", "geometric_", "log_normal_", "cauchy_", "random_")}
)
OTHER_MODEL = (
    "init_sharded: the function registered {second} parameters, on the meta device {first}. It must make the same "
    "model whenever it is called."
)


class MetaModel:
    """A model without memory, and the number of every parameter: its place among those that `fn` registered."""

    def __init__(self, model: Any, count: int) -> None:
        self.model = model
        self.count = count

    def numbers(self, parameters: Sequence[nn.Parameter], specs: Sequence[P]) -> dict[int, P]:
        """Return the spec of every parameter that the model kept, by number."""
        pairs = zip(parameters, specs, strict=True)
        return {getattr(parameter, _NUMBER): spec for parameter, spec in pairs}


def init_on_meta(fn: Callable[..., Any], args: Sequence[Any]) -> MetaModel:
    """Return what `fn` makes on the meta device; draws no random numbers. *Local.*"""
    counter = _Counter()
    with torch.random.fork_rng(devices=[]), torch.device("meta"), counter.counting():
        model = fn(*args)
    return MetaModel(model, counter.count)


def materialize(fn: Callable[..., Any], args: Sequence[Any], specs: dict[int, P], cut: Cut, count: int) -> nn.Module:
    """Return the module that `fn` makes, sharded. *Local.*

    Raises:
        ShardingError: It registered another number of parameters than the sketch.
    """
    nursery = _Materializer(specs, cut)
    with nursery.counting(), nursery.cutting(), _Exact():
        module: nn.Module = fn(*args)
        nursery.cut_all(module)
    if nursery.count != count:
        raise ShardingError(OTHER_MODEL.format(second=nursery.count, first=count), first=count, second=nursery.count)
    for parameter in module.parameters():
        parameter.__dict__.pop(_NUMBER, None)
    return module


class _Counter:
    """Numbers parameters in the order in which they are first registered."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        handle = register_module_parameter_registration_hook(self.registered)  # type: ignore[arg-type]  # it may return one
        try:
            yield
        finally:
            handle.remove()

    def registered(self, module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if not hasattr(parameter, _NUMBER):
            setattr(parameter, _NUMBER, self.count)
            self.count += 1
        return None


class _Materializer(_Counter):
    """Cuts the parameters of a module when its parent takes it: from then on nobody sees them whole."""

    def __init__(self, specs: dict[int, P], cut: Cut) -> None:
        super().__init__()
        self._specs = specs
        self._cut = cut
        self._new: dict[int, nn.Parameter] = {}

    @contextmanager
    def cutting(self) -> Iterator[None]:
        handle = register_module_module_registration_hook(self._taken)
        try:
            yield
        finally:
            handle.remove()

    def registered(self, module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        super().registered(module, name, parameter)
        # One that was cut before and is tied to another place now.
        return self._new.get(getattr(parameter, _NUMBER))

    def _taken(self, parent: nn.Module, name: str, module: nn.Module | None) -> None:
        if module is not None:
            self.cut_all(module)

    def cut_all(self, module: nn.Module) -> None:
        for owner in module.modules():
            for name, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
                number = getattr(parameter, _NUMBER)
                if isinstance(parameter, DTensor) or number not in self._specs:
                    continue
                if number not in self._new:
                    self._new[number] = self._cut(parameter, self._specs[number])
                setattr(owner, name, self._new[number])


class _Exact(TorchFunctionMode):
    """Draws random values of a sharded parameter as one process would: whole, and keeps this rank's part."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sharded = args[0] if args else kwargs.get("tensor")
        is_init = getattr(func, "__module__", None) == nn.init.__name__
        if not isinstance(sharded, DTensor) or not (is_init or getattr(func, "__name__", "") in _RANDOM):
            return func(*args, **kwargs)
        with torch.no_grad():
            whole = torch.empty(sharded.shape, dtype=sharded.dtype)
            rest = {name: value for name, value in kwargs.items() if name != "tensor"}
            func(whole, *args[1:], **rest)
            part = distribute_tensor(whole, sharded.device_mesh, sharded.placements, src_data_rank=None)
            sharded.to_local().copy_(part.to_local())
        return sharded
