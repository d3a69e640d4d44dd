"""`dualmesh plan`: the communicators of a rank, what a training step sends through them, and which sizes fit.

Bytes come from `traffic`, communicators from `communicators`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from dualmesh.cli.command_flags import NODES, WORLD, Flag
from dualmesh.cli.report import Report, Table
from dualmesh.cli.selection import chosen_rank, select_states
from dualmesh.cli.show import heading, text_of
from dualmesh.cli.traffic import Model, bytes_held, data_size, traffic
from dualmesh.config import StateConfig
from dualmesh.errors import ArgumentError, SpecError, did_you_mean, listed
from dualmesh.pictures.axis_facts import GPUS_PER_NODE, leaves_node
from dualmesh.topology.communicators import Membership, loss_membership, memberships
from dualmesh.topology.layout import divisors
from dualmesh.topology.parallel_spec import BASE_AXES
from dualmesh.topology.resolve import positive
from dualmesh.topology.topology import Axis, Topology

SUMMARY = "communicators of a rank, bytes of a training step, sizes that fit a world"
FLAGS = (
    WORLD,
    NODES,
    Flag("rank", "integer", "whose communicators; else the first rank's"),
    Flag("axes", "string", "instead of sizes: rank all splits of the world over these axes, comma separated"),
    Flag("parameters", "float", "parameters of the model, for example 7e9", 7e9),
    Flag("sequence", "integer", "tokens of one sample", 4096),
    Flag("batch", "integer", "samples per step and data index; with --axes, per step and rank on average", 1),
    Flag("global_batch", "integer", "with --axes: samples per step of all ranks, the same for every split", 0),
    Flag("layers", "integer", "transformer blocks; else from the parameters", 0),
    Flag("hidden_size", "integer", "width of the model; else from the parameters", 0),
    Flag("element_bytes", "integer", "bytes of one value on its way", 2),
    Flag("expert_parameters", "float", "how many of the parameters are experts'", 0.0),
    Flag("experts_per_token", "integer", "experts that each token visits", 1),
)
_BEST = 20


def plan(values: Any, arguments: Sequence[str]) -> Report:
    """Answer `dualmesh plan`. *Local.*"""
    names = ("parameters", "sequence", "batch", "layers", "hidden_size", "element_bytes")
    model = Model(
        **{name: values[name].value for name in (*names, "expert_parameters", "experts_per_token")},
    )
    if values["axes"].value is not None:
        return _fitting(values, model)
    selection = select_states(values)
    layers, hidden = model.shape
    assumed = f"{model.parameters:.3g} parameters, {layers} layers, hidden size {hidden}"
    tokens = f"{model.batch} x {model.sequence} tokens per data index, {model.element_bytes} bytes a value"
    rank = chosen_rank(selection, values["rank"].value, "plan")
    data: dict[str, Any] = {}
    parts: list[str | Table] = [f"Model: {assumed}; {tokens}."]
    for name, topology in selection.topologies.items():
        held = bytes_held(topology, model)
        data[name] = {
            "spec": text_of(topology),
            "bytes_held": round(held),
            "communicators": _communicators(topology, _rank_in(topology, rank)),
            "step": _step(topology, model, selection.gpus_per_node),
        }
        parts += _parts(name, topology, data[name], _rank_in(topology, rank))
    model_data = {"parameters": model.parameters, "layers": layers, "hidden_size": hidden}
    common = {"world_size": selection.world_size, "gpus_per_node": selection.gpus_per_node, "model": model_data}
    return Report({**common, "states": data}, parts)


def _rank_in(topology: Topology, rank: int | None) -> int:
    """Return the rank named, or the first of a state that does not have it."""
    return rank if rank is not None and topology.has_rank(rank) else topology.members[0]


def _communicators(topology: Topology, rank: int) -> list[dict[str, Any]]:
    used: dict[Membership, list[str]] = {}
    for axis, found in memberships(topology, rank).items():
        used.setdefault(found, []).append(axis if isinstance(axis, str) else " x ".join(axis))
    loss = loss_membership(topology, rank)
    if loss is not None:
        used.setdefault(loss, []).append("token_mean")
    return [
        {"size": len(found.ranks), "lane": found.lane, "axes": axes, "first_ranks": list(found.ranks[:4])}
        for found, axes in used.items()
    ]


def _step(topology: Topology, model: Model, per_node: int) -> list[dict[str, Any]]:
    return [
        {
            "axis": axis if isinstance(axis, str) else list(axis),
            "size": topology.size(axis),
            "work": work,
            "collectives": count,
            "bytes_sent": sent,
            "crosses_nodes": _crosses(topology, axis, per_node),
        }
        for axis, work, count, sent in traffic(topology, model)
    ]


def _crosses(topology: Topology, axis: Axis, per_node: int) -> bool:
    members = topology.members
    return leaves_node(topology.layout(axis), len(members), per_node, members[0])


def _parts(name: str, topology: Topology, found: dict[str, Any], rank: int) -> Iterator[str | Table]:
    yield f"\n{heading(name, topology)}"
    yield f"Weights, gradients and Adam's state: {_bytes(found['bytes_held'])} on each rank, 16 bytes a parameter."
    rows = [
        (str(one["size"]), one["lane"], ", ".join(one["axes"]), " ".join(map(str, one["first_ranks"])))
        for one in found["communicators"]
    ]
    own = sum(one["size"] > 1 for one in found["communicators"])
    title = f"communicators of rank {rank}: {own} of more than one rank"
    yield Table(("ranks", "lane", "for", "first"), rows, title)
    step = [
        (
            one["axis"] if isinstance(one["axis"], str) else " x ".join(one["axis"]),
            str(one["size"]),
            one["work"],
            str(one["collectives"]),
            _bytes(one["bytes_sent"]),
            "cross" if one["crosses_nodes"] else "inside",
        )
        for one in found["step"]
    ]
    yield Table(("axis", "size", "work", "per step", "sent by a rank", "nodes"), step, "a training step")


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


# -- sizes that fit ----------------------------------------------------------------------------------------------------


def _fitting(values: Any, model: Model) -> Report:
    """Rank all splits of a world over some axes, at one global batch, by what leaves a node, then by what does not."""
    world = values["world_size"].value
    if world is None:
        raise ArgumentError("dualmesh plan: --axes needs --world-size.")
    positive("dualmesh plan", "world_size", world)
    given = values["gpus_per_node"].value
    per_node = positive("dualmesh plan", "gpus_per_node", GPUS_PER_NODE if given is None else given)
    axes = [axis.strip() for axis in values["axes"].value.split(",")]
    unknown = [axis for axis in axes if axis not in BASE_AXES]
    if unknown or len(set(axes)) < len(axes):
        hint = did_you_mean(unknown[0], BASE_AXES) if unknown else ""
        raise SpecError(f"dualmesh plan: --axes={listed(axes)}. Name different ones of {listed(BASE_AXES)}.{hint}")
    samples = positive("dualmesh plan", "global_batch", values["global_batch"].value or model.batch * world)
    topologies = [_topology_of(dict(zip(axes, sizes, strict=True)), world) for sizes in _splits(world, len(axes))]
    fit = [topology for topology in topologies if samples % data_size(topology) == 0]
    found = sorted((_score(topology, axes, per_node, model, samples) for topology in fit), key=_order)
    if not found:
        sizes = listed(sorted({data_size(topology) for topology in topologies}))
        raise ArgumentError(
            f"dualmesh plan: --global-batch={samples} is a multiple of the data size of no split. Data sizes: {sizes}.",
            global_batch=samples,
        )
    rows = [
        (
            *(str(one["sizes"][axis]) for axis in axes),
            str(one["batch"]),
            _bytes(one["across"]),
            _bytes(one["inside"]),
            _bytes(one["held"]),
        )
        for one in found[:_BEST]
    ]
    heads = (*axes, "samples each", "sent across nodes", "sent inside", "held")
    best = f", the best {_BEST} of them (--json: all)" if len(found) > _BEST else ""
    tokens = samples * model.sequence
    title = (
        f"{len(found)} splits of {world} ranks{best}; what a rank sends in a step of {samples} samples "
        f"({tokens} tokens) of all ranks, in one forward and backward, least across nodes first"
    )
    left_out = len(topologies) - len(found)
    note = f"\n{left_out} more splits are left out: their data size does not divide {samples} samples."
    data = {"world_size": world, "gpus_per_node": per_node, "global_batch": samples, "tokens_per_step": tokens}
    return Report({**data, "splits": found}, [Table(heads, rows, title), *([note] if left_out else [])])


def _topology_of(named: dict[str, int], world: int) -> Topology:
    return StateConfig.of(named).topology_spec().resolve(world)


def _splits(world: int, count: int) -> Iterator[tuple[int, ...]]:
    if count == 1:
        yield (world,)
        return
    for size in divisors(world):
        for rest in _splits(world // size, count - 1):
            yield (size, *rest)


def _score(topology: Topology, axes: Sequence[str], per_node: int, model: Model, samples: int) -> dict[str, Any]:
    each = samples // data_size(topology)
    steps = traffic(topology, replace(model, batch=each))
    sent = [(_crosses(topology, one.axis, per_node), one.sent) for one in steps]
    across, inside = (sum(bytes_ for crosses, bytes_ in sent if crosses is which) for which in (True, False))
    sizes = {axis: topology.size(axis) for axis in axes}
    held = round(bytes_held(topology, model))
    return {"sizes": sizes, "batch": each, "across": across, "inside": inside, "held": held}


def _order(one: dict[str, Any]) -> tuple[int, int]:
    return one["across"], one["inside"]
