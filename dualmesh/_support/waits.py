"""How long things wait for each other, in seconds: given, from the environment, or the default."""

import math
import os
from collections.abc import Mapping
from typing import Any

from dualmesh.errors import ArgumentError, LaunchError

TIMEOUT_VARIABLE = "DUALMESH_TIMEOUT_S"


DEFAULT_TIMEOUT_S = 60.0


def timeout_s(given: float | None = None, variables: Mapping[str, str] | None = None) -> float:
    """Return how long agreements wait, in seconds: the argument, DUALMESH_TIMEOUT_S, or 60. *Local.*"""
    if given is not None:
        value: float | str = given
    else:
        value = (os.environ if variables is None else variables).get(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT_S)
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        source = "timeout_s" if given is not None else TIMEOUT_VARIABLE
        raise LaunchError(f"{source}={value!r} is no time. Give seconds above 0.", value=value)
    return seconds


def check_timeout(where: str, timeout_s: Any) -> float:
    """Return a time in seconds, or refuse it. *Pure.*"""
    if not is_duration(timeout_s):
        raise ArgumentError(f"{where}: {timeout_s!r} is no time. Give seconds above 0.", timeout_s=timeout_s)
    return float(timeout_s)


def is_duration(value: Any) -> bool:
    """Tell whether a value is a number of seconds that one can wait. *Pure.*"""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
