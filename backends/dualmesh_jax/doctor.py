"""What JAX is and has on this machine, as plain data for `dualmesh doctor`.

Worlds are started in `backend`.
"""

# mypy: allow-untyped-calls
# jax leaves some of its public functions unannotated.

import os
from typing import Any

import jax

from dualmesh._support.versions import newer
from dualmesh_jax import private
from dualmesh_jax.devices import FLAG
from dualmesh_jax.supported import NEWEST


def report() -> dict[str, Any]:
    """Return versions, devices and whether JAX had started before it was asked; starts JAX. *Local.*

    "makes_devices": whether a world may have more ranks than there are devices; "holds_one_rank": whether each rank is
    a process.
    """
    started_early = private.backend_is_initialized()
    count: int = getattr(jax.config, "jax_num_cpu_devices", -1)
    is_fixed = started_early or count >= 0 or FLAG in os.environ.get("XLA_FLAGS", "")
    devices = jax.devices()
    platform = devices[0].platform
    return {
        "version": jax.__version__,
        "platform": platform,
        "devices": len(devices),
        "makes_devices": platform == "cpu" and not is_fixed,
        "holds_one_rank": False,
        "communicates": ["gloo"] if platform == "cpu" else ["nccl"] if platform == "gpu" else [platform],
        "started_early": started_early,
        "problem": None,
        "notes": newer("jax", jax.__version__, NEWEST),
    }
