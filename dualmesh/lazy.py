"""Modules that are imported when first used, so that `import dualmesh` stays cheap.

Only what is slow to import and not needed by all is named here: numpy, array-api-compat, importlib.metadata, and
cloudpickle, which only `dualmesh.testing` needs. So are pictures of topologies, which know topologies and are asked for
by them.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import importlib.metadata as metadata

    import array_api_compat
    import cloudpickle  # type: ignore[import-untyped]
    import numpy as np

    import dualmesh.pictures as pictures
    import dualmesh.pictures.notebooks as notebooks
    import dualmesh.twins as twins
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
    notebooks = _LazyModule("dualmesh.pictures.notebooks")
    pictures = _LazyModule("dualmesh.pictures")
    twins = _LazyModule("dualmesh.twins")

__all__ = ["array_api_compat", "cloudpickle", "metadata", "notebooks", "np", "pictures", "twins"]
