"""Which backends there are, and which one is meant when none is named.

What a backend must be able to do is in `backend`.
"""

import importlib.util
import os
import sys
import threading
from typing import TYPE_CHECKING

from dualmesh._support.optional_imports import metadata
from dualmesh.backend.backend import Backend
from dualmesh.errors import BackendError, BackendImportError, did_you_mean, listed

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "dualmesh.backends"
OWN = "dualmesh-topology"
VARIABLE = "DUALMESH_BACKEND"
_COMMUNICATION = ("nccl", "gloo", "mpi", "ucc", "xccl", "hccl", "rccl", "fake")

_loaded: dict[str, Backend] = {}
_lock = threading.RLock()


def available() -> "dict[str, EntryPoint]":
    """Return the entry points of all backends by name; imports none of them. *Local.*"""
    return {point.name: point for point in metadata.entry_points(group=GROUP)}


def loaded() -> dict[str, Backend]:
    """Return the backends imported so far by name. *Local.*"""
    return dict(_loaded)


def load(name: str) -> Backend:
    """Import a backend, once per process. *Local.*

    Raises:
        BackendError: No backend has this name.
        BackendImportError: It does not import.
    """
    if not isinstance(name, str):
        raise BackendError(f"Backend {name!r} is no name. Backends: {listed(available())}.", backend=name)
    with _lock:
        if name in _loaded:
            return _loaded[name]
        point = available().get(name)
        if point is None:
            raise _unknown(name)
        try:
            factory = point.load()
        except BackendImportError:  # it says itself what is wrong, and what to do
            raise
        except (ImportError, AttributeError) as error:
            raise _unimportable(name, point, error) from (None if _is_absent(name, error) else error)
        if not (isinstance(factory, type) and issubclass(factory, Backend)):
            raise BackendError(
                f"Backend {name!r}: its entry point {point.value} is {factory!r}. It must name a subclass of "
                f"dualmesh.backend.Backend.",
                backend=name,
            )
        return _loaded.setdefault(name, factory())


def choose(name: str | None, session_backends: list[str]) -> Backend:
    """Return the backend meant. *Local.*

    In this order: the argument, the session's, DUALMESH_BACKEND, the one with a live world, the one framework
    imported, the only one installed.

    Raises:
        BackendError: Nothing decides; the message says how to choose.
    """
    if name is not None:
        return load(name)
    if session_backends:
        return load(session_backends[-1])
    if os.environ.get(VARIABLE):
        return load(os.environ[VARIABLE])
    frameworks = [point for point in available() if point != "sim"]
    imported = [framework for framework in frameworks if framework in sys.modules]
    live = [framework for framework in imported if load(framework).world() is not None]
    installed = [framework for framework in frameworks if importlib.util.find_spec(framework) is not None]
    for candidates in (live, imported, installed or ["sim"]):
        if len(candidates) == 1:
            return load(candidates[0])
    raise BackendError(
        f"Backend: none was named, and several would do (live worlds: {listed(live)}; imported: {listed(imported)}; "
        f"installed: {listed(installed)}). Pass backend='torch' or 'jax', or set {VARIABLE}.",
        candidates=tuple(installed),
    )


def _is_absent(name: str, error: BaseException) -> bool:
    """Tell whether the framework itself is missing, rather than broken."""
    return isinstance(error, ModuleNotFoundError) and error.name == name


def requirements(extra: str) -> str:
    """Return what an extra of dualmesh asks for, as pip takes it: these packages are in every index. *Local.*

    >>> requirements("torch")
    "'torch>=2.11'"
    """
    parts = [line.partition(";") for line in metadata.requires(OWN) or ()]
    asked = [named.strip() for named, _, marker in parts if marker.split("==")[-1].strip(" '\"") == extra]
    return " ".join(f"'{named}'" for named in asked) or extra


def _unimportable(name: str, point: "EntryPoint", error: BaseException) -> BackendImportError:
    package = point.dist.name if point.dist is not None else point.module
    cure = f"pip install {requirements(name)}" if package == OWN else f"See the package {package!r}, which ships it"
    found = f"{name} is not installed" if _is_absent(name, error) else f"{type(error).__name__}: {error}"
    return BackendImportError(f"Backend {name!r} could not be imported: {found}. {cure}.", backend=name)


def _unknown(name: str) -> BackendError:
    names = list(available())
    if name in _COMMUNICATION:
        return BackendError(
            f"Backend {name!r}: that is a communication backend, which torch chooses from the device type. dualmesh "
            f"backends are frameworks: {listed(names)}. Did you mean backend='torch', device_type="
            f"{'cuda' if name in ('nccl', 'rccl') else 'cpu'!r}?",
            backend=name,
        )
    return BackendError(f"No backend {name!r}. Backends: {listed(names)}.{did_you_mean(name, names)}", backend=name)
