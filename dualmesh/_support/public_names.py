"""The public names of a package: each is loaded from its home when it is first asked for.

Which names there are is in the package's `__init__`; slow imports inside modules are in `optional_imports`.
"""

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def load_on_demand(
    package: str, modules: Iterable[str], homes: Mapping[str, str], *, base: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package whose names are loaded when asked for. *Local.*

    No module of the package may be called like a name that is no module: Python binds every module to its package
    whenever it is imported, and would put it in the name's place.

    Args:
        package: Its name.
        modules: Modules that are public names, by their paths; the last part is the name.
        homes: Names by the module that they are loaded from, several in one string.
        base: The package that these paths are in; None: the package itself.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}
    module_of = {path.rpartition(".")[2]: path for path in modules}
    bound = sys.modules[package].__dict__

    def find(name: str) -> Any:
        if name in home_of:
            value = bound[name] = getattr(importlib.import_module(f"{base or package}.{home_of[name]}"), name)
            return value
        if name in module_of:
            return importlib.import_module(f"{base or package}.{module_of[name]}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find, lambda: sorted({*bound, *module_of, *home_of})
