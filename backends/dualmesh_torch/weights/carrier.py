"""`TorchCarrier`: the process group of a transfer group, beside each process' own world.

Who joins is settled in `dualmesh.weights.group`. The group meets in a store of its own, which rank 0 serves.
"""

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dualmesh.backend.carrier import Carrier
from dualmesh.errors import AgreementError, listed
from dualmesh_torch import private


class TorchCarrier(Carrier):
    """gloo on CPU; beside it the accelerator's where this process has one. All members must have the same."""

    backend = "torch"

    def __init__(self) -> None:
        self._store: Any = None

    def offer(self, rank: int) -> dict[str, Any]:
        said: dict[str, Any] = {"communication": _communication()}
        if rank == 0:
            self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            said["port"] = self._store.port
        return said

    def join(self, name: str, rank: int, hosts: list[str], told: list[dict[str, Any]], timeout_s: float) -> Any:
        if not private.has_member_groups():
            return None
        every = [one["communication"] for one in told]
        if len(set(every)) > 1:
            raise AgreementError(
                f"transfer_group: the ranks would communicate through {listed(every)}. Hide the accelerators of all "
                f"(CUDA_VISIBLE_DEVICES=), or of none.",
                found=tuple(every),
            )
        wait = timedelta(seconds=timeout_s)
        if self._store is None:
            self._store = TCPStore(hosts[0], told[0]["port"], is_master=False, wait_for_workers=False, timeout=wait)
        return private.lone_group(rank, len(told), name, every[rank], self._store, wait)

    def is_live(self, native: Any) -> bool:
        try:
            dist.get_backend(native)
        except (ValueError, RuntimeError):
            return False
        return True

    def end(self, native: Any) -> None:
        if native is not None:
            with contextlib.suppress(ValueError):  # its world may have ended it
                dist.destroy_process_group(native)
        self._store = None


def _communication() -> str:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return "gloo"
    return f"cpu:gloo,{accelerator.type}:{dist.get_default_backend_for_device(accelerator.type)}"
