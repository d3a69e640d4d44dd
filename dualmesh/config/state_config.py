"""`StateConfig`: the settings of one state as plain frozen data, checked without a world.

Several named states are in `named_states`, the names and kinds of settings in `schema`.
"""

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dualmesh import presets
from dualmesh._support.checks import check_flag, check_items, is_one_of
from dualmesh.backend.group_options import check_options
from dualmesh.config.schema import BY_NAME, FIELDS, SPEC_FIELDS, canonical, hint
from dualmesh.errors import ArgumentError, SpecError, did_you_mean, listed
from dualmesh.presets import importers
from dualmesh.runtime.init import DP_MODES
from dualmesh.topology.federation_axes import FederatedGroups
from dualmesh.topology.group_topology import GroupSpec
from dualmesh.topology.parallel_spec import parallel_spec
from dualmesh.topology.resolve import whole
from dualmesh.topology.spec import TopologySpec, plain

GRID_KEYS = ("axes", "combined", "views", "roles", "rank_offset")
PRESETS = ("torchtitan", "megatron", "accelerate", "nemo_rl")
IMPORTERS = ("torchtitan", "megatron", "accelerate", "maxtext", "deepspeed")
_DECLARING = (*GRID_KEYS, "rank_groups", "spec", "preset", "importer", "settings")
KEYS = (*BY_NAME, *_DECLARING, "ranks", "group_options")

ONE_WAY = (
    "the axes are declared in several ways ({found}). Use one of: sizes (dp_shard_size, ...), axes (with combined, "
    "views, roles), rank_groups, spec (one line of text), preset with settings, importer with settings."
)


@dataclass(frozen=True)
class StateConfig:
    """The settings of one state. None: left out. Names are those of `init_parallel_state`.

    A dataclass of one's own may have this as a field, or fields of these names (`StateConfig.of`).

    >>> StateConfig(dp_shard_size=-1, tp_size=2).topology_spec().resolve(8).size("dp")
    4
    """

    dp_size: int | None = None
    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    ulysses_size: int | None = None
    cp_size: int | None = None
    tp_size: int | None = None
    pp_size: int | None = None
    ep_size: int | None = None
    ep_over: tuple[str, ...] | None = None
    extra_parallel_names: tuple[str, ...] | None = None
    extra_parallel_sizes: tuple[int, ...] | None = None
    extra_parallel_outermost: tuple[bool, ...] | None = None
    dp_mode: str | None = None
    device_type: str | None = None
    async_enabled: bool | None = None
    own_groups: bool | None = None
    spec: TopologySpec | GroupSpec | None = None
    ranks: tuple[int, ...] | None = None
    group_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        where = "StateConfig"
        for name in ("ep_over", "extra_parallel_names", "extra_parallel_sizes", "extra_parallel_outermost", "ranks"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check_items(where, name, value))
        for name in (field.name for field in FIELDS if field.kind in ("size", "sizes")):
            object.__setattr__(self, name, _plain_sizes(getattr(self, name)))
        object.__setattr__(self, "ranks", _plain_sizes(self.ranks))
        for name in ("async_enabled", "own_groups"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_flag(where, name, getattr(self, name)))
        if self.dp_mode is not None and not is_one_of(self.dp_mode, DP_MODES):
            raise ArgumentError(
                f"{where}: dp_mode={self.dp_mode!r}. Allowed: {listed(DP_MODES)}.{did_you_mean(self.dp_mode, DP_MODES)}"
            )
        wrong = [rank for rank in self.ranks or () if (whole(rank) or 0) < 0 or whole(rank) is None]
        if wrong:
            raise ArgumentError(f"{where}: ranks has {listed(map(repr, wrong))}. Ranks are integers of at least 0.")
        check_options(self.group_options)

    @classmethod
    def of(cls, settings: Any) -> "StateConfig":
        """Return settings given as a mapping, a dataclass instance, or a namespace of arguments. *Pure.*

        Raises:
            SpecError: An unknown name, or a value that cannot be.
        """
        if isinstance(settings, cls):
            return settings
        if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
            names = (field.name for field in dataclasses.fields(settings))
            settings = {name: getattr(settings, name) for name in names}
        elif not isinstance(settings, Mapping) and hasattr(settings, "__dict__") and not isinstance(settings, type):
            settings = vars(settings)
        if not isinstance(settings, Mapping):
            raise SpecError(f"StateConfig: {settings!r} is no mapping. Give {{setting: value}}.", found=settings)
        return cls(**_fields(settings))

    def topology_spec(self) -> TopologySpec | GroupSpec:
        """Return the spec that the settings declare. *Pure.*

        Raises:
            SpecError: The sizes contradict each other.
        """
        if self.spec is not None:
            return self.spec
        return parallel_spec(**self._given(SPEC_FIELDS))

    def options(self) -> dict[str, Any]:
        """Return the arguments of `init_parallel_states` that are given beside the spec. *Pure.*"""
        names = ("dp_mode", "device_type", "async_enabled", "own_groups", "ranks", "group_options")
        return self._given(names)

    def changed(self, settings: Mapping[str, Any]) -> "StateConfig":
        """Return the settings with some others, which win; a spec and sizes do not mix. *Pure.*"""
        given = _fields(settings)
        _one_way({**self._given(), **given})
        return dataclasses.replace(self, **given)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain data, without those left out. *Pure.*

        Raises:
            SpecError: The spec is a federation, which settings have no name for.
        """
        data = self._given()
        if isinstance(data.get("spec"), FederatedGroups):
            raise SpecError(f"StateConfig: {self.spec!r} cannot be written as settings. Write its to_dict() itself.")
        spec = data.pop("spec", None)
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in data.items()}
        return {**(spec.to_dict() if spec is not None else {}), **plain}

    def _given(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        names = [field.name for field in dataclasses.fields(self)] if names is None else names
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def _plain_sizes(value: Any) -> Any:
    """Return sizes of any integer type as ints, which files can hold; what is none is refused later."""
    return tuple(map(plain, value)) if isinstance(value, tuple) else plain(value)


def _fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `StateConfig` for settings under any of their names; None is left out."""
    fields: dict[str, Any] = {}
    for key, value in data.items():
        name = canonical(str(key), KEYS)
        if name is None:
            raise SpecError(f"unknown setting {key!r}.{hint(str(key), KEYS)}", key=key)
        if value is None:
            continue
        if name in fields:
            raise SpecError(f"{name!r} is given twice, as {key!r} too. Give it once.", key=key)
        fields[name] = value
    spec = _find_spec(fields)
    rest = {name: value for name, value in fields.items() if name not in _DECLARING}
    _one_way({**rest, **({"spec": spec} if spec is not None else {})})
    return {**rest, "spec": spec} if spec is not None else rest


def _one_way(given: Mapping[str, Any]) -> None:
    """Refuse sizes beside a spec."""
    sizes = [name for name in SPEC_FIELDS if name in given]
    if sizes and "spec" in given:
        found = listed(f"{name}={given[name]!r}" for name in sizes)
        raise SpecError(ONE_WAY.format(found=f"{found} beside a spec"), found=tuple(sizes))


def _find_spec(fields: Mapping[str, Any]) -> TopologySpec | GroupSpec | None:
    """Return the spec that is declared in another way than by sizes, or None."""
    ways = [way for way in ("axes", "rank_groups", "spec", "preset", "importer") if way in fields]
    if len(ways) > 1:
        raise SpecError(ONE_WAY.format(found=listed(f"{way}={fields[way]!r}" for way in ways)), found=tuple(ways))
    way = ways[0] if ways else None
    for key, owners in {**dict.fromkeys(GRID_KEYS[1:], ("axes",)), "settings": ("preset", "importer")}.items():
        allowed = ("axes", "rank_groups") if key == "roles" else owners
        if key in fields and way not in allowed:
            raise SpecError(f"{key!r} needs {' or '.join(map(repr, allowed))} beside it.", key=key)
    if way == "axes":
        return TopologySpec.from_dict({key: fields[key] for key in GRID_KEYS if key in fields})
    if way == "rank_groups":
        return GroupSpec.from_dict({key: fields[key] for key in ("rank_groups", "roles") if key in fields})
    if way == "spec":
        spec = fields["spec"]
        if isinstance(spec, str) and not spec.strip():
            raise SpecError(f"spec={spec!r} declares no axes. Write for example 'dp4 tp2'.", spec=spec)
        return spec if isinstance(spec, TopologySpec | GroupSpec) else TopologySpec.from_text(spec)
    if way == "preset":
        return _preset(fields["preset"], fields.get("settings", {}))
    return _import_spec(fields["importer"], fields.get("settings", {})) if way else None


def _preset(name: Any, settings: Any) -> TopologySpec:
    if not is_one_of(name, PRESETS):
        raise SpecError(f"preset={name!r}. Presets: {listed(PRESETS)}.{did_you_mean(name, PRESETS)}", preset=name)
    function = getattr(presets, name)
    known = list(inspect.signature(function).parameters)
    for key in settings if isinstance(settings, Mapping) else ():
        if key not in known:
            raise SpecError(f"unknown setting {key!r} of preset {name!r}.{hint(str(key), known)}", key=key)
    if not isinstance(settings, Mapping):
        raise SpecError(f"settings={settings!r} is no mapping. Give {{setting: value}}.", settings=settings)
    spec: TopologySpec = function(**settings)
    return spec


def _import_spec(name: Any, settings: Any) -> TopologySpec:
    if not is_one_of(name, IMPORTERS):
        raise SpecError(
            f"importer={name!r}. Importers: {listed(IMPORTERS)}.{did_you_mean(name, IMPORTERS)}", importer=name
        )
    spec: TopologySpec = getattr(importers, name)(settings)
    return spec
