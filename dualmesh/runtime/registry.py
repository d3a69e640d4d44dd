"""Names to states, and what a state is to the state: the two maps, with one owner.

Also which names compiled code looked up, and what those that changed mean now. Which state is ambient is in `scope`;
building states is in `init`.
"""

import threading
from collections.abc import Callable, Hashable

from dualmesh._support.checks import check_flag, is_switched_on
from dualmesh._support.warn import caution
from dualmesh.backend.state import ParallelState
from dualmesh.backend.state_plan import StatePlan
from dualmesh.errors import TakenNameError, UnknownStateError, did_you_mean, listed

STRICT_VARIABLE = "DUALMESH_STRICT"

Naming = frozenset[tuple[str, Hashable]]
"""(name, what it means now) of names that compiled code looked up and that meant something else then."""


class Registry:
    """The states of one process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.named: dict[str, ParallelState] = {}
        """States by name; one dict for ever, so that others may keep it."""
        self._states: dict[StatePlan, ParallelState] = {}
        self.has_several = False
        """Whether states of different topologies are registered."""
        self._strict: bool | None = None
        self._cleared: set[str] = set()
        """Names that states had before."""
        self.naming: Naming = frozenset()
        """Equal whenever every name that compiled code looked up means the same: what caches of such code key on."""
        self._meant: dict[str, Hashable] = {}  # what each name meant when compiled code first looked it up
        self._compilers: tuple[tuple[Callable[[], bool], Callable[[Naming], object]], ...] = ()

    def add_compiler(self, is_compiling: Callable[[], bool], rekey: Callable[[Naming], object]) -> None:
        """Let a framework say whether this thread is compiling, and learn what its caches must key on. *Local.*"""
        with self.lock:
            self._compilers = (*self._compilers, (is_compiling, rekey))
            rekey(self.naming)

    def note_compiled(self, name: str) -> None:
        """Remember that code which is being compiled looked up a name, registered or not. *Local.*"""
        if name not in self._meant:
            with self.lock:
                self._meant.setdefault(name, self._meaning(name))

    def _meaning(self, name: str) -> Hashable:
        state = self.named.get(name)
        return None if state is None else state.meaning

    def _rekey(self) -> None:
        """Tell compilers where a name that compiled code looked up has another meaning than it had."""
        with self.lock:
            found = ((name, self._meaning(name), meant) for name, meant in list(self._meant.items()))
            naming = frozenset((name, now) for name, now, meant in found if now != meant)
            if naming != self.naming:
                self.naming = naming
                for _, rekey in self._compilers:
                    rekey(naming)

    def get(self, name: str) -> ParallelState:
        """Return the state of a name. *Local.*

        Raises:
            UnknownStateError: The name is not registered; the message lists those that are.
        """
        for is_compiling, _ in self._compilers:
            if isinstance(name, str) and is_compiling():
                self.note_compiled(name)
        try:
            return self.named[name]
        except (KeyError, TypeError):
            names = list(self.named)
            cleared = isinstance(name, str) and name in self._cleared
            end = " any more: it was cleared" if cleared else ""
            hint = " Initialize it again." if cleared else did_you_mean(name, names)
            raise UnknownStateError(
                f"Parallel state {name!r} is not registered{end}. Registered names: {listed(names)}.{hint}",
                name=name,
                names=names,
            ) from None

    def names(self) -> list[str]:
        """Return all registered names, first one first. *Local.*"""
        return list(self.named)

    def states(self) -> list[ParallelState]:
        """Return all states. *Local.*"""
        return list(self._states.values())

    def find(self, plan: StatePlan) -> ParallelState | None:
        """Return the live state that is what the plan says, or None. *Local.*"""
        state = self._states.get(plan)
        return state if state is not None and state.is_live else None

    def keep(self, state: ParallelState) -> None:
        """Register a state under no name of its own: it answers to those of its twin. *Local.*"""
        self._states[state.plan] = state
        self._count()

    def add(self, name: str, state: ParallelState) -> None:
        """Register a state under a name; `state` may have other names already. *Local.*"""
        self.named[name] = state
        self._states[state.plan] = state
        self._count()
        if name not in state.names:
            state.names.append(name)
        self._rekey()

    def unname(self, name: str) -> None:
        """Take one name from its state, which keeps its others. *Local.*"""
        self.named.pop(name).names.remove(name)
        self._rekey()

    def taken(self, name: str, plan: StatePlan) -> ParallelState | None:
        """Return the live state that already has the name, after a warning, or None. *Local.*

        Raises:
            TakenNameError: Strict mode, and the plan differs.
        """
        state = self.named.get(name)
        if state is None or not state.is_live:
            return None
        if state.plan == plan:
            message = f"Parallel state {name!r} is already registered; it is returned as it is."
            caution(message)
            return state
        message = f"Parallel state {name!r} is already registered as {_describe_plan(state.plan)}; asked for now: "
        message += f"{_describe_plan(plan)}."
        if self.strict:
            cure = "Use another name, or clear_parallel_state() first."
            raise TakenNameError(f"{message} {cure}", name=name, found=state.plan, asked=plan)
        caution(
            f"{message} The registered state is returned and the new settings are ignored. Use another name, or make "
            f"this an error with dm.strict(True)."
        )
        return state

    @property
    def strict(self) -> bool:
        """Whether a taken name with other settings is an error."""
        if self._strict is None:
            return is_switched_on(STRICT_VARIABLE)
        return self._strict

    @strict.setter
    def strict(self, on: bool) -> None:
        self._strict = on

    def drop_name(self, name: str) -> ParallelState:
        """Forget a name and return its state, which keeps its other names. *Local.*

        Raises:
            UnknownStateError: The name is not registered.
        """
        state = self.get(name)
        del self.named[name]
        self._cleared.add(name)
        if len(state.names) > 1:  # messages call a state that is gone by its last name
            state.names.remove(name)
        self._rekey()
        return state

    def drop(self, states: list[ParallelState]) -> None:
        """Forget states and all their names. *Local.*"""
        gone = {id(state) for state in states}
        for name in [name for name, state in self.named.items() if id(state) in gone]:
            del self.named[name]
            self._cleared.add(name)
        self._states = {plan: state for plan, state in self._states.items() if id(state) not in gone}
        self._count()
        self._rekey()

    def _count(self) -> None:
        self.has_several = len({plan.topology for plan in self._states}) > 1


def _describe_plan(plan: StatePlan) -> str:
    settings = [f"{plan.topology!r} on {plan.backend}/{plan.device_type}", f"dp_mode={plan.dp_mode!r}"]
    settings += [f"ranks={plan.ranks}"] if plan.ranks is not None else []
    settings += ["async_enabled=True"] if plan.async_enabled else []
    settings += ["own_groups=True"] if plan.own_groups else []
    settings += [f"group_options={dict(plan.group_options)}"] if plan.group_options else []
    return ", ".join(settings)


registry = Registry()


def strict(on: bool = True) -> None:
    """Make a taken name with other settings an error (True) or a warning (False, the default). *Local.*"""
    registry.strict = check_flag("strict", "on", on)
