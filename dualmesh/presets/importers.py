"""Other projects' own settings, as plain dicts, to specs; what cannot be expressed is refused by name.

The specs are those of `specs`. A setting is read, known to change no rank, or refused: unknown names are errors.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from dualmesh._support.plain_data import settings_of
from dualmesh.errors import listed
from dualmesh.presets import specs
from dualmesh.presets.setting_names import (
    ACCELERATE,
    DEEPSPEED,
    DEEPSPEED_SECTIONS,
    MAXTEXT,
    MAXTEXT_AXES,
    MAXTEXT_BATCH,
    MAXTEXT_KEYS,
    MAXTEXT_LENGTH,
    MEGATRON,
    MEGATRON_REFUSED,
    TORCHTITAN,
)
from dualmesh.presets.settings import Settings
from dualmesh.topology.resolve import positive, whole
from dualmesh.topology.spec import TopologySpec, View

__all__ = ["accelerate", "deepspeed", "maxtext", "megatron", "torchtitan"]


def torchtitan(parallelism: Mapping[str, Any]) -> TopologySpec:
    """Read torchtitan's parallelism section (or a whole config that has one). *Pure.*

    Raises:
        SpecError: Unknown settings, sizes that are none, or an expert tensor parallel degree that is neither 1 nor the
            dense one; all problems at once.

    >>> torchtitan({"data_parallel_shard_degree": -1, "tensor_parallel_degree": 2}).resolve(8).size("fsdp")
    4
    """
    section = parallelism.get("parallelism") if isinstance(parallelism, Mapping) else None
    read = Settings("importers.torchtitan", section if isinstance(section, Mapping) else parallelism, TORCHTITAN)
    sizes = {
        "dp_replicate": read.size("data_parallel_replicate_degree"),
        "dp_shard": read.size("data_parallel_shard_degree", inferred=True),
        "cp": read.size("context_parallel_degree"),
        "tp": read.size("tensor_parallel_degree"),
        "pp": read.size("pipeline_parallel_degree"),
        "ep": read.size("expert_parallel_degree"),
    }
    expert_tp = read.size("expert_tensor_parallel_degree")
    if expert_tp not in (1, sizes["tp"]):
        read.problems.append(
            f"expert_tensor_parallel_degree={expert_tp} must be 1 or tensor_parallel_degree={sizes['tp']}."
        )
    read.refuse()
    spec = specs.torchtitan(**sizes)
    if expert_tp == 1:
        return spec
    outside = View(("dp_shard", "cp"), spec.views["sparse"].axes, spec.views["sparse"].roles)
    return TopologySpec(spec.axes, spec.combined, {"sparse": outside}, spec.roles)


def megatron(settings: Mapping[str, Any]) -> TopologySpec:
    """Read Megatron's command-line names, or the arguments of `initialize_model_parallel`. *Pure.*

    Names may be written as options ("--tensor-model-parallel-size") and numbers as text. The spec has the dense and the
    expert grid (`presets.megatron` with etp); groups that are no axes are in `presets.megatron_rank_groups`.
    `hierarchical_context_parallel_sizes` becomes the view "cp_levels" with the axes cp_level_0 (innermost), ...

    Raises:
        SpecError: Unknown settings, sizes that are none, or settings that move ranks in a way that is not known here;
            all problems at once.

    >>> megatron({"--tensor-model-parallel-size": "2", "expert_model_parallel_size": 4}).resolve(8).size("expert_dp")
    1
    """
    where = "importers.megatron"
    plain = {_option(key): value for key, value in settings_of(where, settings)}
    read = Settings(where, plain, MEGATRON)
    for key, (harmless, reason) in MEGATRON_REFUSED.items():
        if read.get(key) not in harmless:
            read.problems.append(f"{key}={read.get(key)!r} cannot be expressed: {reason}")
    if read.get("sharp_enabled_group") is not None and not read.get("use_sharp"):
        read.problems.append(f"sharp_enabled_group={read.get('sharp_enabled_group')!r} needs use_sharp.")
    tp = read.size("tensor_model_parallel_size")
    sizes = {
        "cp": read.size("context_parallel_size"),
        "ep": read.size("expert_model_parallel_size"),
        "dp": read.size("data_parallel_size", inferred=True),
        "pp": read.size("pipeline_model_parallel_size"),
        "optimizer_instances": read.size("num_distributed_optimizer_instances"),
        "etp": tp if read.get("expert_tensor_parallel_size") is None else read.size("expert_tensor_parallel_size"),
    }
    levels = _levels(read, sizes["cp"])
    read.refuse()
    order = read.get("order") or ("tp-cp-ep-pp-dp" if read.get("use_tp_pp_dp_mapping") else specs.MEGATRON_ORDER)
    spec = specs.megatron(tp=tp, order=order, rank_offset=read.get("rank_offset"), **sizes)
    if not levels:
        return spec
    axes = {f"cp_level_{level}": size for level, size in reversed(list(enumerate(levels)))}
    views = {**spec.views, "cp_levels": View("cp", axes)}
    return TopologySpec(spec.axes, spec.combined, views, spec.roles, rank_offset=spec.rank_offset)


def _option(key: Any) -> Any:
    return key.lstrip("-").replace("-", "_") if isinstance(key, str) else key


def _levels(read: Settings, cp: int) -> list[int]:
    """Return the sizes of the levels of context parallelism, innermost first; none where it has one level."""
    given = read.get("hierarchical_context_parallel_sizes")
    if given is None:
        return []
    levels = [whole(size) or 0 for size in given] if isinstance(given, Sequence) and not isinstance(given, str) else []
    if not levels or min(levels) < 1 or prod(levels) != cp:
        read.problems.append(
            f"hierarchical_context_parallel_sizes={given!r} must be sizes that multiply to context_parallel_size={cp}."
        )
    return levels


def accelerate(settings: Mapping[str, Any]) -> TopologySpec:
    """Read Accelerate's ParallelismConfig; names may have the prefix that `accelerate config` writes. *Pure.*

    Raises:
        SpecError: Unknown settings or sizes that are none; all problems at once.

    >>> accelerate({"dp_shard_size": 4, "parallelism_config_tp_size": 2}).resolve(8).base_axes
    ('dp_replicate', 'dp_shard', 'cp', 'sp', 'tp')
    """
    where = "importers.accelerate"
    given = dict(settings_of(where, settings))
    section = given.get("parallelism_config")
    given = dict(section) if isinstance(section, Mapping) else given
    read = Settings(where, {_bare(key): value for key, value in given.items()}, ACCELERATE)
    names = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
    sizes = {name: read.size(f"{name}_size") for name in names}
    read.refuse()
    return specs.accelerate(**sizes)


def _bare(key: Any) -> Any:
    prefix = "parallelism_config_"
    return key.lower().removeprefix(prefix) if isinstance(key, str) and key.lower().startswith(prefix) else key


def maxtext(settings: Mapping[str, Any], *, num_slices: int | None = None) -> TopologySpec:
    """Read MaxText's ici_* and dcn_* sizes. *Pure.*

    Every axis of MaxText's mesh exists; one that spans slices is dcn_NAME (outside all ici axes) and ici_NAME, with
    NAME as their combination. Ranks are slice by slice, row-major inside one: devices without a physical reordering.
    Tokens differ along each axis over which MaxText's default rules lay a batch or a sequence, stages too, and
    gradients are summed over all of them. No axis has the role "stages": MaxText's one of that name carries tokens of
    embeddings and logits, and which layers it holds is in the layout of their arrays.

    Args:
        settings: ici_*_parallelism, dcn_*_parallelism and, for another order, mesh_axes.
        num_slices: Slices in the world, to which the dcn sizes multiply; None: what the settings say, or 1.

    Raises:
        SpecError: Unknown settings, sizes that are none, or dcn sizes that do not fit the slices; all at once.

    >>> spec = maxtext({"ici_tensor_parallelism": 2, "ici_fsdp_parallelism": -1}, num_slices=2)
    >>> spec.resolve(16).partition("data").tolist()[:2]
    [[0, 8], [1, 9]]
    """
    read = Settings("importers.maxtext", settings, MAXTEXT)
    given = read.get("num_slices") if num_slices is None else num_slices
    slices = 1 if given in (None, -1) else positive("importers.maxtext", "num_slices", given)
    order = _mesh_axes(read)
    inside = {name: read.size(f"ici_{MAXTEXT_KEYS[name]}_parallelism", inferred=True) for name in order}
    across = {name: read.size(f"dcn_{MAXTEXT_KEYS[name]}_parallelism", inferred=True) for name in order}
    across = _fill_dcn(read, across, slices)
    for name in (name for name in MAXTEXT_AXES if name not in order):
        for kind in ("ici", "dcn"):
            key = f"{kind}_{MAXTEXT_KEYS[name]}_parallelism"
            size = read.size(key, inferred=True)
            if size > 1 or (size == -1 and key in settings):
                read.problems.append(
                    f"{key}={size}, but {name!r} is not among mesh_axes: {listed(order)}. Add it there, or leave the "
                    f"size out."
                )
    read.refuse()
    spanning = [name for name in order if across[name] > 1]
    axes = {f"dcn_{name}": across[name] for name in spanning}
    axes |= {f"ici_{name}" if name in spanning else name: inside[name] for name in order}
    loss = (*MAXTEXT_BATCH, *MAXTEXT_LENGTH)
    roles = {
        "data": MAXTEXT_BATCH,
        "params": tuple(name for name in loss if name != "data"),
        "loss": loss,
        "sequence": MAXTEXT_LENGTH,
        "replicate": ("data",),
    }
    return TopologySpec(
        axes,
        {name: (f"dcn_{name}", f"ici_{name}") for name in spanning},
        roles={part: tuple(name for name in order if name in members) for part, members in roles.items()},
    )


def _mesh_axes(read: Settings) -> tuple[str, ...]:
    given = read.get("mesh_axes")
    order = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else ()
    unknown = [name for name in order if not isinstance(name, str) or name not in MAXTEXT_KEYS]
    if unknown or not order or len(set(order)) < len(order):
        read.problems.append(f"mesh_axes={given!r}. It must list different axes of {listed(MAXTEXT_KEYS)}.")
        return MAXTEXT_AXES
    return order


def _fill_dcn(read: Settings, across: dict[str, int], slices: int) -> dict[str, int]:
    """Fill in -1 so that the dcn sizes multiply to the slices."""
    known = prod(size for size in across.values() if size != -1)
    missing = [name for name, size in across.items() if size == -1]
    if len(missing) > 1 or slices % known or (not missing and known != slices):
        sizes = listed(f"dcn {name}={size}" for name, size in across.items() if size != 1)
        read.problems.append(f"{sizes} must multiply to num_slices={slices}, with at most one -1.")
        return across
    return {name: slices // known if size == -1 else size for name, size in across.items()}


def deepspeed(config: Mapping[str, Any], *, pp: int = 1, ep: int = 1) -> TopologySpec:
    """Read a DeepSpeed config: data, sequence and tensor parallel sizes, MiCS and hpZ partitions, experts. *Pure.*

    Base axes: pp, dp (or dp_replicate, dp_shard with MiCS), sp, tp. View "expert" over the data-parallel ranks: edp,
    ep (ep, edp with use_data_before_expert_parallelism); view "hpz" likewise: hpz_outer, hpz. Combined: ep_replicate
    (sp), the copies of experts. Sizes that DeepSpeed takes in code rather than in the config are arguments.

    Args:
        pp: Pipeline stages of the PipelineModule; pipeline.stages says the same.
        ep: `ep_size` of the MoE layers.

    Raises:
        SpecError: Unknown settings, or sizes that are none or contradict each other; all problems at once.

    >>> config = {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 2}}
    >>> deepspeed(config, ep=4).resolve(16).partition("ep").tolist()[:2]
    [[0, 2, 4, 6], [1, 3, 5, 7]]
    """
    where = "importers.deepspeed"
    read = Settings(where, config, DEEPSPEED)
    parts = {name: _section(read, name, known) for name, known in DEEPSPEED_SECTIONS.items()}
    zero, tensor, expert = (parts[name] for name in ("zero_optimization", "tensor_parallel", "expert_parallel"))
    dp, sp, tp = read.size("data_parallel_size", inferred=True), read.size("sequence_parallel_size"), _tp(tensor)
    stages = _agree(read, "pipeline.stages", parts["pipeline"].get("stages"), "pp", pp)
    experts = expert.size("autoep_size") if expert.get("enabled") else 1
    experts = _agree(read, "expert_parallel.autoep_size", experts, "ep", ep)
    mics, hpz = zero.size("mics_shard_size", inferred=True), zero.size("zero_hpz_partition_size")
    if mics != -1 and hpz > 1:
        read.problems.append(f"mics_shard_size={mics} and zero_hpz_partition_size={hpz} exclude each other.")
    for name, part in parts.items():
        read.problems += [f"{name}: {problem}" for problem in part.problems]
    read.refuse()
    replicas = {"dp": dp} if mics == -1 else {"dp_replicate": -1 if dp == -1 else max(dp // mics, 1), "dp_shard": mics}
    data = tuple(replicas)
    pair = {"edp": -1, "ep": experts}
    if read.get("use_data_before_expert_parallelism"):
        pair = {"ep": experts, "edp": -1}
    views = {"expert": View(data, pair, {"experts": "ep", "params": "edp", "replicate": "ep_replicate"})}
    if hpz > 1:
        views["hpz"] = View(data, {"hpz_outer": -1, "hpz": hpz})
    roles: dict[str, tuple[str, ...]] = {"data": data, "loss": (*data, "sp"), "sequence": ("sp",), "stages": ("pp",)}
    if mics != -1 or whole(zero.get("stage")) == 3:
        roles["params"] = (data[-1], "sp")
    if mics != -1:
        roles["replicate"] = data[:1]
    # Experts have copies along sp. Hooks that sum their gradients need a communicator beside the one of attention.
    combined = {"ep_replicate": ("sp",)} if mics == -1 else {"dp": data, "ep_replicate": ("sp",)}
    return TopologySpec({"pp": stages, **replicas, "sp": sp, "tp": tp}, combined, views, roles)


def _tp(tensor: Settings) -> int:
    inner = tensor.get("tp")
    size = tensor.size("autotp_size")
    named = inner.get("tp_size") if isinstance(inner, Mapping) else None
    if named not in (None, 1, size):
        tensor.problems.append(f"tp.tp_size={named!r}, but autotp_size={size}. Give one of them.")
    return size


def _agree(read: Settings, name: str, found: Any, argument: str, given: Any) -> int:
    """Return a size that the config and an argument may both give."""
    config, own = whole(found) or 1, whole(given) or 0
    if own < 1 or (1 not in (config, own) and config != own):
        read.problems.append(f"{name}={found!r}, but {argument}={given!r}. Give one positive size.")
    return max(config, own, 1)


def _section(read: Settings, name: str, known: Mapping[str, Any]) -> Settings:
    given = read.get(name)
    if not isinstance(given, Mapping):
        read.problems.append(f"{name} is {given!r}. It must be a mapping.")
        given = {}
    return Settings(f"{read.where}: {name}", given, known)
