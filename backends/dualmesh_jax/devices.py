"""Which devices a world is over, and asking JAX for them before it starts its backend.

A world's life is in `backend`, meshes over devices in `meshes`.
"""

# mypy: allow-untyped-calls
# jax leaves some of its public functions unannotated.

import os
from collections.abc import Sequence

import jax

from dualmesh.backend import Launch
from dualmesh.errors import SessionError

FLAG = "--xla_force_host_platform_device_count"
TOO_FEW = (
    "Backend 'jax': {asked} ranks were asked for, but JAX has {found} {platform} device(s). {why} {cure} before JAX is "
    "first used in this process, or ask for at most {found} ranks."
)


def ordered_devices() -> list[jax.Device]:
    """Return all devices by (process, position among that process' devices), never by id; starts JAX. *Local.*"""
    return sorted(jax.devices(), key=lambda device: device.process_index)


def request_cpu_devices(count: int | None) -> None:
    """Ask for that many virtual CPU devices where nobody said a number and JAX has not started. *Local.*"""
    if count is None or FLAG in os.environ.get("XLA_FLAGS", "") or _configured() >= 0:
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # JAX has started; what it found is what there is
        return


def _configured() -> int:
    count: int = getattr(jax.config, "jax_num_cpu_devices", -1)
    return count


def too_few(asked: int, devices: Sequence[jax.Device]) -> SessionError:
    """Return the error for a world that JAX has too few devices for."""
    platform = devices[0].platform
    if platform != "cpu":
        why, cure = "", f"For virtual CPU devices set JAX_PLATFORMS=cpu and XLA_FLAGS={FLAG}={asked}"
    elif FLAG in os.environ.get("XLA_FLAGS", ""):
        why, cure = "XLA_FLAGS sets their number.", f"Set XLA_FLAGS={FLAG}={asked}"
    else:
        why = "Their number is fixed once JAX has started."
        cure = f"Call jax.config.update('jax_num_cpu_devices', {asked}), or set XLA_FLAGS={FLAG}={asked},"
    message = TOO_FEW.format(asked=asked, found=len(devices), platform=platform, why=why, cure=cure)
    return SessionError(message, asked=asked, found=len(devices))


def launched(launch: Launch, timeout_s: float) -> None:
    """Join the other processes, unless the user did. *Collective over all processes, with a timeout.*

    Raises:
        SessionError: They could not be reached.
    """
    if jax.distributed.is_initialized():
        return
    try:
        jax.distributed.initialize(
            _coordinator(launch), launch.process_count, launch.rank, initialization_timeout=max(1, int(timeout_s))
        )
    except RuntimeError as error:
        raise SessionError(
            f"Backend 'jax': process {launch.rank} of {launch.process_count} could not join at {launch.init_method}: "
            f"{error}. Start all processes, and call dm.init_distributed before JAX is first used.",
            rank=launch.rank,
        ) from error


def _coordinator(launch: Launch) -> str:
    if launch.init_method is None or launch.init_method == "env://":
        return f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT', '29500')}"
    return launch.init_method.removeprefix("tcp://")
