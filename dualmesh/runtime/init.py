"""`init_parallel_state` and its kin: from arguments to a registered state.

The usual axes are written in `parallel_spec`, names are kept in `registry`, worlds are started in `session`.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from inspect import signature
from typing import Any, Literal

from dualmesh._support.checks import check_flag, check_items, check_strings, is_one_of, refuse_unknown_keywords
from dualmesh.backend.group_options import check_options
from dualmesh.backend.state import ParallelState
from dualmesh.backend.state_plan import StatePlan
from dualmesh.backend.veomni_attributes import named_views
from dualmesh.errors import ArgumentError, did_you_mean, listed
from dualmesh.runtime import environment, logs, scope
from dualmesh.runtime.fitting import AnySpec, fit_spec, places_of
from dualmesh.runtime.registry import registry
from dualmesh.runtime.session import Session, session_for
from dualmesh.topology.group_topology import GroupSpec
from dualmesh.topology.parallel_spec import parallel_spec
from dualmesh.topology.rank_groups import RankGroups

DP_MODES = ("fsdp2", "fsdp1", "ddp")
INCLUDE_SP = (
    "init_parallel_state: include_sp_in_fsdp=False is not supported: parameters are always sharded over the sequence "
    "axes too (dp_shard_sp). Leave the argument out, or declare axes of your own with spec=dm.TopologySpec(...)."
)


@refuse_unknown_keywords()
def init_parallel_state(
    dp_size: int | None = None,
    dp_replicate_size: int = 1,
    dp_shard_size: int = 1,
    tp_size: int = 1,
    pp_size: int = 1,
    cp_size: int = 1,
    ulysses_size: int = 1,
    dp_mode: Literal["fsdp2", "fsdp1", "ddp"] = "fsdp2",
    device_type: str | None = None,
    include_sp_in_fsdp: bool = True,
    extra_parallel_sizes: Sequence[int] = (1,),
    extra_parallel_placement_innermost: Sequence[bool] = (False,),
    extra_parallel_names: Sequence[str] = ("ep",),
    async_enabled: bool = False,
    name: str | None = "base",
    *,
    spec: AnySpec | RankGroups | None = None,
    ep_size: int | None = None,
    ep_over: Sequence[str] | None = None,
    extra_parallel_outermost: Sequence[bool] | None = None,
    backend: str | None = None,
    ranks: Iterable[int] | None = None,
    own_groups: bool = False,
    group_options: Mapping[str, Any] | None = None,
) -> ParallelState:
    """Register a named state; the first one becomes the process-wide default. *Collective over the state's ranks.*

    Sizes are as in `parallel_spec`. An equal state under another name is the same state and creates nothing. A taken
    name warns and returns the registered state (an error in strict mode when the settings differ).

    Args:
        dp_mode: "fsdp2", "fsdp1" or "ddp"; kept for the trainer, changes no layout.
        device_type: "cpu", "cuda", ...; None: the world's.
        include_sp_in_fsdp: Must be True.
        extra_parallel_placement_innermost: Accepted for VeOmni's callers and changes nothing: extra axes are
            innermost unless `extra_parallel_outermost` says otherwise.
        async_enabled: Kept for the trainer.
        name: The name to register; None, as VeOmni allows: "base".
        spec: Axes of one's own, instead of sizes: a grid, rank groups (one axis "group", or several named ones), or
            federations.
        backend: "torch", "jax", "sim"; None: see `discovery.choose`.
        ranks: The session ranks of the state in grid order, when it is not over all of them.
        own_groups: Give the state communicators of its own: each name that asks for them is a state of its own.
        group_options: Options of all its process groups: "timeout_s" and "is_high_priority".

    Raises:
        SpecError: The sizes do not fit; nothing was created.
        ArgumentError: Another argument is not allowed.
    """
    where = "init_parallel_state"
    name = _checked_name("base" if name is None else name)
    sizes: dict[str, tuple[Any, Any]] = {
        "dp_size": (dp_size, None),
        "dp_replicate_size": (dp_replicate_size, 1),
        "dp_shard_size": (dp_shard_size, 1),
        "tp_size": (tp_size, 1),
        "pp_size": (pp_size, 1),
        "cp_size": (cp_size, 1),
        "ulysses_size": (ulysses_size, 1),
        "extra_parallel_sizes": (extra_parallel_sizes, (1,)),
        "ep_size": (ep_size, None),
    }
    if not check_flag(where, "include_sp_in_fsdp", include_sp_in_fsdp):
        raise ArgumentError(INCLUDE_SP, include_sp_in_fsdp=include_sp_in_fsdp)
    names = check_strings(where, "extra_parallel_names", extra_parallel_names)
    flags = check_items(where, "extra_parallel_placement_innermost", extra_parallel_placement_innermost)
    if len(flags) not in (1, len(names)):
        raise ArgumentError(
            f"{where}: extra_parallel_placement_innermost={flags!r} for the extra parallels {names!r}. Give one per "
            f"name, or leave it out.",
            extra_parallel_placement_innermost=extra_parallel_placement_innermost,
        )
    extras = None
    if spec is None:
        extras = (*names, "ep") if ep_size is not None and "ep" not in names else names
        spec = parallel_spec(
            **{key: value for key, (value, _) in sizes.items()},
            extra_parallel_names=names,
            extra_parallel_outermost=extra_parallel_outermost,
            ep_over=ep_over,
        )
    else:
        given = [key for key, (value, default) in sizes.items() if value != default]
        if given:
            raise ArgumentError(
                f"init_parallel_state: both spec and {listed(given)} were given. Declare the sizes in one of them.",
                given=tuple(given),
            )
    states = _init_states(
        {name: spec},
        None,
        extras=extras,
        dp_mode=dp_mode,
        device_type=device_type,
        async_enabled=async_enabled,
        backend=backend,
        ranks=ranks,
        own_groups=own_groups,
        group_options=group_options,
    )
    return states[name]


@refuse_unknown_keywords(beside=parallel_spec)
def init_parallel_states(
    specs: Mapping[str, AnySpec | RankGroups],
    default: str | None = None,
    *,
    dp_mode: str = "fsdp2",
    device_type: str | None = None,
    async_enabled: bool = False,
    backend: str | None = None,
    ranks: Iterable[int] | None = None,
    own_groups: bool = False,
    group_options: Mapping[str, Any] | None = None,
) -> dict[str, ParallelState]:
    """Register several named states at once, all or none. *Collective over their ranks*; in any order of names.

    Args:
        specs: Specs by name, as in `init_parallel_state`.
        default: The name that becomes the process-wide default where there is none yet; None: the first.
        dp_mode: As in `init_parallel_state`, like all further arguments.

    >>> import dualmesh as dm
    >>> specs = {"thinker": dm.parallel_spec(dp_shard_size=2, ulysses_size=2), "talker": dm.parallel_spec(dp_size=4)}
    >>> with dm.session(backend="sim", world_size=4):
    ...     states = dm.init_parallel_states(specs)
    >>> states["talker"].size("dp")
    4
    """
    return _init_states(
        specs,
        default,
        extras=None,
        dp_mode=dp_mode,
        device_type=device_type,
        async_enabled=async_enabled,
        backend=backend,
        ranks=ranks,
        own_groups=own_groups,
        group_options=group_options,
    )


def check_variables(variables: Mapping[str, str]) -> None:
    """Refuse misspelt variables of dualmesh's. *Pure.*

    Raises:
        SpecError: A name is like a setting of `init_parallel_state` or another variable of dualmesh's, and none.
    """
    environment.check_names(variables, signature(init_parallel_state).parameters)


def _init_states(
    specs: Mapping[str, AnySpec | RankGroups],
    default: str | None,
    *,
    extras: tuple[str, ...] | None,
    dp_mode: str,
    device_type: str | None,
    async_enabled: bool,
    backend: str | None,
    ranks: Iterable[int] | None,
    own_groups: bool,
    group_options: Mapping[str, Any] | None,
) -> dict[str, ParallelState]:
    """Register states; `extras` are the extra parallels as they were declared, None: as the specs' views say."""
    check_variables(os.environ)
    wanted = _named_specs(specs, default)
    where = "init_parallel_state"
    if not is_one_of(dp_mode, DP_MODES):
        raise ArgumentError(
            f"init_parallel_state: dp_mode={dp_mode!r}. Allowed: {listed(DP_MODES)}.{did_you_mean(dp_mode, DP_MODES)}",
            dp_mode=dp_mode,
        )
    if device_type is not None and not (isinstance(device_type, str) and device_type):
        raise ArgumentError(
            f"{where}: device_type={device_type!r} is no kind of device. Give for example 'cpu' or 'cuda', or None.",
            device_type=device_type,
        )
    options = check_options(group_options)
    with registry.lock, session_for(backend) as current:
        places = places_of(ranks, current.world_size)
        topologies = {name: fit_spec(name, wanted[name], places, current.world_size) for name in sorted(wanted)}
        plans = {
            name: StatePlan(
                topology=topology,
                ranks=places,
                backend=current.backend,
                device_type=device_type or current.world.device_type,
                dp_mode=dp_mode,
                async_enabled=check_flag(where, "async_enabled", async_enabled),
                own_groups=check_flag(where, "own_groups", own_groups),
                group_options=options,
                # Said only where the views do not say it, so that a spec and its sizes are one state.
                extra_parallel_names=None if extras == named_views(topology) else extras,
                name=name,
            )
            for name, topology in topologies.items()
        }
        return _register(tuple(wanted), default, plans, current)


def _register(
    names: Sequence[str], default: str | None, plans: Mapping[str, StatePlan], current: Session
) -> dict[str, ParallelState]:
    states = {name: registry.taken(name, plan) for name, plan in plans.items()}
    wanted = {name: plan for name, plan in plans.items() if states[name] is None}
    missing = [plan for plan in dict.fromkeys(wanted.values()) if registry.find(plan) is None]
    built = dict(zip(missing, current.driver.build(missing, current.world) if missing else [], strict=True))
    for name in names:
        if name in wanted:
            registry.add(name, built.get(wanted[name]) or _find_equal(wanted[name]))
    scope.watch_backward()
    if scope.default_state() is None and names:
        first = default if default is not None else names[0]
        scope.set_default(registry.get(first), first)
    logs.log_registered({name: registry.get(name) for name in names if name in wanted})
    return {name: registry.get(name) for name in names}


def _find_equal(plan: StatePlan) -> ParallelState:
    state = registry.find(plan)
    if state is None:
        raise ArgumentError("init_parallel_state: the state ended while it was being registered. Init again.")
    return state


def _named_specs(specs: Mapping[str, Any], default: str | None) -> dict[str, AnySpec]:
    """Return the specs by checked names; bare rank groups become the one axis of a spec."""
    if not isinstance(specs, Mapping):
        raise ArgumentError(f"init_parallel_states: {specs!r} is no mapping. Give {{name: spec}}.", specs=specs)
    named: dict[str, AnySpec] = {}
    for name, spec in specs.items():
        _checked_name(name)
        named[name] = GroupSpec.of(spec) if isinstance(spec, RankGroups) else spec
        if not isinstance(named[name], AnySpec):
            raise ArgumentError(
                f"init_parallel_states: {name!r} maps to {spec!r}. Give a dm.TopologySpec, for example "
                f"dm.parallel_spec(dp_size=2), rank groups (dm.RankGroups, dm.GroupSpec), or a dm.FederatedSpec.",
                name=name,
                spec=spec,
            )
    if default is not None and not (isinstance(default, str) and default in specs):
        raise ArgumentError(
            f"init_parallel_states: default={default!r} is not among the names given: {listed(specs)}."
            f"{did_you_mean(default, specs)}",
            default=default,
        )
    return named


def _checked_name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise ArgumentError(f"init_parallel_state: {name!r} is no name. Names are non-empty strings.", name=name)
    return name


def get_parallel_state_by_name(name: str) -> ParallelState:
    """Return the registered state of a name; the ambient state stays. *Local.*

    Raises:
        UnknownStateError: The name is not registered; the message lists those that are.
    """
    return registry.get(name)
