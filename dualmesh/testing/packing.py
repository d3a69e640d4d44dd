"""Functions on their way to worker processes, which may not be able to import where they come from.

The processes are in `pools`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from dualmesh._support.optional_imports import cloudpickle

_importable: dict[str, bool] = {}


def pack(value: Any) -> bytes:
    """Return a value as bytes. *Local.*

    Functions travel by name where a fresh process can import them, and whole where it cannot: pytest's importlib mode
    loads test modules that lie on no import path.
    """
    with _whole_where_needed():
        sent: bytes = cloudpickle.dumps(value)
    return sent


@contextmanager
def _whole_where_needed() -> Iterator[None]:
    chosen = []
    for name in {name.partition(".")[0] for name in list(sys.modules)}:
        module = sys.modules.get(name)
        if name not in _importable:
            _importable[name] = module is None or _is_importable(name, module)
        if not _importable[name] and module is not None and name not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            chosen.append(module)
    try:
        yield
    finally:
        for module in chosen:
            cloudpickle.unregister_pickle_by_value(module)


def _is_importable(name: str, module: ModuleType) -> bool:
    """Tell whether a process with this one's import path gets the same top-level module or package for a name."""
    files = [file for other, one in list(sys.modules.items()) if _is_of(other, name) and (file := _file_of(one))]
    if not files or name in sys.stdlib_module_names or name in ("__main__", "__mp_main__"):
        return True
    found = next((spec for finder in sys.meta_path if (spec := finder.find_spec(name, None)) is not None), None)
    if found is None:
        return False
    own = _file_of(module)
    if own is not None:
        return found.origin is not None and Path(found.origin) == own
    folders = [Path(folder) for folder in found.submodule_search_locations or ()]
    return all(any(file.is_relative_to(folder) for folder in folders) for file in files)


def _is_of(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _file_of(module: Any) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file) if isinstance(file, str) else None
