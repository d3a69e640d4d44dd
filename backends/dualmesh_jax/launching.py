"""Joining the other processes: from torchrun's variables, a given address, or what JAX finds out about its cluster.

Which devices the processes then hold is in `devices`, how they wait for each other in `meeting`.
"""

# mypy: allow-untyped-calls
# jax leaves some of its public functions unannotated.

import os
from typing import Any

import jax

from dualmesh.backend import Launch
from dualmesh.environment import DETECT
from dualmesh.errors import LaunchError, SessionError
from dualmesh_jax import private
from dualmesh_jax.meeting import meet

COORDINATOR = "JAX_COORDINATOR_ADDRESS"
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
"""JAX's variable: whether it takes three quarters of a GPU's memory when it starts."""
TOOK_MEMORY = (
    "Backend 'jax': JAX has started already in this process and taken most of the device's memory, which torch needs "
    f"too. Call dm.init_distributed before the first use of JAX, or set {PREALLOCATE}=false."
)
SLURM_STEP = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
"""What a task of a SLURM step has, and JAX reads."""
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
    """Tell whether a launch is one of several processes: it says so, JAX is to find out, or SLURM runs tasks. *Local.*

    torchrun's variables and arguments win over SLURM's: inside a SLURM task, torchrun's workers are not SLURM's tasks.
    """
    return launch.process_count > 1 or launch.init_method == DETECT or (launch.init_method is None and _is_slurm_step())


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
    only = {"local_device_ids": [launch.local_rank]} if launch.shares_devices else {}
    _initialize(timeout_s, **place, **only)


def coordinator(launch: Launch) -> str:
    """Return host:port of JAX's coordinator, which process 0 starts. *Local.*

    MASTER_PORT is taken: torchrun's own store listens there, or torch's in the same job. JAX takes the next port.
    """
    named = os.environ.get(COORDINATOR)
    if named:
        return named
    method = "env://" if launch.init_method is None else launch.init_method
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", "29500")
    if method in ("env://", f"tcp://{host}:{port}"):
        return f"{host}:{int(port) + 1}"
    return method.removeprefix("tcp://")


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


def _is_slurm_step() -> bool:
    said = [os.environ.get(name, "") for name in SLURM_STEP]
    return all(said) and said[2].isdecimal() and int(said[2]) > 1
