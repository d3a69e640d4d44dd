"""Other projects' topologies as specs: their own axis names, combined axes, roles and exact rank order.

Their settings, as they write them, are read in `importers`; the usual axes of this library are in `parallel_spec`.
"""

from collections.abc import Sequence
from typing import Any

from dualmesh.errors import did_you_mean, listed
from dualmesh.topology.rank_groups import RankGroups
from dualmesh.topology.resolve import refuse, whole
from dualmesh.topology.spec import TopologySpec, View
from dualmesh.topology.topology import Topology

__all__ = ["accelerate", "megatron", "megatron_rank_groups", "nemo_rl", "torchtitan"]

MEGATRON_ORDER = "tp-cp-ep-dp-pp"
_MEGATRON_AXES = ("tp", "pp", "dp", "ep", "cp", "gtp_remat")
"""Megatron appends the axes that an order leaves out in this order."""


def torchtitan(
    *, dp_replicate: int = 1, dp_shard: int = -1, cp: int = 1, tp: int = 1, pp: int = 1, ep: int = 1
) -> TopologySpec:
    """Return torchtitan's dense and sparse meshes as one spec. *Pure.*

    Base axes: pp, dp_replicate, dp_shard, cp, tp. View "sparse" over dp_shard x cp x tp: efsdp, ep. Combined: batch
    and dp (dp_replicate, dp_shard), loss (dp_replicate, dp_shard, cp), fsdp (dp_shard, cp).

    Args:
        dp_shard: The only size that may be -1.
        ep: Divides dp_shard * cp * tp; takes tp first, then cp, then dp_shard.

    Raises:
        SpecError: A size is no size, all at once.

    >>> torchtitan(dp_shard=2, cp=2, tp=2, ep=4).resolve(8).partition("ep").tolist()
    [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    sizes = {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}
    refuse("presets.torchtitan", _size_problems({**sizes, "ep": ep}, inferred="dp_shard"))
    return TopologySpec(
        sizes,
        {
            "batch": ("dp_replicate", "dp_shard"),
            "dp": ("dp_replicate", "dp_shard"),
            "loss": ("dp_replicate", "dp_shard", "cp"),
            "fsdp": ("dp_shard", "cp"),
        },
        {"sparse": View(("dp_shard", "cp", "tp"), {"efsdp": -1, "ep": ep}, {"experts": "ep", "params": "efsdp"})},
        {
            "data": ("dp_replicate", "dp_shard"),
            "params": ("dp_shard", "cp"),
            "loss": ("dp_replicate", "dp_shard", "cp"),
            "sequence": ("cp",),
            "replicate": ("dp_replicate",),
            "stages": ("pp",),
        },
    )


def accelerate(*, dp_replicate: int = 1, dp_shard: int = 1, cp: int = 1, sp: int = 1, tp: int = 1) -> TopologySpec:
    """Return the mesh of Accelerate's ParallelismConfig as a spec. *Pure.*

    Base axes: dp_replicate, dp_shard, cp, sp, tp. Combined: dp (dp_replicate, dp_shard), and under Accelerate's names,
    which span both ways to split a sequence, dp_shard_cp (dp_shard, cp, sp) and dp_cp (dp_replicate, dp_shard, cp, sp).

    Args:
        dp_shard: May be -1, as may dp_replicate, but not both.

    >>> accelerate(dp_replicate=2, dp_shard=2, tp=2).resolve(8).partition("dp").tolist()
    [[0, 2, 4, 6], [1, 3, 5, 7]]
    """
    return TopologySpec(
        {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "sp": sp, "tp": tp},
        {
            "dp": ("dp_replicate", "dp_shard"),
            "dp_shard_cp": ("dp_shard", "cp", "sp"),
            "dp_cp": ("dp_replicate", "dp_shard", "cp", "sp"),
        },
        roles={
            "data": ("dp_replicate", "dp_shard"),
            "params": ("dp_shard", "cp", "sp"),
            "loss": ("dp_replicate", "dp_shard", "cp", "sp"),
            "sequence": ("cp", "sp"),
            "replicate": ("dp_replicate",),
        },
    )


def nemo_rl(*, dp: int = -1, cp: int = 1, tp: int = 1, pp: int = 1) -> TopologySpec:
    """Return NeMo-RL's policy mesh as a spec: pp, dp, cp, tp, and dp_cp (dp, cp). *Pure.*

    >>> nemo_rl(cp=2, tp=2).resolve(8).partition("dp_cp").tolist()
    [[0, 2, 4, 6], [1, 3, 5, 7]]
    """
    return TopologySpec(
        {"pp": pp, "dp": dp, "cp": cp, "tp": tp},
        {"dp_cp": ("dp", "cp")},
        roles={
            "data": ("dp",),
            "params": ("dp", "cp"),
            "loss": ("dp", "cp"),
            "sequence": ("cp",),
            "stages": ("pp",),
        },
    )


def megatron(
    *,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    dp: int = -1,
    pp: int = 1,
    etp: int | None = None,
    optimizer_instances: int = 1,
    gtp_remat: int = 1,
    order: str = MEGATRON_ORDER,
    rank_offset: int = 0,
) -> TopologySpec:
    """Return Megatron-Core's ranks as a spec, the leftmost axis of the order fastest. *Pure.*

    Without `etp` this is one grid, as one `RankGenerator` has it: tp, cp, ep, dp, pp multiply to the world, and `dp`
    counts what is left beside ep. With `etp` it is what `initialize_model_parallel` sets up: the dense grid of tp, cp,
    dp, pp, in which `dp` includes the experts' ranks, and the experts' grid over the same ranks of each pipeline stage
    as a view: expert_dp, ep, expert_tp. Combined axes have Megatron's group names: dp_cp, tp_cp, tp_dp, tp_dp_cp, mp,
    and with `etp` expert_tp_ep, expert_tp_ep_pp, intra_dist_opt (the ranks of one optimizer instance). Embedding groups
    are no axes: `megatron_rank_groups`.

    Args:
        dp: The only size that may be -1.
        etp: Tensor parallel size of the experts; Megatron's own default is tp.
        optimizer_instances: Instances of the distributed optimizer, with `etp` only. Several add the axes
            intra_partial_dp_cp, intra_partial_expert_dp (ranks of one instance) and inter_partial_* (one of each).
        gtp_remat: Size of the axis gtp_remat, in one grid only.
        order: Axes joined by "-", fastest first; axes of size 1 may be left out.
        rank_offset: The first rank.

    Raises:
        SpecError: Sizes or order are not allowed, all problems at once.

    >>> megatron(tp=2, cp=2, pp=2).resolve(16).partition("dp").tolist()[:4]
    [[0, 4], [1, 5], [2, 6], [3, 7]]
    >>> megatron(ep=2, pp=2, etp=1).resolve(16).partition("expert_dp").tolist()[:2]
    [[0, 2, 4, 6], [1, 3, 5, 7]]
    """
    sizes = {"tp": tp, "pp": pp, "dp": dp, "ep": ep, "cp": cp, "gtp_remat": gtp_remat}
    checked: dict[str, Any] = {**sizes, "optimizer_instances": optimizer_instances}
    checked |= {} if etp is None else {"etp": etp}
    tokens, problems = _megatron_order(order, sizes)
    problems += _size_problems(checked, inferred="dp")
    if etp is None and not problems and ep > 1 and cp > 1:
        problems.append(
            f"ep={ep} and cp={cp} are no axes of one grid: experts have no cp. Give etp (Megatron's default is tp) for "
            f"a dense and an expert grid."
        )
    if etp is not None and whole(gtp_remat) != 1:
        problems.append(f"gtp_remat={gtp_remat!r} beside etp is not known. Leave etp out.")
    if etp is None and whole(optimizer_instances) != 1:
        problems.append(f"optimizer_instances={optimizer_instances!r} needs etp (Megatron's default is tp).")
    refuse("presets.megatron", problems, order=order)
    if etp is None:
        return _megatron_grid(tokens, sizes, rank_offset)
    return _megatron_grids(tokens, sizes, etp, optimizer_instances, rank_offset)


def megatron_rank_groups(topology: Topology) -> dict[str, RankGroups]:
    """Return Megatron's groups that are no axes, of a topology of the preset `megatron`. *Pure*, O(world).

    `embd`: first and last stage of each pipeline; `pos_embd`: the first.

    >>> megatron_rank_groups(megatron(tp=2, pp=3).resolve(6))["embd"].partition()
    [(0, 4), (1, 5)]
    """
    pipelines = topology.partition("pp").tolist()
    return {
        "embd": RankGroups(tuple(dict.fromkeys((stages[0], stages[-1]))) for stages in pipelines),
        "pos_embd": RankGroups(stages[:1] for stages in pipelines),
    }


def _megatron_grid(tokens: Sequence[str], sizes: dict[str, int], rank_offset: int) -> TopologySpec:
    axes = [name for name in reversed(tokens) if name != "gtp_remat" or sizes[name] != 1]
    data = _in_order(axes, "dp", "ep")
    return TopologySpec(
        {name: sizes[name] for name in axes},
        _megatron_combined(axes),
        roles={
            "data": data,
            "params": _in_order(axes, "dp", "ep", "cp"),
            "loss": _in_order(axes, "dp", "ep", "cp"),
            "sequence": ("cp",),
            "stages": ("pp",),
        },
        rank_offset=rank_offset,
    )


def _megatron_grids(
    tokens: Sequence[str], sizes: dict[str, int], etp: int, instances: int, rank_offset: int
) -> TopologySpec:
    dense = [name for name in reversed(tokens) if name in ("tp", "cp", "dp", "pp")]
    expert_names = {"tp": "expert_tp", "ep": "ep", "dp": "expert_dp", "pp": "pp"}
    experts = [expert_names[name] for name in reversed(tokens) if name in expert_names]
    expert_sizes = {"expert_tp": etp, "ep": sizes["ep"], "expert_dp": -1}
    combined = _megatron_combined(dense)
    combined["expert_tp_ep"] = _in_order(experts, "expert_tp", "ep")
    combined["expert_tp_ep_pp"] = _in_order(experts, "expert_tp", "ep", "pp")
    # Pipelines must be the same for dense layers and experts, so the experts' axes inside pp are a factorisation of the
    # dense axes inside pp, and those outside of those outside.
    views = {}
    for name, over, axes in zip(
        ("expert", "expert_outer"), _parts(dense, sizes["pp"]), _parts(experts, sizes["pp"]), strict=True
    ):
        if axes:
            parts = {part: axis for part, axis in (("experts", "ep"), ("params", "expert_dp")) if axis in axes}
            views[name] = View(over, {axis: expert_sizes[axis] for axis in axes}, parts)
    share = "expert_dp"
    if instances > 1:
        for name, whole_axes in (("dp_cp", combined["dp_cp"]), (share, (share,))):
            inter, intra = f"inter_partial_{name}", f"intra_partial_{name}"
            roles = {"params": intra, "replicate": inter} if name == share else {}
            views[f"partial_{name}"] = View(whole_axes, {inter: instances, intra: -1}, roles)
        share = "intra_partial_expert_dp"
    combined["intra_dist_opt"] = (share, *combined["expert_tp_ep_pp"])
    return TopologySpec(
        {name: sizes[name] for name in dense},
        combined,
        views,
        {
            "data": ("dp",),
            "params": _in_order(dense, "dp", "cp"),
            "loss": _in_order(dense, "dp", "cp"),
            "sequence": ("cp",),
            "stages": ("pp",),
        },
        rank_offset=rank_offset,
    )


def _parts(axes: Sequence[str], pipelines: int) -> tuple[list[str], list[str]]:
    """Return the axes inside pp and those outside, outermost first; all are inside where there is one stage."""
    cut = axes.index("pp")
    if pipelines == 1:
        return [axis for axis in axes if axis != "pp"], []
    return list(axes[cut + 1 :]), list(axes[:cut])


def _megatron_combined(axes: Sequence[str]) -> dict[str, tuple[str, ...]]:
    names = {
        "dp_cp": ("dp", "cp"),
        "tp_cp": ("tp", "cp"),
        "tp_dp": ("tp", "dp"),
        "tp_dp_cp": ("tp", "dp", "cp"),
        "mp": ("tp", "pp"),
    }
    return {name: _in_order(axes, *members) for name, members in names.items()}


def _in_order(axes: Sequence[str], *members: str) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis in members)


def _megatron_order(order: Any, sizes: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the axes, fastest first, and what is wrong with the order."""
    if not isinstance(order, str) or not order:
        return [], [f"order is {order!r}. Give axes joined by '-', fastest first, for example {MEGATRON_ORDER!r}."]
    tokens = order.lower().split("-")
    problems = [
        f"order {order!r} names {name!r}. Axes: {listed(_MEGATRON_AXES)}.{did_you_mean(name, _MEGATRON_AXES)}"
        for name in dict.fromkeys(tokens)
        if name not in _MEGATRON_AXES
    ]
    problems += [
        f"order {order!r} names {name!r} twice. Name each axis once."
        for name in dict.fromkeys(tokens)
        if tokens.count(name) > 1
    ]
    problems += [
        f"order {order!r} leaves out {name!r}, whose size is {size!r}. Only axes of size 1 may be left out."
        for name, size in sizes.items()
        if name not in tokens and whole(size) != 1
    ]
    return [*tokens, *(name for name in _MEGATRON_AXES if name not in tokens)], problems


def _size_problems(sizes: dict[str, Any], inferred: str) -> list[str]:
    return [
        f"{name}={size!r} is no size. Sizes are positive integers; only {inferred} may be -1, to infer it."
        for name, size in sizes.items()
        if not ((whole(size) or 0) >= 1 or (name == inferred and whole(size) == -1))
    ]
