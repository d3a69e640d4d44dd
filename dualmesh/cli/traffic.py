"""What a training step of a transformer sends along each axis, in bytes per rank.

Counts follow from who holds what: parameters sharded over the role "params" (gathered twice a step, gradients
reduce-scattered once), kept in copies over "replicate", layers dealt out over "stages", experts over "experts" as in
GShard (Lepikhin et al. 2020); axes that the roles leave over are tensor parallel as in Megatron-LM (Shoeybi et al.
2019). Roles do not say how attention sees a whole "sequence": along the usual axis "ulysses" as in Jacobs et al. 2023,
along all others as in ring attention (Liu et al. 2023). Rings send (n-1)/n of what they gather or scatter, all-reduce
twice that. Communicators are planned in `communicators`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from dualmesh.errors import ArgumentError
from dualmesh.topology.layout import overlap
from dualmesh.topology.parallel_spec import ULYSSES
from dualmesh.topology.roles import (
    expand_axes,
    expert_views,
    has_token_roles,
    param_axes,
    replica_axes,
    stage_axes,
    token_axes,
)
from dualmesh.topology.topology import Axis, Topology

BYTES_WITH_ADAM = 16
"""Per parameter: 2 for weights, 2 for gradients, 12 for fp32 weights and Adam's moments (Rajbhandari et al. 2020)."""
_ASPECT = 128
"""hidden size / layers of a usual dense transformer, for sizes that are not given: parameters = 12 layers hidden**2."""
_SCALARS = 8


@dataclass(frozen=True)
class Model:
    """What is trained.

    Args:
        parameters: All of them, experts included.
        sequence: Tokens of one sample.
        batch: Samples per step and data index.
        layers: Transformer blocks; 0: from the parameters.
        hidden_size: Width of the residual stream; 0: from the parameters.
        element_bytes: Bytes of one value on its way.
        expert_parameters: How many of the parameters are experts'.
        experts_per_token: Experts that each token visits.

    >>> Model(7e9, 4096, 1).shape
    (33, 4224)
    """

    parameters: float
    sequence: int
    batch: int
    layers: int = 0
    hidden_size: int = 0
    element_bytes: int = 2
    expert_parameters: float = 0
    experts_per_token: int = 1

    def __post_init__(self) -> None:
        least = {"parameters": 1, "sequence": 1, "batch": 1, "element_bytes": 1, "experts_per_token": 1}
        for name in (*least, "layers", "hidden_size", "expert_parameters"):
            if not least.get(name, 0) <= getattr(self, name) < float("inf"):
                raise ArgumentError(
                    f"dualmesh plan: {name}={getattr(self, name)!r}. Give at least {least.get(name, 0)}."
                )
        if self.expert_parameters > self.parameters:
            raise ArgumentError(
                f"dualmesh plan: expert_parameters={self.expert_parameters:.3g} are more than all parameters, "
                f"{self.parameters:.3g}. Give the total in parameters."
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and hidden size, those not given from the others: parameters = 12 layers hidden**2."""
        if self.layers and self.hidden_size:
            return self.layers, self.hidden_size
        dense = max(self.parameters - self.expert_parameters, 1)
        if self.layers:
            return self.layers, max(round((dense / 12 / self.layers) ** 0.5), 1)
        if self.hidden_size:
            return max(round(dense / 12 / self.hidden_size**2), 1), self.hidden_size
        layers = max(round((dense / 12 / _ASPECT**2) ** (1 / 3)), 1)
        return layers, layers * _ASPECT


class Traffic(NamedTuple):
    """What one rank sends along one axis in a step."""

    axis: Axis
    work: str
    times: int
    """Collectives per step."""
    sent: int
    """Bytes that one rank sends per step."""


def traffic(topology: Topology, model: Model) -> list[Traffic]:
    """Return what one rank sends in a training step, axis by axis; axes of size 1 send nothing. *Pure.*

    >>> import dualmesh as dm
    >>> topology = dm.parallel_spec(dp_shard_size=4).resolve(4)
    >>> [tuple(found) for found in traffic(topology, Model(1000, 1, 1))][:2]
    [('dp_shard_sp', 'gather parameters, forward and backward', 2, 3000), ('dp_shard_sp', 'scatter gradients', 1, 1500)]
    """
    found = [*_parameters(topology, model), *_experts(topology, model), *_activations(topology, model)]
    return [one for one in found if one.sent]


def bytes_held(topology: Topology, model: Model) -> float:
    """Return the bytes of weights, gradients and Adam's state that one rank holds. *Pure.*"""
    dense = (
        (model.parameters - model.expert_parameters)
        / _count_cuts(topology)
        / _size(topology, _role(topology, "params"))
    )
    rest = _rest(topology)
    experts = model.expert_parameters / _count_cuts(topology, experts=True) / _size(topology, rest)
    return BYTES_WITH_ADAM * (dense + experts)


def data_size(topology: Topology) -> int:
    """Return over how many indices the samples of a step are divided. *Pure.*"""
    return _size(topology, _role(topology, "data"))


def _parameters(topology: Topology, model: Model) -> Iterator[Traffic]:
    dense = (model.parameters - model.expert_parameters) / _count_cuts(topology) * model.element_bytes
    params = _role(topology, "params")
    yield from _sharding_traffic(topology, params, dense, "parameters", "gradients")
    copies = _role(topology, "replicate")
    yield _reduction_traffic(topology, copies, dense / _size(topology, params), "add gradients of the copies")
    yield Traffic(
        _name(topology, _role(topology, "loss")),
        "add up tokens and the loss",
        2,
        _ring(topology, _role(topology, "loss"), 2 * 2 * _SCALARS),
    )


def _experts(topology: Topology, model: Model) -> Iterator[Traffic]:
    experts = _expert_axes(topology)
    if not _size(topology, experts) > 1:
        return
    held = model.expert_parameters / _count_cuts(topology, experts=True) * model.element_bytes
    rest = _rest(topology)
    yield from _sharding_traffic(topology, rest, held, "experts", "experts' gradients")
    copies = replica_axes(topology, next(iter(expert_views(topology)), None))
    yield _reduction_traffic(topology, copies, held / _size(topology, rest), "add experts' gradients of the copies")
    layers = _layers_here(topology, model)
    tokens = _tokens(topology, model) * model.experts_per_token * model.shape[1] * model.element_bytes
    sent = 4 * layers * _ring(topology, experts, tokens)
    yield Traffic(_name(topology, experts), "send tokens to experts and back", 4 * layers, sent)


def _activations(topology: Topology, model: Model) -> Iterator[Traffic]:
    layers = _layers_here(topology, model)
    block = _tokens(topology, model) * model.shape[1] * model.element_bytes
    tensor, stages = _tensor_axes(topology), stage_axes(topology)
    heads = block // _size(topology, tensor)
    sums = 4 * layers * 2 * _ring(topology, tensor, block)
    yield Traffic(_name(topology, tensor), "add partial activations", 4 * layers, sums)
    for axis in expand_axes(topology, _role(topology, "sequence")):
        if axis == ULYSSES:
            sent = 8 * layers * _ring(topology, (axis,), heads)
            yield Traffic(axis, "exchange sequence for heads", 8 * layers, sent)
        else:
            hops = _size(topology, (axis,)) - 1
            yield Traffic(axis, "pass keys and values around", 6 * hops * layers, 6 * hops * layers * heads)
    sent = 2 * block if _size(topology, stages) > 1 else 0
    yield Traffic(_name(topology, stages), "hand activations on, and their gradients back", 2, sent)


def _sharding_traffic(
    topology: Topology, axes: tuple[str, ...], held: float, what: str, gradients: str
) -> Iterator[Traffic]:
    name, once = _name(topology, axes), _ring(topology, axes, held)
    yield Traffic(name, f"gather {what}, forward and backward", 2, 2 * once)
    yield Traffic(name, f"scatter {gradients}", 1, once)


def _reduction_traffic(topology: Topology, axes: tuple[str, ...], held: float, work: str) -> Traffic:
    return Traffic(_name(topology, axes), work, 1, 2 * _ring(topology, axes, held))


def _ring(topology: Topology, axes: tuple[str, ...], held: float) -> int:
    """Return what each of n ranks sends to gather, or to scatter, so many bytes in a ring."""
    size = _size(topology, axes)
    return int(held * (size - 1) / size)


def _role(topology: Topology, part: str) -> tuple[str, ...]:
    return topology.spec.roles.get(part, ())


def _expert_axes(topology: Topology) -> tuple[str, ...]:
    """Return the axes along which each index has other experts, of the first view that has some, as for `_rest`."""
    return next((topology.spec.views[view].roles["experts"] for view in expert_views(topology)), ())


def _tensor_axes(topology: Topology) -> tuple[str, ...]:
    """Return the base axes of size > 1 that the roles leave over; none where they do not say what tokens do."""
    named = (*token_axes(topology), *stage_axes(topology), *param_axes(topology), *replica_axes(topology))
    if not has_token_roles(topology) or not all(name in topology.layouts for name in named):
        return ()  # rank groups have no axes beside those that roles name
    taken = [topology.layout(name) for name in named]
    return tuple(
        name
        for name in topology.base_axes
        if topology.size(name) > 1 and not any(overlap(topology.layout(name), one) for one in taken)
    )


def _rest(topology: Topology) -> tuple[str, ...]:
    return next((param_axes(topology, view) for view in expert_views(topology)), ())


def _size(topology: Topology, axes: tuple[str, ...]) -> int:
    known = tuple(axis for axis in axes if axis in topology.layouts)
    return topology.layout(known).size if known else 1


def _name(topology: Topology, axes: tuple[str, ...]) -> Axis:
    """Return the combined axis that is made of some axes, or the tuple."""
    if len(axes) == 1:
        return axes[0]
    return next((name for name, parts in topology.spec.combined.items() if parts == axes), axes)


def _count_cuts(topology: Topology, *, experts: bool = False) -> int:
    """Return over how many ranks a layer is cut before sharding: tensor parallel or experts, and stages."""
    return _size(topology, _expert_axes(topology) if experts else _tensor_axes(topology)) * _stages(topology)


def _stages(topology: Topology) -> int:
    return _size(topology, stage_axes(topology))


def _layers_here(topology: Topology, model: Model) -> int:
    return -(-model.shape[0] // _stages(topology))


def _tokens(topology: Topology, model: Model) -> int:
    return model.batch * model.sequence // _size(topology, _role(topology, "sequence"))
