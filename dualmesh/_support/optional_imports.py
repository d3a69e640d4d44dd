"""Modules that are imported when first used, and optional packages, missed in one sentence.

Slow modules (numpy, array-api-compat, importlib.metadata, cloudpickle) are here so that `import dualmesh` stays cheap.
Frameworks are found in `discovery`.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dualmesh.errors import MissingPackageError


def import_optional(module: str, package: str, wanted_by: str, install: str | None = None) -> Any:
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


if TYPE_CHECKING:
    import importlib.metadata as metadata

    import array_api_compat
    import cloudpickle  # type: ignore[import-untyped]
    import numpy as np

else:

    class _LazyModule(ModuleType):
        def __getattr__(self, name: str) -> Any:
            value = getattr(importlib.import_module(self.__name__), name)
            setattr(self, name, value)
            return value

    np = _LazyModule("numpy")
    array_api_compat = _LazyModule("array_api_compat")
    cloudpickle = _LazyModule("cloudpickle")
    metadata = _LazyModule("importlib.metadata")

__all__ = ["array_api_compat", "cloudpickle", "metadata", "np"]
