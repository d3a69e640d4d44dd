"""Errors raised while torch.compile traces: by a function that it calls instead of tracing, so that they arrive whole.

What is refused is decided where the fault is found; states are known here by number, a constant in compiled code. Also
here, since all states are known: a forked process tells its copies of them.
"""

import os
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch

from dualmesh.errors import OutsideCompileError
from dualmesh.layout import Layout
from dualmesh.topology import Topology, combined_layout

if TYPE_CHECKING:
    from dualmesh_torch.state import TorchState

_numbers = count()
_states: "WeakValueDictionary[int, TorchState]" = WeakValueDictionary()


def numbered(state: "TorchState") -> int:
    """Return a number by which compiled code can name a state. *Local.*"""
    number = next(_numbers)
    _states[number] = state
    return number


def _forked() -> None:
    for state in list(_states.values()):
        state.forked()


os.register_at_fork(after_in_child=_forked)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def refuse_unready(number: int, where: str) -> None:
    """Raise what `require_ready` raises."""
    _states[number].check_ready(where)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def refuse_unmade(axis: Any) -> None:
    """Refuse to make a group in compiled code."""
    raise OutsideCompileError(
        f"Axis {axis!r}: its first collective makes its group, which compiled code cannot. Before compiling, call "
        f"state.warm_up({axis!r}) on every rank, or run one collective over it outside: dm.ops.all_reduce(x, "
        f"{axis!r}).",
        axis=axis,
    )


@torch.compiler.substitute_in_graph(combined_layout)
def _combined_layout(topology: Topology, axes: tuple[str, ...]) -> Layout:
    refuse_unmade(axes)
    return topology.layouts["world"]
