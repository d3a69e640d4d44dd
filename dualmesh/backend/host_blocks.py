"""`HostLeaf`: blocks of one array in host memory, on their way between two worlds.

Backends make and read them (`Arrays`); `link` sends them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from dualmesh._support.optional_imports import np


class HostLeaf(NamedTuple):
    """What a process holds of one array, in host memory, as numpy's void dtypes: numpy lacks some dtypes."""

    shape: tuple[int, ...]
    """Of the global array."""
    itemsize: int
    dtype: str
    blocks: Mapping[int, Any]
    """By session rank."""

    @staticmethod
    def void(block: Any) -> Any:
        """Return a numpy array's memory as elements without a meaning, a copy. *Local.*"""
        kept = np.array(block, order="C")
        return kept.reshape(-1).view(np.uint8).view(f"V{kept.itemsize}").reshape(kept.shape)

    @staticmethod
    def room(shape: tuple[int, ...], itemsize: int) -> Any:
        """Return an empty block. *Local.*"""
        return np.empty(shape, f"V{itemsize}")

    @staticmethod
    def read(block: Any, dtype: Any) -> Any:
        """Return a block's elements with their numpy dtype. *Local.*"""
        return block.reshape(-1).view(np.uint8).view(dtype).reshape(block.shape)
