"""The public face of the package: every name is loaded from its home when it is first asked for.

Which names there are is in `dualmesh/__init__.py`; slow imports inside modules are in `optional_imports`.
"""

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any


class _Face(ModuleType):
    """A package in which a public name wins over a submodule that is called the same (`session`, `nodes`, `scoped`).

    Python binds every submodule to its package when it is imported, wherever that happens
    (https://docs.python.org/3/reference/import.html#submodules).
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and self.__dict__["_homes"].get(name, value) is not value):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Callable[[str], Any], tuple[str]]:
        """Travel by name: functions that name the package go to other processes, as tests' closures do."""
        return importlib.import_module, (self.__name__,)


def face(
    package: str, modules: Iterable[str], homes: Mapping[str, str], *, base: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package whose names are loaded when asked for. *Local.*

    Args:
        package: Its name.
        modules: Submodules that are public names, by their paths; the last part is the name.
        homes: Names by the submodule that they are loaded from, several in one string.
        base: The package that homes are in; None: the package itself.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}
    module_of = {path.rpartition(".")[2]: path for path in modules}
    public = {*module_of, *home_of}
    module = sys.modules[package]
    module.__dict__["_homes"] = home_of
    module.__class__ = _Face

    def find(name: str) -> Any:
        if name in home_of:
            value = getattr(importlib.import_module(f"{base or package}.{home_of[name]}"), name)
            module.__dict__[name] = value
            return value
        if name in module_of:
            return importlib.import_module(f"{base or package}.{module_of[name]}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find, lambda: sorted({*module.__dict__, *public})
