"""Errors raised while torch.compile traces: by functions that it calls instead of tracing, so that they arrive whole.

Tracing stops where dualmesh begins to refuse something, and what is compiled is run as it is, which raises the error
(`private.Refusal`). What is refused is decided where the fault is found. Also here, since all states are known: a
forked process tells its copies of them.
"""

import os
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch

from dualmesh import errors
from dualmesh.backend.transpose_rules import call, gradient
from dualmesh.errors import OutsideCompileError
from dualmesh.runtime import single_process
from dualmesh.topology.layout import Layout, clash
from dualmesh.topology.topology import Topology, combined_layout
from dualmesh_torch import private

if TYPE_CHECKING:
    from dualmesh_torch.state import TorchState

CAUGHT = OutsideCompileError(
    "torch.compile: the compiled code catches an error of dualmesh's, which compiled code cannot. Ask before, instead "
    "of catching (axis in state.axis_names, state.is_member), or leave fullgraph=True out."
)
UNMADE = (
    "Axis {axis!r}: its first collective makes its group, which compiled code cannot. Before compiling, call "
    "state.warm_up({axis!r}) on every rank, or run one collective over it outside: dm.ops.all_reduce(x, {axis!r})."
)
_states: "WeakSet[TorchState]" = WeakSet()


def tell_when_forked(state: "TorchState") -> None:
    """Tell the copy of a state in a forked process that it is one. *Local.*"""
    _states.add(state)


def _mark_forked() -> None:
    for state in list(_states):
        state.forked()


os.register_at_fork(after_in_child=_mark_forked)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def refuse() -> None:
    """Stop tracing, and raise what the function raises that is compiled."""
    if private.is_tracing():  # else the code after a graph break runs as it is, and refuses by itself
        raise private.refusal(CAUGHT)


@torch.compiler.substitute_in_graph(errors.refusing)
def _refusing() -> None:
    refuse()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _ask_several_processes() -> str | None:
    return single_process.find_several_processes()


@torch.compiler.substitute_in_graph(single_process.find_several_processes)
def _several_processes() -> str | None:
    found: str | None = _ask_several_processes()  # it reads the environment
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def refuse_unmade(axis: Any) -> None:
    """Refuse to make a group in compiled code."""
    if private.is_tracing():
        raise private.refusal(OutsideCompileError(UNMADE.format(axis=axis), axis=axis), is_final=True)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def refuse_gradient(axis: Any, op: str) -> None:
    """Refuse a reduction that has no gradient: compiled code holds its backward too."""
    if not private.is_tracing():
        return
    try:
        gradient(call("all_reduce", axis, 2, op=op))
    except errors.NotDifferentiableError as error:
        raise private.refusal(error, is_final=True) from None


@torch.compiler.substitute_in_graph(combined_layout)
def _combined_layout(topology: Topology, axes: tuple[str, ...]) -> Layout:
    for axis in axes:
        if axis not in topology.layouts:
            refuse()
    if clash([topology.layouts[axis] for axis in axes]) is not None:
        refuse()
    refuse_unmade(axes)
    return topology.layouts["world"]
