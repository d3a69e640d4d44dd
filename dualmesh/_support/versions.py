"""Versions of what dualmesh stands on, as numbers, and the refusal of one that is too old.

Which version a backend needs is in its `private`; what is installed beside it is looked at by `dualmesh doctor`.
"""

import re

from dualmesh.errors import BackendImportError

TOO_OLD = "{name} {found} is too old: dualmesh needs {least} or newer"
CURE = "pip install --upgrade '{name}>={least}'"


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version's release, without zeros at its end. *Pure.*

    >>> release("2.11.0+cu130"), release("0.10.2.dev20260101"), release("2.14.0rc1")
    ((2, 11), (0, 10, 2), (2, 14))
    """
    found = re.match(r"v?(?:\d+!)?(\d+(?:\.\d+)*)", version)
    numbers = [int(part) for part in found[1].split(".")] if found is not None else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def is_older(version: str, least: str) -> bool:
    """Tell whether a version is older than another; what has no number is not. *Pure.*"""
    return bool(release(version)) and release(version) < release(least)


def refuse_older(backend: str, version: str, least: str) -> None:
    """Refuse a framework that the backend of its name cannot stand on. *Pure.*

    Raises:
        BackendImportError: It is older than `least`.
    """
    if is_older(version, least):
        found = TOO_OLD.format(name=backend, found=version, least=least)
        cure = CURE.format(name=backend, least=least)
        raise BackendImportError(
            f"Backend {backend!r}: {found}. Install one: {cure}.", backend=backend, version=version, least=least
        )


def newer(name: str, version: str, newest: str) -> list[str]:
    """Return what doctor says of a version that is newer than the newest tested, nothing of others. *Pure.*"""
    if release(version) <= release(newest):
        return []
    found = f"{name} {version} is newer than {newest}, the newest that dualmesh was tested with"
    return [f"{found}. If something fails, try pip install '{name}<={newest}'"]
