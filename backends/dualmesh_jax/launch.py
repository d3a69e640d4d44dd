"""Joining the other processes: where the launcher or the caller says, or as JAX finds out about its cluster.

Which devices the processes then hold is in `devices`, how they wait for each other in `rendezvous`.
"""

# mypy: allow-untyped-calls
# jax leaves some of its public functions unannotated.

import os
from typing import Any

import jax

from dualmesh.backend.backend import Launch
from dualmesh.errors import LaunchError, SessionError
from dualmesh.runtime.environment import DETECT
from dualmesh_jax import private
from dualmesh_jax.rendezvous import meet

COORDINATOR = "JAX_COORDINATOR_ADDRESS"
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
"""JAX's variable: whether it takes three quarters of a GPU's memory when it starts."""
TOOK_MEMORY = (
    "Backend 'jax': JAX has started already in this process and taken most of the device's memory, which torch needs "
    f"too. Call dm.init_distributed before the first use of JAX, or set {PREALLOCATE}=false."
)
NO_CLUSTER = (
    "init_distributed: JAX could not find out which processes are meant: {error} JAX knows SLURM, Open MPI, Cloud TPUs "
    "and Kubernetes. Under other launchers set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or give rank, world_size "
    "and init_method='tcp://host:port'."
)
TOO_LATE = (
    "Backend 'jax': JAX has started already in this process, so it cannot join the others any more. Call "
    "dm.init_distributed, or jax.distributed.initialize, before the first use of jax.devices, jax.jit or any array."
)


def joins_others(launch: Launch) -> bool:
    """Tell whether a launch is one of several processes: it says so, or JAX is to find out. *Pure.*"""
    return launch.process_count > 1 or launch.init_method == DETECT


def join(launch: Launch, timeout_s: float) -> None:
    """Join the other processes, unless the user did. *Collective over all processes, with a timeout.*

    Raises:
        SessionError: They could not be reached, or JAX has started already.
        LaunchError: JAX was to find out about its cluster, and there is none that it knows.
    """
    if jax.distributed.is_initialized():
        return
    if private.backend_is_initialized():  # said before anybody waits for this process
        raise SessionError(TOO_LATE)
    if launch.process_count == 1:
        _detect(timeout_s)
        return
    address = coordinator(launch)
    meet(address, launch.rank, launch.process_count, timeout_s)
    place = {"coordinator_address": address, "num_processes": launch.process_count, "process_id": launch.rank}
    only = {"local_device_ids": [launch.local_rank]} if launch.shares_devices or launch.has_own_device else {}
    _initialize(timeout_s, **place, **only)


def coordinator(launch: Launch) -> str:
    """Return host:port of JAX's coordinator, which process 0 starts. *Local.*

    The launcher's port is taken: torchrun's own store listens there, or torch's in the same job. JAX takes the next.
    """
    named = os.environ.get(COORDINATOR)
    if named:
        return named
    environments = f"tcp://{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT', '29500')}"
    method = environments if launch.init_method in (None, "env://") else launch.init_method
    host, _, port = method.removeprefix("tcp://").rpartition(":")
    is_taken = launch.by_launcher or method == environments
    return f"{host}:{int(port) + 1}" if is_taken else f"{host}:{port}"


def leave_memory() -> None:
    """Keep JAX from taking most of the device's memory at its start: another framework computes there. *Local.*

    Raises:
        SessionError: JAX has started already and took it.
    """
    if os.environ.get(PREALLOCATE, "").lower() in ("false", "0"):
        return
    if private.backend_is_initialized():
        raise SessionError(TOOK_MEMORY)
    os.environ[PREALLOCATE] = "false"


def _detect(timeout_s: float) -> None:
    try:
        _initialize(timeout_s)
    except (ValueError, TypeError, ImportError) as error:
        raise LaunchError(NO_CLUSTER.format(error=error)) from error


def _initialize(timeout_s: float, **place: Any) -> None:
    try:
        jax.distributed.initialize(**place, initialization_timeout=max(1, int(timeout_s)))
    except RuntimeError as error:
        raise SessionError(
            f"Backend 'jax': this process ({place}) could not join the others: {error}. Start all processes, with "
            f"the same address and number of processes.",
            place=place,
        ) from error
