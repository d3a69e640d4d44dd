"""`DetachedState`: a state that came by pickle from another process. It answers sizes and ranks, and no more.

In a worker of the process that sent it (of a data loader, say) it also knows its own rank: that process'. How states
travel is in `pickling`.
"""

from collections.abc import Iterable
from typing import Any, NoReturn

from dualmesh.backend import pickling
from dualmesh.backend.state import ParallelState
from dualmesh.backend.state_plan import StatePlan, World
from dualmesh.errors import StaleStateError
from dualmesh.sharding.partition_spec import P
from dualmesh.topology.topology import Axis

ELSEWHERE = (
    "{where}: {label} came by pickle from another process ({session}), so it has sizes and ranks but no groups, meshes "
    "or collectives here. Ask for this process' own: dm.get_parallel_state_by_name({name!r}), after registering it."
)


class DetachedState(ParallelState):
    """Sizes and ranks of a state of another process; everything that needs its session is refused by name."""

    backend = "none"

    def __init__(
        self,
        names: tuple[str, ...],
        plan: StatePlan,
        session: str,
        origin: pickling.Origin,
        held: pickling.Held | None = None,
    ) -> None:
        held = held or pickling.Held((), plan.topology.world_size, ())
        super().__init__(plan, World(held.world_size, (), plan.device_type, 1, _never))
        self.names = list(names)
        self._held = held
        self._session = session
        self._origin = origin

    @property
    def session_label(self) -> str:
        return self._session

    def require_live(self, where: str) -> NoReturn:
        """Refuse: the session is another process'."""
        raise StaleStateError(
            ELSEWHERE.format(where=where, label=self.label, session=self._session, name=(self.names or ["base"])[0]),
            state=self,
        )

    @property
    def held_ranks(self) -> tuple[int, ...]:
        """The session ranks of the process that this one is, or is a worker of, where it sent the state."""
        # Asked when used: a worker is told whose it is only after it has read what it was started with.
        return self._held.ranks if pickling.speaks_for(self._held) else ()

    def own_rank(self) -> int:
        if not self.held_ranks:
            self.require_live("own_rank")
        return super().own_rank()

    @property
    def global_rank(self) -> int:  # type: ignore[override]  # of VeOmni's attributes, which are made from a table
        """The rank of the process that this one is a worker of."""
        return self.held_ranks[0] if len(self.held_ranks) == 1 else self.own_rank()

    def _group_for(self, axis: Axis) -> NoReturn:
        self.require_live("group")

    def __getattr__(self, name: str) -> Any:
        if name in ("collectives", "arrays", "programs", "host"):
            self.require_live(name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @property
    def mesh(self) -> NoReturn:
        """Refused."""
        self.require_live("mesh")

    @property
    def fsdp_mesh(self) -> NoReturn:
        """Refused."""
        self.require_live("fsdp_mesh")

    def submesh(self, *axes: str) -> NoReturn:
        self.require_live("submesh")

    def axes(self, axis: Axis) -> NoReturn:
        self.require_live("axes")

    def pspec(self, *entries: Any, partial: str | Iterable[str] = ()) -> NoReturn:
        self.require_live("pspec")

    def sharding(self, spec: P) -> NoReturn:
        self.require_live("sharding")

    def __reduce__(self) -> tuple[Any, ...]:
        held = self._held
        if pickling.speaks_for(held):  # so that workers of this worker speak for the same ranks
            held = held._replace(holders=tuple(dict.fromkeys((*held.holders, pickling.identify_process()))))
        return pickling.unpack_state, (tuple(self.names), self.plan, self._session, self._origin, held)


def _never() -> bool:
    return False
