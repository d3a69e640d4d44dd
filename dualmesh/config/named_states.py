"""`Configuration`: several named states as settings, from files, variables, flags, arguments or plain data.

One state's settings are in `state_config`; files are read in `files`, flags in `flags`.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dualmesh._support.plain_data import may_be_sorted, pairs_in, write_pairs
from dualmesh.backend.state import ParallelState
from dualmesh.config.files import Places, read_file
from dualmesh.config.schema import ENDING, FIELDS, hint, parse_setting
from dualmesh.config.state_config import KEYS as STATE_KEYS
from dualmesh.config.state_config import StateConfig
from dualmesh.errors import DualmeshError, SpecError, did_you_mean, listed
from dualmesh.runtime.environment import PREFIX
from dualmesh.runtime.init import check_variables, init_parallel_states
from dualmesh.runtime.session import session_for
from dualmesh.topology.resolve import positive
from dualmesh.topology.topology import Topology

FILE_VARIABLE = "DUALMESH_CONFIG"
SPEC_VARIABLE = "DUALMESH_SPEC"
KEYS = ("states", "default", "world_size", "gpus_per_node", "backend")
DEFAULT_NAME = "base"


@dataclass(frozen=True)
class Configuration:
    """Named states, and what belongs to all of them.

    Args:
        states: Settings by name, in the order of registration.
        default: The name that becomes the process-wide default; None: the first.
        world_size: The world that the configuration is for; None: any that fits.
        gpus_per_node: Consecutive ranks on each node, for tables and pictures.
        backend: "torch", "jax", ...; None: see `discovery.choose`.

    >>> config = Configuration.from_dict({"states": {"thinker": {"dp_shard": -1, "tp": 2}}, "world_size": 8})
    >>> config.topologies()["thinker"].size("dp_shard")
    4
    """

    states: Mapping[str, StateConfig]
    default: str | None = None
    world_size: int | None = None
    gpus_per_node: int | None = None
    backend: str | None = None
    places: Places = field(default=Places("Configuration"), compare=False, repr=False)
    ordered: bool = field(default=True, compare=False, repr=False)
    """Whether the first state is known to be the first: not where a tool may have sorted the names of a file."""

    @classmethod
    def from_file(cls, path: str | Path) -> "Configuration":
        """Read a YAML or TOML file. *Local.*

        Raises:
            SpecError: Something in it cannot be; every problem, with file and line.
            ArgumentError: The file cannot be read.
        """
        data, places = read_file(path)
        return cls.from_dict(data, places)

    @classmethod
    def from_dict(cls, data: Any, places: Places | None = None) -> "Configuration":
        """Read plain data: `{"states": {name: settings}, ...}`, or the settings of one state, "base". *Pure.*

        States may also be pairs, or mappings of one name each, as all that is ordered may.

        Raises:
            SpecError: Something in it cannot be; every problem.
        """
        places = places or Places("Configuration")
        if not isinstance(data, Mapping) or not data:
            raise SpecError(f"{places.source}: found {data!r}. Give {{'states': {{name: settings}}}}.", found=data)
        problems: list[str] = []
        if "states" not in data and all(key not in KEYS or key in STATE_KEYS for key in data):
            states = _states({DEFAULT_NAME: data}, places, (), problems)
            _refuse(places, problems)
            return cls(states, places=places)
        for key in data:
            if key not in KEYS:
                problems.append(f"{places.of((str(key),))}: unknown key {key!r}.{hint(str(key), KEYS)}")
        given = data.get("states")
        states = _states(given, places, ("states",), problems)
        common = {key: data.get(key) for key in KEYS[1:]}
        problems += _common(common, states, places)
        _refuse(places, problems)
        ordered = not isinstance(given, Mapping) or not may_be_sorted(states)
        return cls(states, **common, places=places, ordered=ordered)

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] | None = None) -> "Configuration | None":
        """Read DUALMESH_CONFIG (a file), then DUALMESH_SPEC and sizes such as DUALMESH_TP_SIZE. *Local.*

        Sizes change the one state of the file, or make the state "base". Returns None where nothing is set.

        Raises:
            SpecError: A variable that looks like a setting and is none, or a value that cannot be.
        """
        variables = os.environ if variables is None else variables
        settings = settings_in(variables)
        file = variables.get(FILE_VARIABLE)
        if not file:
            return cls.from_dict({"states": {DEFAULT_NAME: settings}}, Places("environment")) if settings else None
        found = cls.from_file(file)
        return found.changed(settings) if settings else found

    def changed(self, settings: Mapping[str, Any], name: str | None = None) -> "Configuration":
        """Return the configuration with other settings for one state, which win. *Pure.*

        Args:
            settings: Settings by name.
            name: The state; None: the only one, or the default.
        """
        name = self._chosen() if name is None else name
        if name not in self.states:
            raise SpecError(
                f"{self.places.source}: no state {name!r}. States: {listed(self.states)}."
                f"{did_you_mean(name, self.states)}",
                name=name,
            )
        return replace(self, states={**self.states, name: self.states[name].changed(settings)})

    def _chosen(self) -> str:
        if self.default is None and len(self.states) > 1:
            raise SpecError(
                f"{self.places.source}: sizes were given, but not for which of the states {listed(self.states)}. Name "
                f"one, or a default.",
                states=tuple(self.states),
            )
        return self.default or next(iter(self.states))

    def topologies(self, world_size: int | None = None) -> dict[str, Topology]:
        """Return every state's topology in a world: the one given, or the configuration's. *Pure.*

        Raises:
            SpecError: A state does not fit; every problem, with file and line.
        """
        size = self.world_size if world_size is None else positive("Configuration", "world_size", world_size)
        if size is None:
            raise SpecError(f"{self.places.source}: world_size is not known. Give it as an argument, or set it.")
        topologies: dict[str, Topology] = {}
        problems: list[str] = []
        for name, state in self.states.items():
            try:
                ranks = state.ranks
                outside = [rank for rank in ranks or () if rank >= size]
                if outside:
                    raise SpecError(f"ranks {listed(outside)} are not in a world of {size}. Ranks: 0..{size - 1}.")
                spec = state.topology_spec()
                offset = spec.rank_offset if ranks is None else 0
                topologies[name] = spec.resolve(size - offset if ranks is None else len(ranks))
            except DualmeshError as error:
                problems.append(_problem(self.places, ("states", name), f"state {name!r}", error))
        _refuse(self.places, problems)
        return topologies

    def init(self) -> dict[str, ParallelState]:
        """Register all states, those with equal options at once. *Collective over their ranks.*

        Raises:
            SpecError: The world is not the one that the configuration is for, a state does not fit, or there is no
                default among names that a tool may have sorted.
        """
        with session_for(self.backend) as current:
            if self.world_size is not None and self.world_size != current.world_size:
                raise SpecError(
                    f"{self.places.of(('world_size',))}: world_size is {self.world_size}, but the world has "
                    f"{current.world_size} ranks. Start as many, or leave it out.",
                    world_size=self.world_size,
                )
            if not self.ordered and self.default is None:
                raise SpecError(
                    f"{self.places.of(('states',))}: the names of the states stand in sorted order "
                    f"({listed(self.states)}), which tools make of any order, so which is the first is not known. Say "
                    f"which is the default (default: NAME), or write pairs: states: [[name, settings], ...].",
                    states=tuple(self.states),
                )
            self.topologies(current.world_size)
            states: dict[str, ParallelState] = {}
            for names in self._bundles():
                specs = {name: self.states[name].topology_spec() for name in names}
                default = self.default if self.default in names else None
                options = self.states[names[0]].options()
                states |= init_parallel_states(specs, default, backend=current.backend, **options)
        return {name: states[name] for name in self.states}

    def _bundles(self) -> list[list[str]]:
        """Return the names with equal options together, those of the default first."""
        bundles: dict[str, list[str]] = {}
        for name, state in self.states.items():
            bundles.setdefault(repr(sorted(state.options().items())), []).append(name)
        return sorted(bundles.values(), key=lambda names: self.default not in names)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that `from_dict` reads back, keys in any order. *Pure.*"""
        common = {key: value for key in KEYS[1:] if (value := getattr(self, key)) is not None}
        return {"states": write_pairs(self.states.items(), StateConfig.to_dict), **common}


def settings_in(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of one state that variables give; refuse names that are close to one. *Pure.*

    >>> settings_in({"DUALMESH_TP_SIZE": "2", "DUALMESH_DP_SHARD": "-1"})
    {'tp_size': 2, 'dp_shard_size': -1}
    """
    check_variables(variables)
    known = {f"{PREFIX}{name.name}".upper(): name for name in FIELDS}
    short = {name.removesuffix(ENDING.upper()): field for name, field in known.items()}
    found: dict[str, Any] = {}
    for variable, text in variables.items():
        if not variable.startswith(PREFIX) or not text:
            continue
        field_ = known.get(variable) or short.get(variable)
        if field_ is not None:
            if field_.name in found:
                raise SpecError(f"environment: {variable} gives {field_.name!r} a second time. Set it once.")
            found[field_.name] = parse_setting(field_, text, f"environment: {variable}")
        elif variable == SPEC_VARIABLE:
            found["spec"] = text
    return found


def _states(data: Any, places: Places, path: tuple[str, ...], problems: list[str]) -> dict[str, StateConfig]:
    if not isinstance(data, Mapping | list | tuple) or not data:
        problems.append(f"{places.of(path)}: states is {data!r}. Give {{name: settings}}, at least one.")
        return {}
    try:
        pairs = pairs_in(places.of(path), "states", data)
    except SpecError as error:
        problems.append(str(error))
        return {}
    states: dict[str, StateConfig] = {}
    for name, settings in pairs:
        here = (*path, str(name)) if path else ()
        try:
            states[str(name)] = StateConfig.of(settings)
            states[str(name)].topology_spec()
        except DualmeshError as error:
            problems.append(_problem(places, here, f"state {name!r}", error))
    return states


def _problem(places: Places, path: tuple[str, ...], what: str, error: DualmeshError) -> str:
    """Say a problem of a state with the line of the setting that the message names first, or of the state."""
    text = str(error)
    keys = [place[len(path)] for place in places.lines if len(place) == len(path) + 1 and place[: len(path)] == path]
    named = [(text.find(key), key) for key in keys if key in text]
    here = (*path, min(named)[1]) if named else path
    return f"{places.of(here)}: {what}: {text}"


def _common(common: Mapping[str, Any], states: Mapping[str, StateConfig], places: Places) -> list[str]:
    problems = []
    for key in ("world_size", "gpus_per_node"):
        if common[key] is not None:
            try:
                positive(places.of((key,)), key, common[key])
            except DualmeshError as error:
                problems.append(str(error))
    default, backend = common["default"], common["backend"]
    if default is not None and not (isinstance(default, str) and default in states):
        problems.append(
            f"{places.of(('default',))}: default={default!r} is no state. States: {listed(states)}."
            f"{did_you_mean(default, states)}"
        )
    if backend is not None and not isinstance(backend, str):
        problems.append(f"{places.of(('backend',))}: backend={backend!r} is no name. Give for example 'torch'.")
    return problems


def _refuse(places: Places, problems: list[str]) -> None:
    if len(problems) == 1:
        raise SpecError(problems[0], problems=tuple(problems))
    if problems:
        text = "\n".join(f"  - {problem}" for problem in problems)
        raise SpecError(f"{places.source}: {len(problems)} problems.\n{text}", problems=tuple(problems))
