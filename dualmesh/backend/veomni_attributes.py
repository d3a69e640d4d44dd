"""The attributes by which VeOmni's callers ask a state, all from one table: the body of `VeOmniAttributes`.

What states answer by axis name is in `state`. Here, and only here, a disabled group is None, and an axis that a
topology does not have answers like one of size 1.
"""

import os
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar, overload

from dualmesh.errors import NoStateError
from dualmesh.topology.roles import expand_axes
from dualmesh.topology.topology import Axis, Topology

Value = TypeVar("Value")


class Attribute(Generic[Value]):
    """A read-only attribute of a state, worked out each time it is asked for."""

    def __init__(self, read: Callable[[Any], Value], doc: str) -> None:
        self._read = read
        self.__doc__ = doc

    @overload
    def __get__(self, state: None, owner: type) -> "Attribute[Value]": ...
    @overload
    def __get__(self, state: object, owner: type) -> Value: ...
    def __get__(self, state: Any, owner: type) -> "Attribute[Value] | Value":
        return self if state is None else self._read(state)

    def __set__(self, state: object, value: object) -> None:
        raise AttributeError("States are read-only: an attribute cannot be set. Register another state instead.")


class Family(NamedTuple):
    """What VeOmni says about one axis, in the order in which the table unpacks it."""

    size: Attribute[int]
    rank: Attribute[Any]
    group: Attribute[Any]
    mesh: Attribute[Any]
    enabled: Attribute[bool]


def family(name: str, *, role: str | None = None, grouped: bool = False, absent: int = 0) -> Family:
    """Return the attributes of an axis. *Pure.*

    Args:
        name: The usual axis.
        role: The role whose axes are meant; where the spec does not say it, the axis of that name is.
        grouped: VeOmni has a group and a rank here even at size 1.
        absent: VeOmni's rank of a disabled axis; inside a JAX `shard_map` it stays a plain int.
    """

    def axis(state: Any) -> Axis | None:
        return _axis(state.topology, name, role)

    return Family(
        Attribute(lambda state: _size(state, axis(state)), f"Size of {name}; 1 where there is no such axis."),
        Attribute(lambda state: _rank(state, axis(state), absent, grouped), f"This rank's index along {name}."),
        Attribute(lambda state: _group(state, axis(state), grouped), f"Group of {name}, or None where disabled."),
        Attribute(lambda state: _mesh(state, axis(state), name), f"Native mesh of {name}."),
        Attribute(lambda state: _size(state, axis(state)) > 1, f"Whether {name} has more than one position."),
    )


class VeOmniAttributes:
    """VeOmni's attributes of a state; `family` makes five at once.

    >>> import dualmesh as dm
    >>> with dm.session(backend="sim", world_size=8):
    ...     state = dm.init_parallel_state(dp_shard_size=4, ulysses_size=2, ep_size=4)
    ...     state.dp_size, state.sp_enabled, state.tp_group, state.ep_size, state.ep_fsdp_size
    (4, True, None, 4, 2)
    """

    dp_size, dp_rank, dp_group, dp_mesh, dp_enabled = family("dp", role="data", grouped=True)
    dp_replicate_size, dp_replicate_rank, dp_replicate_group, dp_replicate_mesh, dp_replicate_enabled = family(
        "dp_replicate", role="replicate"
    )
    dp_shard_size, dp_shard_rank, dp_shard_group, dp_shard_mesh, _ = family("dp_shard", grouped=True)
    dp_shard_sp_size, dp_shard_sp_rank, dp_shard_sp_group, dp_shard_sp_mesh, _ = family(
        "dp_shard_sp", role="params", grouped=True
    )
    fsdp_size, fsdp_rank, fsdp_group, _, fsdp_enabled = family("dp_sp", role="loss", grouped=True)
    tp_size, tp_rank, tp_group, tp_mesh, tp_enabled = family("tp")
    pp_size, pp_rank, pp_group, pp_mesh, pp_enabled = family("pp", role="stages")
    sp_size, sp_rank, sp_group, sp_mesh, sp_enabled = family("sp", role="sequence", absent=-1)
    ulysses_size, ulysses_rank, ulysses_group, ulysses_mesh, ulysses_enabled = family("ulysses", absent=-1)
    cp_size, cp_rank, cp_group, cp_mesh, cp_enabled = family("cp", absent=-1)
    ep_size, ep_rank, ep_group, ep_mesh, ep_enabled = family("ep")

    dp_shard_enabled = Attribute(lambda state: True, "True: VeOmni always shards, over one rank if need be.")
    dp_shard_sp_enabled = Attribute(lambda state: _sp_enabled(state), "Whether parameters are sharded over sp too.")
    is_first_pp_stage = Attribute[Any](lambda state: state.pp_rank == 0, "Whether this rank is in the first stage.")
    is_last_pp_stage = Attribute[Any](
        lambda state: state.pp_rank == state.pp_size - 1, "Whether this rank is in the last stage."
    )
    ep_fsdp_size = Attribute(lambda state: _extra_fsdp_size(state, "ep"), "`extra_parallel_fsdp_size` of ep.")
    ep_fsdp_mesh = Attribute[Any](lambda state: _extra_fsdp_mesh(state, "ep"), "`extra_parallel_fsdp_mesh` of ep.")
    ep_gradient_divide_factor = Attribute(
        lambda state: _divide_factor(state), "`extra_parallel_gradient_divide_factor` of ep."
    )
    any_extra_parallel_enabled = Attribute(
        lambda state: any(size > 1 for size in state.extra_parallel_sizes.values()),
        "Whether any extra parallel has more than one position.",
    )
    extra_parallel_names = Attribute(
        lambda state: _extra_names(state), "Extra parallels in the order declared, those of size 1 too."
    )
    extra_parallel_sizes = Attribute(
        lambda state: {name: _size(state, _axis(state.topology, name)) for name in _extra_names(state)},
        "Size of each extra parallel by name.",
    )
    extra_parallel_fsdp_device_mesh = Attribute[dict[str, Any]](
        lambda state: {name: _extra_mesh(state, name) for name in _extra_names(state)},
        "Native mesh of each extra parallel by name: (NAME_replicate where replicas exist, NAME_fsdp, NAME), or None.",
    )
    device_mesh = Attribute[Any](lambda state: _device_mesh(state), "Native mesh; None before any state is registered.")
    dp_mode = Attribute[str](lambda state: state.plan.dp_mode, 'How parameters are held: "fsdp2", "fsdp1" or "ddp".')
    async_enabled = Attribute[bool](lambda state: state.plan.async_enabled, "Kept for the trainer.")
    include_sp_in_fsdp = Attribute(lambda state: True, "True: parameters are sharded over sp too.")
    is_initialized = Attribute[bool](lambda state: state.backend != "none" and state.is_live, "Whether its world runs.")
    local_rank = Attribute(lambda state: int(os.environ.get("LOCAL_RANK", "-1")), "What the launcher set, or -1.")
    global_rank = Attribute[int](lambda state: _global_rank(state), "This process' rank; -1 before any world.")

    del _

    def extra_parallel_enabled(self, name: str) -> bool:
        """Tell whether an extra parallel has more than one position; False for one that is not there. *Pure.*"""
        return _size(self, _axis(_topology(self), name)) > 1

    def extra_parallel_rank(self, name: str) -> Any:
        """Return this rank's index along an extra parallel. *Pure.*"""
        return _rank(self, _axis(_topology(self), name), 0, False)

    def extra_parallel_group(self, name: str) -> Any:
        """Return the native group of an extra parallel, or None where it is disabled. *Local.*"""
        return _group(self, _axis(_topology(self), name), False)

    def extra_parallel_mesh(self, name: str) -> Any:
        """Return the native mesh of an extra parallel. *Local.*"""
        return _mesh(self, _axis(_topology(self), name), name)

    def extra_parallel_fsdp_mesh(self, name: str) -> Any:
        """Return the native mesh (NAME, NAME_fsdp), in this order as in VeOmni, or None where disabled. *Local.*"""
        return _extra_fsdp_mesh(self, name)

    def extra_parallel_fsdp_size(self, name: str) -> int:
        """Return fsdp_size divided by the size of an extra parallel. *Pure.*

        VeOmni's value: it counts replicas. The axis' own size is `size(f"{name}_fsdp")`.
        """
        return _extra_fsdp_size(self, name)

    def extra_parallel_gradient_divide_factor(self, name: str) -> int:
        """Return the number of ranks that load different data or parts of a sequence: VeOmni's factor. *Pure.*

        The world size without tp and pp, as in VeOmni, which refuses others.
        """
        return _divide_factor(self)


def _topology(state: Any) -> Topology:
    topology: Topology = state.topology
    return topology


def _axis(topology: Topology, name: str, role: str | None = None) -> Axis | None:
    """Return the axes of a role, by their usual name where that means the same; without the role the axis so named."""
    usual = name if name in topology.axis_names else None
    axes = None if role is None else topology.spec.roles.get(role)
    if axes is None or (usual is not None and expand_axes(topology, (usual,)) == expand_axes(topology, axes)):
        return usual
    return axes


def _size(state: Any, axis: Axis | None) -> int:
    return 1 if axis is None else state.size(axis)


def _rank(state: Any, axis: Axis | None, absent: int, grouped: bool) -> Any:
    if axis is None or (_size(state, axis) == 1 and not grouped):
        return absent
    return state.index(axis)


def _group(state: Any, axis: Axis | None, grouped: bool) -> Any:
    if state.backend == "none":
        state.require_live("group")
        return None
    return state.group(axis) if axis is not None and (grouped or _size(state, axis) > 1) else None


def _mesh(state: Any, axis: Axis | None, name: str) -> Any:
    if axis is None:
        raise state.unknown_axis(name)
    return state.submesh(*((axis,) if isinstance(axis, str) else axis))


def _device_mesh(state: Any) -> Any:
    try:
        return state.mesh
    except NoStateError:
        return None


def _sp_enabled(state: Any) -> bool:
    return _size(state, _axis(_topology(state), "sp", "sequence")) > 1


def _global_rank(state: Any) -> int:
    if state.backend == "none":
        return -1
    held = state.held_ranks
    rank: int = held[0] if len(held) == 1 else state.own_rank()
    return rank


def _extra_names(state: Any) -> tuple[str, ...]:
    declared: tuple[str, ...] | None = state.plan.extra_parallel_names
    return named_views(_topology(state)) if declared is None else declared


def named_views(topology: Topology) -> tuple[str, ...]:
    """Return the views named as one of their axes, as `parallel_spec` writes them; ("ep",) where there is none. *Pure.*

    >>> import dualmesh as dm
    >>> named_views(dm.parallel_spec(dp_size=4, ep_size=2).resolve(4)), named_views(dm.parallel_spec().resolve(1))
    (('ep',), ('ep',))
    """
    return tuple(name for name, view in topology.spec.named_views if name in view.axes) or ("ep",)


def _extra_axes(topology: Topology, name: str) -> tuple[str, ...]:
    """Return the axes of an extra parallel's mesh: its replicas where there are some, then its view's axes."""
    replicate = f"{name}_replicate"
    replicas = (replicate,) if replicate in topology.axis_names and topology.size(replicate) > 1 else ()
    for _, view in topology.spec.named_views:
        if name in view.axes:
            return (*replicas, *view.axes)
    return (*replicas, name)


def _extra_mesh(state: Any, name: str) -> Any:
    topology = _topology(state)
    axis = _axis(topology, name)
    return None if axis is None or _size(state, axis) == 1 else state.submesh(*_extra_axes(topology, name))


def _extra_fsdp_mesh(state: Any, name: str) -> Any:
    topology = _topology(state)
    axis = _axis(topology, name)
    if axis is None or _size(state, axis) == 1:
        return None
    beside = f"{name}_fsdp"
    return state.submesh(name, beside) if beside in topology.axis_names else _extra_mesh(state, name)


def _extra_fsdp_size(state: Any, name: str) -> int:
    return _divide_factor(state) // _size(state, _axis(_topology(state), name))


def _divide_factor(state: Any) -> int:
    return _size(state, _axis(_topology(state), "dp_sp", "loss"))
