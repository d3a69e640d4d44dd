"""`TorchBackend`: start or adopt a torch.distributed world, build states in it.

Groups are in `group_pool`, states in `state`, the mirror of the scope in `scope`.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from dualmesh._support import waits
from dualmesh._support.ports import free_port
from dualmesh.backend.array_bridge import Border
from dualmesh.backend.backend import Backend, Launch
from dualmesh.backend.group_factory import Fabric
from dualmesh.backend.group_options import GroupInUse
from dualmesh.backend.state import ParallelState
from dualmesh.backend.state_plan import StatePlan, World
from dualmesh.errors import BackendError, DualmeshError, SessionError, listed
from dualmesh.runtime.scope import set_explainer
from dualmesh_torch import private
from dualmesh_torch.agreement import agree_on, no_answer_error
from dualmesh_torch.bounded import within
from dualmesh_torch.group_factory import TorchFabric
from dualmesh_torch.interop import TorchBorder
from dualmesh_torch.mesh.group_pool import GroupPool
from dualmesh_torch.models import scoped_modules
from dualmesh_torch.regions import carry_to_workers, follow_backward, forget_scopes
from dualmesh_torch.rendezvous import Rendezvous, say_goodbye
from dualmesh_torch.scope import explain
from dualmesh_torch.state import TorchState
from dualmesh_torch.weights.carrier import TorchCarrier


class TorchBackend(Backend):
    """One process per rank: gloo on CPU, nccl (or what torch has for the accelerator) on devices."""

    name = "torch"
    leads = True

    def __init__(self) -> None:
        self._world: World | None = None
        self.pool: GroupPool | None = None
        self._rendezvous = Rendezvous()
        self._fabric: tuple[GroupPool | None, TorchFabric] = (None, TorchFabric(None))
        carry_to_workers()
        set_explainer(explain)
        follow_backward()
        private.quiet_redistribution()

    def world(self) -> World | None:
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if group is None:
            return None
        if self._world is None or self.pool is None or self.pool.default is not group:
            self._adopt(group)
        return self._world

    def start(self, launch: Launch) -> World:
        if launch.world_size not in (None, launch.process_count):
            raise SessionError(
                f"Backend 'torch': world_size={launch.world_size}, but {launch.process_count} process(es) were "
                f"launched, and each is one rank. Launch {launch.world_size} (torchrun --nproc-per-node "
                f"{launch.world_size}), or leave world_size out.",
                asked=launch.world_size,
                found=launch.process_count,
            )
        if launch.local_devices not in (None, 1):
            raise SessionError(
                f"Backend 'torch': local_devices={launch.local_devices}, but a process is one rank. Leave it out.",
                asked=launch.local_devices,
            )
        arguments: dict[str, Any] = {"rank": launch.rank, "world_size": launch.process_count}
        if launch.timeout_s is not None:
            arguments["timeout"] = timedelta(seconds=launch.timeout_s)
        communication = _communication(launch)
        try:
            store = self._rendezvous.meet(launch, f"{launch.process_count} processes, {communication}")
            dist.init_process_group(communication, store=store, **arguments)
        except DualmeshError:
            raise
        except (RuntimeError, ValueError) as error:
            raise SessionError(
                f"Backend 'torch': rank {launch.rank} of {launch.process_count} could not join the world at "
                f"{launch.init_method}: {error}. Start all processes with the same address and world size.",
                rank=launch.rank,
            ) from error
        world = self.world()
        if world is None:
            raise SessionError("Backend 'torch': the world ended while it was started.")
        return world

    def stop(self, world: World) -> None:
        if world.is_live():
            if self.pool is not None and self.pool.is_real:
                self.pool.finish(waits.timeout_s())
                if not self.pool.is_store_silent:
                    say_goodbye(private.default_store(), self.pool.session, self.pool.rank, self.pool.size)
            dist.destroy_process_group()
        forget_scopes()
        private.forget_plans()  # also of meshes that no state held: their groups are gone
        if self._world is world:
            self._world = self.pool = None

    def agreed_address(self, world: World) -> str:
        (rank,) = world.local_ranks
        try:
            return _announce_address(rank, f"dualmesh/address/{self.pool.session if self.pool is not None else ''}")
        except RuntimeError as error:
            raise no_answer_error("Backend 'torch'", rank, error) from error

    def build(self, plans: Sequence[StatePlan], world: World) -> list[ParallelState]:
        pool = self.pool
        if pool is None or not world.is_live():
            raise SessionError("Backend 'torch': the world ended. Start it again (dm.init_distributed).")
        for plan in plans:
            _check(plan)
        if pool.is_real:
            agree_on(plans, pool.rank, pool.session)
        states = [TorchState(plan, world, pool) for plan in plans]
        try:
            needs = {state: state.planned_keys() for state in states}
            if not private.has_member_groups():
                pool.make_everywhere(key for state in states for key in state.keys_of_all())
            where = f"init_parallel_state of {listed(repr(plan.name) for plan in plans)}"
            pool.acquire((key for keys in needs.values() for key in keys), self, where)
            for state, keys in needs.items():
                state.take(pool.acquire(keys, state))
        except BaseException:
            self.release(states)
            raise
        finally:
            pool.release(self)
            pool.planned.clear()
        return list(states)

    def scoped(self, target: Any, name_or_state: str | ParallelState) -> Any | None:
        return scoped_modules.scope_module(target, name_or_state) if isinstance(target, torch.nn.Module) else None

    def release(self, states: Sequence[ParallelState]) -> None:
        for state in states:
            if isinstance(state, TorchState):
                state.return_groups()

    def groups_in_use(self) -> tuple[GroupInUse, ...]:
        return tuple(
            GroupInUse(
                *(tuple(key.ranks), key.lane, key.backend, key.device_type, key.options, group.group_name),
                states=tuple(name for user in users if isinstance(user, TorchState) for name in user.names),
            )
            for key, group, users in (self.pool.in_use() if self.pool is not None else ())
        )

    def border(self) -> Border:
        return TorchBorder()

    def transfer_carrier(self) -> TorchCarrier:
        return TorchCarrier()

    def fabric(self) -> Fabric:
        self.world()
        if self._fabric[0] is not self.pool:
            self._fabric = (self.pool, TorchFabric(self.pool))
        return self._fabric[1]

    def _adopt(self, group: dist.ProcessGroup) -> None:
        if self._world is not None:
            private.forget_plans()
        forget_scopes()
        backends = _device_backends()
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        on_device = accelerator is not None and backends.get(accelerator.type, "gloo") not in ("gloo", "fake")
        self.pool = GroupPool(group, _session_number(group), backends)
        private.call_at_world_end(group, self.pool.drop_handles)
        self._world = World(
            size=group.size(),
            local_ranks=(group.rank(),),
            device_type=accelerator.type if accelerator is not None and on_device else "cpu",
            process_count=group.size(),
            is_live=lambda: dist.group.WORLD is group,
        )


def _announce_address(rank: int, slot: str) -> str:
    """Return the address that rank 0 puts into the default store: a free port, on the host of that store."""
    store: Any = private.default_store()
    if rank == 0:
        innermost = store
        while isinstance(innermost, PrefixStore):
            innermost = innermost.underlying_store
        host = innermost.host if isinstance(innermost, TCPStore) else "127.0.0.1"
        store.set(slot, f"{host}:{free_port()}")
    return str(within(waits.timeout_s(), lambda: store.get(slot)).decode())


def _communication(launch: Launch) -> str:
    """Return the communication backends of a world: gloo, beside the accelerator's where this process has one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or launch.local_rank >= torch.accelerator.device_count():
        return "gloo"
    torch.accelerator.set_device_index(launch.local_rank)
    return f"cpu:gloo,{accelerator.type}:{dist.get_default_backend_for_device(accelerator.type)}"


def _device_backends() -> dict[str, str]:
    """Return the communication backend of every device type in the default group."""
    config = dist.get_backend_config()
    pairs = (part.split(":") for part in config.split(",") if ":" in part)
    return {device: backend for device, backend in pairs}


def _session_number(group: dist.ProcessGroup) -> str:
    """Return a name for this world that all its ranks agree on and that its store has not seen. *Local.*

    Each rank counts the worlds that it joined through this store; a fresh store starts anew.
    """
    store = None if "fake" in _device_backends().values() else private.default_store()
    try:
        if store is None:
            return "0"
        return str(within(waits.timeout_s(), lambda: store.add(f"dualmesh/worlds/{group.rank()}", 1)))
    except RuntimeError as error:
        raise no_answer_error("Backend 'torch'", group.rank(), error) from error


def _check(plan: StatePlan) -> None:
    try:
        device = torch.device(plan.device_type)
    except RuntimeError as error:
        raise BackendError(
            f"Backend 'torch': device_type={plan.device_type!r} is unknown to torch: {error}.",
            device_type=plan.device_type,
        ) from error
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device.type not in ("cpu", accelerator.type if accelerator is not None else "cpu"):
        raise BackendError(
            f"Backend 'torch': device_type={plan.device_type!r}, but this process has no such device. Use 'cpu'"
            f"{f' or {accelerator.type!r}' if accelerator is not None else ''}.",
            device_type=plan.device_type,
        )
