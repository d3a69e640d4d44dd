"""What lower packages call and higher ones provide: the root says where it is, and it is loaded when it is called.

So a topology can show itself without knowing how pictures are made: imports run one way (`docs/design.md`).
"""

import importlib
from typing import Any

_homes: dict[str, str] = {}


def provide(**homes: str) -> None:
    """Say which modules provide what lower packages call. *Local.*

    Args:
        homes: The dotted name of a module, by the name that lower packages call it.
    """
    _homes.update(homes)


def provided(name: str) -> Any:
    """Return a module that a higher package provides. *Local*; imported by the first call."""
    return importlib.import_module(_homes[name])
