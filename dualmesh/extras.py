"""Optional packages (absl, rich, PyYAML, matplotlib): imported when something asks for them, or missed in one sentence.

Slow modules that are always there are in `lazy`, frameworks in `discovery`.
"""

import importlib
from typing import Any

from dualmesh.errors import MissingPackageError


def imported(module: str, package: str, wanted_by: str, install: str | None = None) -> Any:
    """Import a module of an optional package. *Local.*

    Args:
        module: The module, for example "yaml".
        package: What to install, for example "PyYAML".
        wanted_by: Who asks, first in the message.
        install: What to install instead of the package alone, for example an extra.

    Raises:
        MissingPackageError: The package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
    raise MissingPackageError(
        f"{wanted_by}: the package {package!r} is not installed. pip install {install or package}", package=package
    )
