"""What torch is and has on this machine, as plain data for `dualmesh doctor`.

Worlds are started in `backend`.
"""

from typing import Any

import torch
import torch.distributed as dist

from dualmesh._support.versions import newer
from dualmesh_torch.supported import NEWEST


def report() -> dict[str, Any]:
    """Return versions, devices and what can communicate. *Local.*

    "makes_devices": whether a world may have more ranks than there are devices; "holds_one_rank": whether each rank is
    a process.
    """
    has_cuda = torch.cuda.is_available()
    problem = None
    if not dist.is_available():
        problem = "this build of torch has no torch.distributed. Install one that has: https://pytorch.org"
    kinds = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available} if dist.is_available() else {}
    notes = newer("torch", torch.__version__, NEWEST)
    if torch.version.cuda and not has_cuda:
        found = f"torch: built for CUDA {torch.version.cuda}, but no device is visible"
        notes.append(f"{found}. Look at the driver and CUDA_VISIBLE_DEVICES")
    return {
        "version": torch.__version__,
        "platform": "cuda" if has_cuda else "cpu",
        "devices": torch.cuda.device_count() if has_cuda else 1,
        "makes_devices": not has_cuda,
        "holds_one_rank": True,
        "communicates": [name for name, is_there in kinds.items() if is_there()],
        "started_early": dist.is_available() and dist.is_initialized(),
        "problem": problem,
        "notes": notes,
    }
