"""Settings of states as command-line flags: absl (`define_parallel_flags`) and argparse (`add_parallel_arguments`).

Which settings there are is in `schema`; flags win over variables, which win over a file.
"""

import argparse
import os
from collections.abc import Mapping
from typing import Any

from dualmesh._support.optional_imports import import_optional
from dualmesh.backend.state import ParallelState
from dualmesh.config.files import Places
from dualmesh.config.named_states import DEFAULT_NAME, FILE_VARIABLE, SPEC_VARIABLE, Configuration, settings_in
from dualmesh.config.schema import FIELDS, parse_setting
from dualmesh.errors import SpecError

__all__ = [
    "add_parallel_arguments",
    "config_from_arguments",
    "config_from_flags",
    "define_parallel_flags",
    "init_from_flags",
]

FILE = ("parallel_config", f"YAML or TOML file of named states; else {FILE_VARIABLE}")
NAME = ("parallel_state", "which state of the file the sizes are for; else its default")
SPEC = ("parallel_spec", f"axes in one line, for example 'dp* tp2'; else {SPEC_VARIABLE}")
OTHERS = (FILE, NAME, SPEC)


def define_parallel_flags(flag_values: Any = None) -> None:
    """Define one absl flag per setting, and --parallel_config, --parallel_state, --parallel_spec. *Local.*

    Args:
        flag_values: Where to define them; None: absl's own `FLAGS`.

    Raises:
        MissingPackageError: absl is not installed.
    """
    flags = import_optional("absl.flags", "absl-py", "dm.flags")
    values = flags.FLAGS if flag_values is None else flag_values
    for setting in FIELDS:
        flags.DEFINE_string(setting.name, None, setting.help, flag_values=values, module_name="dualmesh.config.flags")
    for name, words in OTHERS:
        flags.DEFINE_string(name, None, words, flag_values=values, module_name="dualmesh.config.flags")


def config_from_flags(flag_values: Any = None, variables: Mapping[str, str] | None = None) -> Configuration:
    """Return what parsed absl flags say, then variables, then the file. *Local.*

    Raises:
        SpecError: Nothing is said, or something that cannot be.
    """
    flags = import_optional("absl.flags", "absl-py", "dm.flags")
    values = flags.FLAGS if flag_values is None else flag_values
    names = [setting.name for setting in FIELDS] + [name for name, _ in OTHERS]
    return _configuration({name: values[name].value for name in names}, variables)


def init_from_flags(flag_values: Any = None) -> dict[str, ParallelState]:
    """Register the states that parsed absl flags describe. *Collective over their ranks.*

    Raises:
        SpecError: They cannot be; nothing was created.
    """
    return config_from_flags(flag_values).init()


def add_parallel_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one option per setting to an argparse parser, the same as the absl flags. *Local.*"""
    group = parser.add_argument_group("parallel topology")
    for name, words in [(setting.name, setting.help) for setting in FIELDS] + list(OTHERS):
        dashed = f"--{name.replace('_', '-')}"
        group.add_argument(f"--{name}", *([dashed] if dashed != f"--{name}" else []), dest=name, help=words)


def config_from_arguments(arguments: argparse.Namespace, variables: Mapping[str, str] | None = None) -> Configuration:
    """Return what parsed arguments say, then variables, then the file. *Local.*

    Raises:
        SpecError: Nothing is said, or something that cannot be.
    """
    names = [setting.name for setting in FIELDS] + [name for name, _ in OTHERS]
    return _configuration({name: getattr(arguments, name, None) for name in names}, variables)


def _configuration(given: Mapping[str, str | None], variables: Mapping[str, str] | None) -> Configuration:
    variables = os.environ if variables is None else variables
    settings = settings_in(variables)
    for setting in FIELDS:
        text = given[setting.name]
        if text is not None:
            settings[setting.name] = parse_setting(setting, text, f"--{setting.name}")
    if given[SPEC[0]] is not None:
        settings["spec"] = given[SPEC[0]]
    file, name = given[FILE[0]] or variables.get(FILE_VARIABLE), given[NAME[0]]
    if file:
        found = Configuration.from_file(file)
        return found.changed(settings, name) if settings or name else found
    if not settings:
        raise SpecError(
            f"No parallel settings are given. Give sizes (--dp_shard_size=-1 --tp_size=2), --{SPEC[0]} or --{FILE[0]}."
        )
    return Configuration.from_dict({"states": {name or DEFAULT_NAME: settings}}, Places("flags"))
