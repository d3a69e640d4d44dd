"""All that depends on the version of torch: private names, names that came or went, texts of its errors.

Each is guarded, with its reason, the versions that it was seen in, and what happens without it. Nothing else in the
backend touches a name that starts with an underscore, or asks which torch this is.
"""

import functools
import inspect
import logging
import math
import sys
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch._dynamo import exc as dynamo_exc
from torch._dynamo import utils as dynamo
from torch.autograd import forward_ad
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor, Placement, debug
from torch.nn.parallel import DistributedDataParallel

from dualmesh.errors import BackendError

Group = dist.ProcessGroup
_REMEMBERING = type(functools.cache(len))

FUNCTIONAL: Any = torch.ops._c10d_functional  # noqa: SLF001
"""Collectives that torch.compile traces. Their Python face (torch.distributed._functional_collectives) wraps results
in a tensor subclass in eager code; these are the operators below it. Without them compiled code has no collectives."""


def default_store() -> Any | None:
    """Return the store that the world met in, or None where there is none to be had.

    Reason: agreements need a store all ranks share, and the trainer may have started the world.
    """
    find = getattr(c10d, "_get_default_store", None)
    return find() if find is not None else None


def call_at_world_end(group: Group, act: Callable[[], object]) -> None:
    """Call `act` when the world of a default group is destroyed, by whomever. *Local.*

    Reason: torch has no hook for it, and asking before each use of a group would cost more than the use. The map in
    which torch keeps a world's groups holds the only reference to its store's wrapper, and is emptied at the end.
    Without that map nothing is called: handles of an ended world then go on being given, and torch refuses them.
    Seen in 2.13.0 (`torch.distributed.distributed_c10d._world.pg_map`).
    """
    entry = getattr(getattr(c10d, "_world", None), "pg_map", {}).get(group)
    if entry is not None:
        weakref.finalize(entry[1], act).atexit = False


def group_names() -> tuple[str, ...]:
    """Return the names of all groups that this process is in, whoever made them.

    Reason: torch has no public list of groups, and a test that leaves one behind holds its threads and ports. Without
    `_world` the default group alone is seen.
    """
    names = getattr(getattr(c10d, "_world", None), "pg_names", None)
    if names is None:
        return ("default",) if dist.is_initialized() else ()
    return tuple(sorted(map(str, names.values())))


def has_member_groups() -> bool:
    """Tell whether groups can be made by their members alone, under agreed names."""
    return hasattr(c10d, "_new_process_group_helper") and hasattr(c10d, "_world")


def member_group(
    ranks: Sequence[int], rank: int, name: str, backend: str, timeout: timedelta | None, options: Any
) -> Group:
    """Make a group under a name that all members agree on, keeping the order of the list. *Collective over it.*

    Reason: `new_group` sorts, names groups by a count that differs between ranks, and hangs where it differs
    (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/distributed_c10d.py, `_process_group_name`).
    Fallback: `world_group`, for the groups that are planned at init, in states over the whole world.
    """
    if not has_member_groups():
        raise RuntimeError("this version of torch cannot make groups among their members alone")
    torch_groups: Any = c10d
    world = torch_groups._world  # noqa: SLF001
    default = torch_groups._get_default_group()  # noqa: SLF001
    backend_name = c10d.Backend(backend)
    wait = timeout if timeout is not None else default_timeout(backend)
    bound = default.bound_device_id
    # With a bound device the constructor would split the default communicator, which needs every rank of the world.
    default.bound_device_id = None
    try:
        group: Group
        group, _ = torch_groups._new_process_group_helper(  # noqa: SLF001
            len(ranks),
            ranks.index(rank),
            list(ranks),
            backend_name,
            world.pg_map[default][1],
            torch_groups.GroupName(name) if hasattr(c10d, "GroupName") else name,
            backend_options=options,
            timeout=wait,
            device_id=bound,
            group_desc=name,
        )
    finally:
        default.bound_device_id = bound
    world.pg_group_ranks[group] = {member: place for place, member in enumerate(ranks)}
    return group


def destroy_group(group: Group) -> None:
    """End a group, and drop what torch still remembers of its name. *Local.*

    Reason: torch files groups under a tag made of their name, and leaves the empty file when the group has ended: 200
    bytes per group. Without the map that remains so. Seen in 2.13.
    """
    name = group.group_name
    dist.destroy_process_group(group)
    files = getattr(getattr(c10d, "_world", None), "tags_to_pg", {})
    if files.get(f"ptd:{name}") == []:
        del files[f"ptd:{name}"]


def address_keys(name: str, device_type: str, index: int) -> list[str]:
    """Return the keys under which one member of a group left its address in the default store.

    Reason: torch never deletes them, so the store of a program that makes groups again and again grows. They come of
    the prefixes that `_new_process_group_helper` nests and of gloo's own; under other names nothing is deleted.
    Seen in 2.13.
    """
    return [f"{name}//{device}//0/{index}" for device in sorted({"cpu", device_type})]


def lone_group(rank: int, size: int, name: str, backend: str, store: Any, timeout: timedelta) -> Group:
    """Make a group of processes that share no default group, through a store of its own. *Collective over it.*

    Reason: `new_group` takes ranks of the default group only, and `init_process_group` makes one group per process
    (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/distributed_c10d.py,
    `_new_process_group_helper`). Fallback: none; weights then travel without a process group.
    """
    if not has_member_groups():
        raise RuntimeError("this version of torch cannot make a group beside the default one")
    torch_groups: Any = c10d
    world = torch_groups._world  # noqa: SLF001
    default = dist.group.WORLD
    bound = None if default is None else default.bound_device_id
    if default is not None and bound is not None:
        default.bound_device_id = None  # else it would split the default communicator, over other ranks
    try:
        group: Group
        # Without a list of ranks nothing is looked up in the default group.
        group, _ = torch_groups._new_process_group_helper(  # noqa: SLF001
            size,
            rank,
            [],
            c10d.Backend(backend),
            store,
            torch_groups.GroupName(name) if hasattr(c10d, "GroupName") else name,
            timeout=timeout,
            group_desc=name,
        )
    finally:
        if default is not None and bound is not None:
            default.bound_device_id = bound
    world.pg_group_ranks[group] = {member: member for member in range(size)}
    return group


def world_group(ranks: Sequence[int], timeout: timedelta | None, backend: str, options: Any) -> Group:
    """Make a group the public way. *Collective over the world, members or not*; ascending lists only.

    Raises:
        RuntimeError: The list is not ascending: torch would sort it.
    """
    if list(ranks) != sorted(ranks):
        raise RuntimeError(f"this version of torch cannot keep the order of the ranks {list(ranks)}")
    made: Any = dist.new_group(list(ranks), timeout, backend, options)
    group: Group = made
    return group


def timeout_of(group: Group, device_type: str) -> timedelta | None:
    """Return the timeout of a group, or None where it does not say. Reason: groups do not inherit it."""
    try:
        found = group._get_backend(torch.device(device_type)).options._timeout  # noqa: SLF001
    except (AttributeError, RuntimeError):
        return None
    return found if isinstance(found, timedelta) else None


def default_timeout(backend: str) -> timedelta:
    """Return how long collectives of a communication backend wait unless told otherwise. Reason: not public."""
    find = getattr(c10d, "_get_default_timeout", None)
    found: timedelta = dist.default_pg_timeout if find is None else find(c10d.Backend(backend))
    return found


_set_timeout: Any = getattr(dist, "set_timeout", None) or getattr(c10d, "_set_pg_timeout", None)


def has_timeouts() -> bool:
    """Tell whether the timeout of a group can be changed."""
    return _set_timeout is not None


def set_timeout(group: Group, timeout: timedelta) -> None:
    """Set how long collectives of a group wait from here on. *Local.*

    Reason: the setter is public from 2.14 on, which warns of the private name that 2.11 to 2.13 have.

    Raises:
        BackendError: This version of torch has none at all.
    """
    if _set_timeout is None:
        raise BackendError("set_timeout: this version of torch cannot. Give group_options={'timeout_s': ...} at init.")
    _set_timeout(timeout, group)


# Public names that changed: 2.13 warns about those that 2.11 has.
gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Gather equal blocks of all members into one tensor."""
scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Reduce a tensor over all members and keep one block."""

_takes_grad_placements = "grad_placements" in inspect.signature(DTensor.from_local).parameters


class _Parts(torch.autograd.Function):
    """The same tensor, whose gradient is one of `count` equal parts of what arrives."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: int) -> torch.Tensor:
        ctx.count = count
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None]:
        (gradient,) = gradients
        return None if gradient is None else gradient / ctx.count, None


def from_local(
    block: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: torch.Size,
    stride: tuple[int, ...],
    grad_placements: Sequence[Placement] | None,
) -> DTensor:
    """Return a DTensor made of this rank's block, whose gradient arrives laid out as asked. *Local.*

    Reason: `DTensor.from_local` takes `grad_placements` from 2.13 on. Without it a gradient arrives laid out like the
    array; where partial sums are asked for, each rank takes an equal part of it, as torch makes them too.
    """
    laid_out: dict[str, Any] = {"run_check": False, "shape": shape, "stride": stride}
    if _takes_grad_placements:
        laid_out["grad_placements"] = grad_placements
    elif grad_placements is not None:
        pairs = zip(placements, grad_placements, strict=True)
        split = [mesh.size(dim) for dim, (has, wants) in enumerate(pairs) if has != wants]
        if math.prod(split) > 1:
            found: Any = _Parts.apply(block, math.prod(split))  # type: ignore[no-untyped-call]
            block = found
    return DTensor.from_local(block, mesh, placements, **laid_out)


def forget_plans() -> None:
    """Drop what DTensor remembers, in this thread, of meshes whose groups died.

    Reason: its plans keep the mesh that they were made for. The first operation on an equal mesh with new groups would
    look for a dead group by name, and the dead groups' threads and sockets would stay. Without these functions that
    remains so, and torch says it.
    """
    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.tensor"):
            classes = [kind for kind in vars(module).values() if inspect.isclass(kind) and kind.__module__ == name]
            for owner in (module, *classes):
                for kept in [getattr(owner, attribute, None) for attribute in vars(owner)]:
                    if isinstance(kept, _REMEMBERING):
                        kept.cache_clear()
    planners = getattr(sys.modules.get("torch.distributed.tensor._redistribute"), "_planner_cache", {})
    planners.clear()


def strided_shard(dim: int, split_factor: int) -> Any | None:
    """Return the placement of a split against mesh order, or None. Reason: there is no public one."""
    try:
        from torch.distributed.tensor.placement_types import _StridedShard as Strided
    except ImportError:
        return None
    return Strided(dim, split_factor=split_factor)


def split_factor_of(placement: Any) -> int | None:
    """Return the split factor of a placement against mesh order, or None for others."""
    found = getattr(placement, "split_factor", None)
    return found if type(placement).__name__ == "_StridedShard" else None


def _called(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)


freely: Callable[..., Any] = getattr(dynamo, "_disable_side_effect_safety_checks_for_current_subtracer", _called)
"""Call a function that torch.compile traces, and let it write to what outlives a checkpointed block.

Reason: a scope that is opened in the block is left there too, so a recompute without these writes is right; no public
name says so. Without it a scope opened in a compiled block is torch's "HOP: Unsafe side effect", which names its cure.
"""


def is_recompile_limit(error: BaseException) -> bool:
    """Tell whether torch.compile gave up on a function that it compiled too often. Reason: the class is not public."""
    return type(error).__name__ == "FailOnRecompileLimitHit"


def recompile_limit() -> int | None:
    """Return how often torch compiles one function. Reason: the setting is documented in a private module."""
    return getattr(torch._dynamo.config, "recompile_limit", None)  # noqa: SLF001


class Refusal(dynamo_exc.Unsupported):
    """What stops torch.compile: a graph break, and with `fullgraph=True` the error of dualmesh's.

    Reason: torch gives errors raised while it traces another class, and has no public way around it
    (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/eval_frame.py, `compile_wrapper`: it raises what
    `with_traceback` of what stopped it returns). Seen in 2.13. Without it the error is torch's, with this message.
    """

    def __init__(self, error: Exception, is_final: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.is_final = is_final

    def with_traceback(self, traceback: Any) -> Any:
        """Return what to raise: what the function raises that was to be compiled, run as it is."""
        call = inspect.currentframe()
        call = None if call is None else call.f_back
        if call is None or call.f_code.co_name != "compile_wrapper":
            return super().with_traceback(traceback)
        found = call.f_locals
        if not self.is_final and {"fn", "args", "kwargs"} <= found.keys():
            try:
                as_it_is: Any = torch.compiler.disable(found["fn"])  # type: ignore[no-untyped-call]
                as_it_is(*found["args"], **found["kwargs"])
            except Exception as error:
                return error
        return self.error


class _NotOfOwnCalls(logging.Filter):
    """Passes what is logged on behalf of anybody's call but dualmesh's."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Find the innermost caller that is not torch; what only wraps a backward() is passed over."""
        frame = inspect.currentframe()
        while frame is not None:
            name = frame.f_globals.get("__name__", "")
            if not name.startswith(("torch", "logging")) and name not in (__name__, "dualmesh.runtime.scope"):
                return not name.startswith("dualmesh")
            frame = frame.f_back
        return True


def quiet_redistribution() -> None:
    """Keep torch from advising how to redistribute where dualmesh does it, which the user cannot change.

    Reason: DTensor advises to flatten meshes, once per mesh (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/
    distributed/tensor/_redistribute.py, `_warn_flatten_optimization_not_possible`); the logger's name is private.
    Without it that advice is seen.
    """
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    if not any(isinstance(one, _NotOfOwnCalls) for one in logger.filters):
        logger.addFilter(_NotOfOwnCalls())


def simulated_ranks() -> tuple[int, ...]:
    """Return the ranks that torch's LocalTensorMode simulates in this thread now, none outside it.

    Reason: there one piece of code runs as all ranks, so no rank is its own; the mode has no public name. Seen in 2.13.
    Without it the state answers for the rank of the process.
    """
    module = sys.modules.get("torch.distributed._local_tensor")
    mode = None if module is None else module.enabled_local_tensor_mode()
    return () if mode is None else tuple(sorted(mode.ranks))


def is_tracing() -> bool:
    """Tell whether torch.compile traces in this thread, asked by what it calls meanwhile.

    Reason: no public question says it there. Without it: True.
    """
    context = getattr(getattr(torch, "_guards", None), "TracingContext", None)
    return context is None or context.try_get() is not None


def refusal(error: Exception, is_final: bool = False) -> Exception:
    """Return what stops torch.compile: for the error that the function raises, else (or if final) for this one."""
    return Refusal(error, is_final)


def version_of(x: torch.Tensor) -> int:
    """Return how often a tensor's memory was written to. Reason: there is no public counter. Without it: 0."""
    return 0 if x.is_inference() else getattr(x, "_version", 0)


def is_view(x: torch.Tensor) -> bool:
    """Tell whether autograd takes a tensor for a view. Reason: no public question says it. Without it: False."""
    return getattr(x, "_base", None) is not None


dual_level: Callable[[], int] = functools.partial(getattr, forward_ad, "_current_level", 0)
"""Return the level of forward-mode differentiation, below 0 outside any. Reason: `unpack_dual` asks for it too, but in
Python, which every collective would pay for with 4 us. Without the name it is 0: tensors are asked for tangents."""


def stash(key: str, value: Any) -> bool:
    """Keep a value where autograd's worker threads of this thread's backward() find it; tell whether that works.

    Reason: those threads start with empty contexts. It is what torch itself uses. Without it they see the default.
    """
    keep = getattr(torch._C, "_stash_obj_in_tls", None)  # noqa: SLF001
    if keep is None:
        return False
    keep(key, value)
    return True


def find_stashed(key: str) -> Any:
    """Return what `stash` kept, in that thread or in an autograd worker thread that it started."""
    has, get = getattr(torch._C, "_is_key_in_tls", None), getattr(torch._C, "_get_obj_in_tls", None)  # noqa: SLF001
    return get(key) if has is not None and get is not None and has(key) else None


has_replay: bool = all(
    hasattr(home, name)
    for home, name in (
        (torch._C, "_current_autograd_node"),  # noqa: SLF001
        (getattr(torch._C, "_autograd", None), "_get_sequence_nr"),  # noqa: SLF001
        (torch.autograd.graph, "_engine_run_backward"),
    )
)
"""Whether torch says which step of a backward runs. Reason: no public question says it, and hooks and rules must find
the scope of their forward. Seen in 2.11 to 2.13. Without it they read what is ambient where backward() was called."""


def nodes_made() -> Callable[[], int]:
    """Return the function that counts the autograd nodes this thread made: the number of the next one."""
    found: Callable[[], int] = torch._C._autograd._get_sequence_nr  # noqa: SLF001
    return found


def running_node() -> Any | None:
    """Return the autograd node that this thread's backward is in, or None."""
    return torch._C._current_autograd_node()  # noqa: SLF001


def number_of(node: Any) -> int | None:
    """Return the place of an autograd node among those that its thread made, None for a leaf, which has none."""
    number: int = node._sequence_nr()  # noqa: SLF001
    return None if number >= 2**63 else number


def wrap_backward(around: Callable[..., Any]) -> None:
    """Let `around(run, *args)` call what runs every backward() and grad() of this process.

    Reason: code that a backward calls must know that it is in one, and to ask torch costs as much as to read a scope
    (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/autograd/graph.py, `_engine_run_backward`). Seen in 2.11 to
    2.13. Without it: see `has_replay`.
    """
    run: Any = torch.autograd.graph._engine_run_backward  # noqa: SLF001
    if hasattr(run, "dualmesh_run"):
        return

    @functools.wraps(run)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(run, *args, **kwargs)

    wrapper.dualmesh_run = run  # type: ignore[attr-defined]
    for home in (torch.autograd, torch.autograd.graph):
        home._engine_run_backward = wrapper  # type: ignore[attr-defined]  # noqa: SLF001


def wrap_rules(begin: Callable[[], Any], run: Callable[..., Any]) -> None:
    """Let `run(known, rule, node, *gradients)` call the rule of every `torch.autograd.Function`.

    `known` is what `begin()` returned where its forward began; where that was None the rule is called as it is.

    Reason: what a rule calls reads the scope, compiled code included, and what it records belongs to its scope; there
    is no hook around a rule (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/autograd/function.py,
    `BackwardCFunction`). Seen in 2.11 to 2.13. Without it a rule sees its scope, and compiled code that it calls does
    not.
    """
    kind: Any = getattr(torch.autograd.function, "BackwardCFunction", None)
    if kind is None or hasattr(kind, "dualmesh_known"):
        return
    made = kind.__init__

    def __init__(node: Any, *args: Any, **kwargs: Any) -> None:
        made(node, *args, **kwargs)
        node.dualmesh_known = begin()

    def wrapped(rule: Any) -> Any:
        @functools.wraps(rule)
        def wrapper(node: Any, *args: Any) -> Any:
            known = node.dualmesh_known
            return rule(node, *args) if known is None else run(known, rule, node, *args)

        return wrapper

    kind.dualmesh_known = None
    kind.__init__ = __init__
    for name in ("apply", "apply_boxed"):
        if hasattr(kind, name):
            setattr(kind, name, wrapped(getattr(kind, name)))


def wrap_recomputes(bind: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let `bind(recompute)` say what a checkpointed block (`use_reentrant=False`) runs in backward.

    Reason: `context_fn` must be given at every call, and models of others do not
    (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/checkpoint.py, `_CheckpointFrame`). Seen in 2.11 to
    2.13. Without it such a block reads the scope of the step that asks for its activations.
    """
    kind: Any = getattr(torch.utils.checkpoint, "_CheckpointFrame", None)
    made = getattr(kind, "__init__", None)
    if made is None or hasattr(made, "dualmesh_made") or "recompute_fn" not in inspect.signature(made).parameters:
        return

    @functools.wraps(made)
    def wrapper(frame: Any, recompute_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        made(frame, bind(recompute_fn), *args, **kwargs)

    wrapper.dualmesh_made = made  # type: ignore[attr-defined]
    kind.__init__ = wrapper


class FSDP2Group(NamedTuple):
    """Parameters that FSDP2 reduces together."""

    parameters: list[tuple[nn.Parameter, tuple[DeviceMesh, Sequence[Any]] | None]]
    """Each with the mesh and placements of the DTensor that it was before, if it was one."""
    mesh: DeviceMesh
    dims: tuple[int, ...]
    """The dims of the mesh over which gradients are reduced."""
    refusal: str | None
    """Why the reduction is no sum, whatever is set."""


def fsdp2_groups(module: FSDPModule) -> list[FSDP2Group]:
    """Return what a unit of FSDP2 reduces (torch 2.11 to 2.13).

    Reason: a parameter shows one mesh in which FSDP's dims and others stand together, and no public question tells
    which of them its gradient is reduced over
    (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py).

    Raises:
        BackendError: This version of torch does not show it: no gradient could be vouched for.
    """
    try:
        state: Any = module._get_fsdp_state()  # noqa: SLF001
        one = [] if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]  # noqa: SLF001
        groups = [group for group in getattr(state, "_fsdp_param_groups", one) if group is not None]
        return [_fsdp2_group(group) for group in groups]
    except AttributeError as error:
        raise BackendError(
            f"sum_gradients: torch {torch.__version__} does not show which ranks FSDP2 reduces over ({error}). Use "
            f"torch 2.11 to 2.13."
        ) from error


def _fsdp2_group(group: Any) -> FSDP2Group:
    info, parameters = group.mesh_info, []
    for one in group.fsdp_params:
        spec = one._unsharded_dtensor_spec if one.is_dtensor else None  # noqa: SLF001
        before = None if spec is None else (spec.mesh, spec.placements)
        held = [one.sharded_param, getattr(one, "_unsharded_param", None)]  # the module has one or the other
        parameters += [(found, before) for found in held if found is not None and found.requires_grad]
    refusal = None
    if not (group.reduce_grads and group.all_reduce_grads):
        refusal = "its reduction is switched off. Call set_requires_gradient_sync(True) before"
    elif group._all_reduce_hook is not None:  # noqa: SLF001
        refusal = "set_all_reduce_hook gave it a hook, which may do anything. Shard over a mesh with all the ranks"
    elif not type(group._reduce_scatter_comm).__module__.startswith("torch."):  # noqa: SLF001
        refusal = "set_custom_reduce_scatter gave it a reduction of its own. Leave it out"
    dims = tuple(dim for dim in (info.replicate_mesh_dim, info.shard_mesh_dim) if dim is not None)
    return FSDP2Group(parameters, info.mesh, dims, refusal)


class FSDP1Unit(NamedTuple):
    """What one `FullyShardedDataParallel` reduces."""

    parameters: list[nn.Parameter]
    groups: tuple[Group, ...]
    refusal: str | None
    make_sum: Callable[[], None]


def fsdp1_unit(module: FullyShardedDataParallel) -> FSDP1Unit | None:
    """Return what a module of FSDP1 reduces, without those inside it; None where it has no parameters of its own.

    Reason: its divisors have no public name, and a hook is for the root and some strategies only
    (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/fsdp/_runtime_utils.py, `_reduce_grad`; torch
    2.11 to 2.13).

    Raises:
        BackendError: This version of torch does not show it.
    """
    unit: Any = module
    try:
        if unit._handle is None:  # noqa: SLF001
            return None
        flat = unit._handle.flat_param  # noqa: SLF001
        own = [flat] if flat._params is None else [*flat._params, *flat._shared_params]  # noqa: SLF001
        hook, _, _ = unit._comm_hook, unit._gradient_predivide_factor, unit._gradient_postdivide_factor  # noqa: SLF001
        groups = (unit.process_group, getattr(unit, "_inter_node_pg", None))
    except AttributeError as error:
        raise BackendError(
            f"sum_gradients: torch {torch.__version__} does not show what FullyShardedDataParallel divides by "
            f"({error}). Use fully_shard."
        ) from error

    def make_sum() -> None:
        unit._gradient_predivide_factor = unit._gradient_postdivide_factor = 1.0  # noqa: SLF001

    refusal = None if hook is None else "it has a communication hook. Leave it out"
    if unit.sharding_strategy is ShardingStrategy.NO_SHARD and unit.process_group.size() > 1:
        refusal = "with NO_SHARD it reduces again what earlier backwards left. Use DistributedDataParallel"
    wanted = [parameter for parameter in dict.fromkeys(own) if parameter.requires_grad]
    return FSDP1Unit(wanted, tuple(group for group in groups if group is not None), refusal, make_sum)


def is_fsdp1_shard(x: torch.Tensor) -> bool:
    """Tell whether a parameter is a piece of FSDP1's flat one. Reason: it looks like any plain tensor."""
    return getattr(x, "_fsdp_flattened", False) is True


def ddp_refusal(module: DistributedDataParallel, wanted: Sequence[torch.Tensor], *, is_summed: bool) -> str | None:
    """Say why DDP does not reduce the parameters wanted by a plain sum; None where it can.

    Reason: which parameters its reducer has, and which hooks, has no public name (torch 2.11 to 2.13). Without the
    names nothing is refused here; a second hook is refused by torch itself.
    """
    if getattr(module, "_comm_hooks", ()) and not is_summed:
        return "it has a communication hook already. Leave it out, or DDP's mixed precision"
    if getattr(module, "_delay_all_reduce_params", ()):
        return "it was given delay_all_reduce_named_params, which it averages. Leave them out"
    known = {id(parameter) for parameter in getattr(module, "_module_parameters", wanted)}
    if not {id(parameter) for parameter in wanted} <= known:
        return "its module has parameters that came after it was made. Make it anew, after all changes to the module"
    find: Callable[[], dict[str, Any]] = getattr(module, "_get_ddp_logging_data", dict)
    count = find().get("num_parameter_tensors", len(wanted))
    if count != len(wanted):
        return (
            f"it was made when {count} parameters needed gradients, and {len(wanted)} do now. Make it anew after "
            f"changing requires_grad"
        )
    return None


def is_composable_ddp(module: nn.Module) -> bool:
    """Tell whether torch's composable `replicate` wraps a module. Reason: it shows by a private class only."""
    found = getattr(sys.modules.get("torch.distributed._composable.replicate"), "DDP", None)
    return found is not None and isinstance(module, found)


# -- texts of torch's errors -------------------------------------------------------------------------------------------
# What went wrong in an exchange shows by the text only, and that comes from gloo, NCCL and the store. Seen in 2.11 to
# 2.14. Other texts are torch's own error, as it is.
_LATE = ("timed out", "timeout")
_LOST = ("gloo", "nccl", *_LATE, "connection", "broken pipe", "socket")


def is_lost_exchange(error: BaseException) -> bool:
    """Tell whether ranks could not exchange something, rather than one of them being given something wrong."""
    return isinstance(error, dist.DistError) or any(sign in str(error).lower() for sign in _LOST)


def is_timeout(error: BaseException) -> bool:
    """Tell whether an exchange failed because others did not come in time."""
    return any(sign in str(error).lower() for sign in _LATE)


def mixes_dtensors(error: BaseException) -> bool:
    """Tell whether an operation was given a DTensor beside a plain tensor. Seen in 2.11 to 2.14."""
    return "mixed torch.Tensor and DTensor" in str(error)
