"""Modules that are imported when first used, so that `import dualmesh` stays cheap.

Only third-party modules that the core may use (numpy, array-api-compat) are named here.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import array_api_compat
    import numpy as np
else:

    class _LazyModule(ModuleType):
        def __getattr__(self, name: str) -> Any:
            value = getattr(importlib.import_module(self.__name__), name)
            setattr(self, name, value)
            return value

    np = _LazyModule("numpy")
    array_api_compat = _LazyModule("array_api_compat")

__all__ = ["array_api_compat", "np"]
