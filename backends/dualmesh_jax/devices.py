"""Which devices a world is over, and asking JAX for them before it starts its backend.

A world's life is in `backend`, joining other processes in `launch`, meshes over devices in `meshes`.
"""

# mypy: allow-untyped-calls
# jax leaves some of its public functions unannotated.

import os
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType

from dualmesh.errors import SessionError, listed

FLAG = "--xla_force_host_platform_device_count"
TOO_FEW = (
    "Backend 'jax': {asked} ranks were asked for, but JAX has {found} {platform} device(s). {why} {cure} before JAX is "
    "first used in this process, or ask for at most {found} ranks."
)


NO_ORDER = (
    "Backend 'jax': device_order={order!r}. Give 'topology', or different devices of JAX in rank order, from: "
    "{devices}."
)
OTHER_COUNT = (
    "Backend 'jax': local_devices={asked}, but JAX has {found} device(s) in this process. Set XLA_FLAGS={flag}={asked} "
    "(CPU) or the devices that this process may see (GPU) before JAX starts, or leave local_devices out."
)


def ordered_devices(order: Any = None) -> list[jax.Device]:
    """Return the devices in rank order; starts JAX. *Local.*

    Args:
        order: None: by (process, position among that process' devices), never by id; "topology": as JAX arranges them
            for their hardware; or some of the devices themselves.

    Raises:
        SessionError: Something else, or devices that are not JAX's or come twice.
    """
    devices = sorted(jax.devices(), key=lambda device: device.process_index)
    if order is None:
        return devices
    if isinstance(order, str) and order == "topology":
        return list(mesh_utils.create_device_mesh((len(devices),), devices, allow_split_physical_axes=True).flat)
    given = [] if isinstance(order, str) or not isinstance(order, Iterable) else list(order)
    if not given or any(device not in devices for device in given) or len(set(given)) < len(given):
        raise SessionError(NO_ORDER.format(order=order, devices=listed(devices)), device_order=order)
    return given


def axis_type(name: str | None) -> AxisType:
    """Return JAX's type of mesh axes for a name. *Pure.*

    Raises:
        SessionError: There is none.
    """
    types = {None: AxisType.Auto, "auto": AxisType.Auto, "explicit": AxisType.Explicit}
    if name is not None and not (isinstance(name, str) and name in types):
        raise SessionError(f"Backend 'jax': axis_types={name!r}. Give 'auto' or 'explicit'.", axis_types=name)
    return types[name]


def request_cpu_devices(count: int | None) -> None:
    """Ask for that many virtual CPU devices where nobody said a number and JAX has not started. *Local.*"""
    if count is None or FLAG in os.environ.get("XLA_FLAGS", "") or _configured_count() >= 0:
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # JAX has started; what it found is what there is
        return


def _configured_count() -> int:
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


def carried_by_gloo(devices: Sequence[jax.Device]) -> bool:
    """Tell whether gloo (or MPI) carries the collectives of some devices: CPUs, also of one process, in a runtime of
    processes. *Local.*
    """  # noqa: D205
    return devices[0].platform == "cpu" and jax.distributed.is_initialized()


def check_local(asked: int | None) -> None:
    """Refuse a process that holds another number of devices than it was to hold. *Local*; starts JAX."""
    found = jax.local_device_count()
    if asked not in (None, found):
        raise SessionError(OTHER_COUNT.format(asked=asked, found=found, flag=FLAG), asked=asked, found=found)
