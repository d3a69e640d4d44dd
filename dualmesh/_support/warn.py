"""Warnings that point at the caller's own line, however deep in dualmesh they are found."""

import inspect
import warnings

from dualmesh.errors import StateWarning


def caution(message: str) -> None:
    """Warn with a `StateWarning` at the innermost line that is not dualmesh's or a backend's. *Local.*"""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").startswith("dualmesh"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, StateWarning, stacklevel=level + 1)
