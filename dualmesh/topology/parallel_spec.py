"""The usual axes of a trainer, and the specs that its sizes mean.

Axes of one's own need nothing from here: declare them with `TopologySpec`.
"""

from collections.abc import Sequence

from dualmesh._support.checks import check_flag, check_items, check_strings, refuse_unknown_keywords
from dualmesh.errors import counted
from dualmesh.topology.resolve import refuse, whole
from dualmesh.topology.spec import TopologySpec, View

ULYSSES = "ulysses"
BASE_AXES = ("pp", "dp_replicate", "dp_shard", ULYSSES, "cp", "tp")
COMBINED_AXES = {
    "dp": ("dp_replicate", "dp_shard"),
    "sp": ("ulysses", "cp"),
    "dp_shard_sp": ("dp_shard", "ulysses", "cp"),
    "dp_sp": ("dp_replicate", "dp_shard", "ulysses", "cp"),
}
ROLES = {
    "data": ("dp_replicate", "dp_shard"),
    "params": ("dp_shard", "ulysses", "cp"),
    "loss": ("dp_replicate", "dp_shard", "ulysses", "cp"),
    "sequence": ("ulysses", "cp"),
    "replicate": ("dp_replicate",),
    "stages": ("pp",),
}


@refuse_unknown_keywords()
def parallel_spec(
    dp_size: int | None = None,
    dp_replicate_size: int = 1,
    dp_shard_size: int = 1,
    tp_size: int = 1,
    pp_size: int = 1,
    cp_size: int = 1,
    ulysses_size: int = 1,
    *,
    extra_parallel_sizes: Sequence[int] = (1,),
    extra_parallel_names: Sequence[str] = ("ep",),
    extra_parallel_outermost: Sequence[bool] | None = None,
    ep_size: int | None = None,
    ep_over: Sequence[str] | None = None,
) -> TopologySpec:
    """Write the spec of the usual axes. *Pure.*

    Base axes, outermost first: pp, dp_replicate, dp_shard, ulysses, cp, tp. Combined: dp, sp, dp_shard_sp, dp_sp.
    Each extra parallel NAME of size > 1 adds a view over dp_shard x ulysses x cp with the axes NAME_fsdp and NAME.

    Args:
        dp_size: dp_replicate_size * dp_shard_size; alone it means dp_shard_size.
        dp_replicate_size: Replicas of the sharded parameters.
        dp_shard_size: Data-parallel ranks that share the parameters; -1 is inferred from the world.
        tp_size: Tensor parallel.
        pp_size: Pipeline stages.
        cp_size: Context (ring) parallel.
        ulysses_size: Ulysses sequence parallel.
        extra_parallel_sizes: One size per extra parallel.
        extra_parallel_names: One name per extra parallel.
        extra_parallel_outermost: Per extra parallel: NAME outside NAME_fsdp instead of innermost.
        ep_size: Short for the size of the extra parallel "ep".
        ep_over: The axes that the extra parallels span, instead of dp_shard, ulysses, cp.

    Raises:
        SpecError: A size is none, dp_size disagrees with the other two, or the extra parallels' lists do not match;
            the message lists every problem.

    >>> parallel_spec(dp_shard_size=4, ulysses_size=2).resolve(8).partition("sp").tolist()
    [[0, 1], [2, 3], [4, 5], [6, 7]]
    """
    given = {
        "dp_size": dp_size,
        "dp_replicate_size": dp_replicate_size,
        "dp_shard_size": dp_shard_size,
        "tp_size": tp_size,
        "pp_size": pp_size,
        "cp_size": cp_size,
        "ulysses_size": ulysses_size,
    }
    problems = [
        f"{name}={size!r} is no size. Sizes are positive integers, or one -1 to infer."
        for name, size in given.items()
        if not (_is_size(size) or (size is None and name == "dp_size"))
    ]
    replicate, shard = dp_replicate_size, dp_shard_size
    if not problems:
        replicate, shard = _data_parallel(dp_size, dp_replicate_size, dp_shard_size, problems)
    extras = _extras(extra_parallel_names, extra_parallel_sizes, extra_parallel_outermost, ep_size, problems)
    refuse("parallel_spec", problems, **given)
    sizes = (pp_size, replicate, shard, ulysses_size, cp_size, tp_size)
    over = COMBINED_AXES["dp_shard_sp"] if ep_over is None else check_strings("parallel_spec", "ep_over", ep_over)
    views = {}
    combined: dict[str, tuple[str, ...]] = dict(COMBINED_AXES)
    for name, (size, outermost) in extras.items():
        if size == 1:
            continue
        axes = {name: size, f"{name}_fsdp": -1} if outermost else {f"{name}_fsdp": -1, name: size}
        replicas = f"{name}_replicate"
        views[name] = View(over, axes, {"experts": name, "params": f"{name}_fsdp", "replicate": replicas})
        combined[replicas] = ("dp_replicate",)
    return TopologySpec(dict(zip(BASE_AXES, sizes, strict=True)), combined, views, ROLES)


def _is_size(size: object) -> bool:
    number = whole(size)
    return number is not None and (number >= 1 or number == -1)


def _data_parallel(total: int | None, outer: int, inner: int, problems: list[str]) -> tuple[int, int]:
    """Return (dp_replicate, dp_shard) from the three sizes, of which the first may be left out."""
    if total is None:
        return outer, inner
    if outer == 1 and inner in (1, -1):
        return 1, total
    if total == -1 and inner == 1:
        return outer, -1
    divides = outer > 0 and total > 0 and total % outer == 0
    if inner == -1 and divides:
        return outer, total // outer
    if total != outer * inner or total == -1:
        fits = f" dp_shard_size={total // outer} would fit." if divides else ""
        problems.append(
            f"dp_size={total}, but dp_replicate_size={outer} * dp_shard_size={inner} is {outer * inner}. Leave dp_size "
            f"out, or make them agree.{fits}"
        )
    return outer, inner


def _extras(
    names: Sequence[str],
    sizes: Sequence[int],
    outermost: Sequence[bool] | None,
    ep_size: int | None,
    problems: list[str],
) -> dict[str, tuple[int, bool]]:
    """Return {name: (size, outermost)} of the extra parallels."""
    where = "parallel_spec"
    names = check_strings(where, "extra_parallel_names", names)
    sizes = check_items(where, "extra_parallel_sizes", sizes)
    given = (False,) * len(names) if outermost is None else check_items(where, "extra_parallel_outermost", outermost)
    flags = tuple(check_flag(where, "extra_parallel_outermost", flag) for flag in given)
    if not len(names) == len(sizes) == len(flags):
        problems.append(
            f"{counted(len(names), 'extra parallel name')} {names!r}, {counted(len(sizes), 'size')} {sizes!r}, "
            f"{counted(len(flags), 'placement')} {flags!r}. Give one size and one placement per name."
        )
    if len(set(names)) < len(names):
        problems.append(f"extra parallel names {names!r} repeat. Name each once.")
    extras = {name: (size, flag) for name, size, flag in zip(names, sizes, flags, strict=False)}
    if ep_size is not None:
        size, flag = extras.get("ep", (1, False))
        if size not in (1, ep_size):
            problems.append(f"ep_size={ep_size!r}, but extra_parallel_sizes gives ep={size!r}. Give one.")
        extras["ep"] = (ep_size, flag)
    problems += [
        f"extra parallel {name}={size!r} is no size. Sizes are positive integers."
        for name, (size, _) in extras.items()
        if (whole(size) or 0) < 1
    ]
    return extras
