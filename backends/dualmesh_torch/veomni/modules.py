"""VeOmni's modules by their own names, so that code which cannot be changed imports `veomni` functions from here.

What they hold is in the package's other modules.
"""

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from dualmesh.backend.state import ParallelState
from dualmesh.errors import BackendImportError
from dualmesh.runtime import scope
from dualmesh.runtime.registry import registry

ROOT, PARENT = "veomni", "veomni.distributed"
STATE, SEQUENCE = f"{PARENT}.parallel_state", f"{PARENT}.sequence_parallel"
PARTS = ("async_ulysses", "async_ulysses_dit", "comm", "data", "loss", "ulysses", "utils")
"""The modules of sequence_parallel. Each has all names: which one is where differs between VeOmni's releases."""
_OWNED = "groups belong to states: register one with init_parallel_state(ulysses_size=..., cp_size=...)"
_BALANCE = "balances the load of vision encoders, which dualmesh does not do"
_TESTED = "is inside VeOmni's own code, which does not run here: patch what calls it, or register a state"
REFUSED = {
    **dict.fromkeys(("init_sequence_parallel", "set_data_parallel_group", "set_context_parallel_group"), _OWNED),
    "set_unified_sequence_parallel_group": _OWNED,
    "init_ep_mesh_matrix": "meshes of experts are state.submesh('ep_fsdp', 'ep')",
    **dict.fromkeys(("create_parallel_state_from_mesh", "build_parallel_state"), _OWNED),
    **dict.fromkeys(("vision_dp", "prepare_dp_vision_inputs", "gather_dp_vision_embeds"), _BALANCE),
    **dict.fromkeys(("ring_attention", "ring_flash_attn_func"), "is dm.sequence.ring_attention here"),
    **dict.fromkeys(
        ("_PARALLEL_STATE_CACHE", "_PARALLEL_STATE_CACHE_SESSION", "_parallel_state_cache_session"), _TESTED
    ),
    **dict.fromkeys(("_ULYSSES_SP_GROUP_OVERRIDE", "_current_state", "_GatherConcatSP", "_sp_unify_dtype"), _TESTED),
    **dict.fromkeys(("_all_gather", "_all_gather_into_tensor", "_all_to_all", "_all_to_all_single"), _TESTED),
    **dict.fromkeys(("_AlltoAllRegion", "_BroadcastFromOwnerSP", "_GatherToOwnerSP"), _TESTED),
    **dict.fromkeys(("fused_layer_norm_cuda", "get_device_type", "init_device_mesh"), _TESTED),
}
"""Names of VeOmni that are left out, and why."""
TOO_LATE = (
    "stand_in: {name} was imported before, and others hold its names already. Call dualmesh_torch.veomni.stand_in() "
    "before anything imports veomni."
)


class _Module(ModuleType):
    """A module of VeOmni."""

    def __getattr__(self, name: str) -> Any:
        if name in REFUSED:
            raise BackendImportError(f"{self.__name__}.{name}: left out: {REFUSED[name]}.", name=name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    @property
    def _PARALLEL_STATE(self) -> ParallelState | None:
        """The ambient state; None before any is registered."""
        return scope.get_parallel_state() if scope.current_scope() or scope.default_state() else None

    @_PARALLEL_STATE.setter
    def _PARALLEL_STATE(self, state: ParallelState | None) -> None:
        if state is None and not registry.named:
            scope.set_default(None)
        else:
            self.__dict__["set_parallel_state"](state)

    @property
    def _PARALLEL_STATE_REGISTRY(self) -> dict[str, ParallelState]:
        return registry.named


def put_in_place(names: Mapping[str, Any], other: Mapping[str, Mapping[str, Any]]) -> None:
    """Put modules with these names where imports look for VeOmni's. *Local*; twice does nothing more.

    Args:
        names: What every module has.
        other: By part, the names that mean something else there.

    Raises:
        BackendImportError: VeOmni's own modules are there.
    """
    wanted = (STATE, SEQUENCE, *(f"{SEQUENCE}.{part}" for part in PARTS))
    if all(isinstance(sys.modules.get(name), _Module) for name in wanted):
        return
    for name in wanted:
        if name in sys.modules:
            raise BackendImportError(TOO_LATE.format(name=name), name=name)
    for name in wanted:
        sys.modules[name] = _module(name, {**names, **other.get(name.rpartition(".")[2], {})})
    try:
        for parent in (ROOT, PARENT):
            if parent not in sys.modules:
                _bring(parent)
    except BaseException:
        for name in wanted:
            sys.modules.pop(name, None)
        raise
    for name in (PARENT, *wanted):
        above, _, last = name.rpartition(".")
        setattr(sys.modules[above], last, sys.modules[name])


def _bring(name: str) -> None:
    """Import the installed package of a name, or put an empty one in its place."""
    above = name.rpartition(".")[0]
    stands = isinstance(sys.modules.get(above), _Module)
    if not stands and importlib.util.find_spec(name) is not None:
        importlib.import_module(name)
    else:
        sys.modules[name] = _module(name, {})


def _module(name: str, names: Mapping[str, Any]) -> ModuleType:
    module = _Module(name, "Stands in for VeOmni's module: the names of `dualmesh_torch.veomni`.")
    module.__dict__.update(names)
    spec = importlib.machinery.ModuleSpec(name, None, is_package=name in (ROOT, PARENT, SEQUENCE))
    module.__spec__ = spec
    if spec.submodule_search_locations is not None:
        module.__path__ = []
    return module
