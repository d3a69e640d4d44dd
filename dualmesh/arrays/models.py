"""What a plan makes of a model in a state: shardings, arrays without memory, the sharded model, one born sharded.

Which spec a parameter gets is in `plan`; modules and trees are read and built by the backends (`Models`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dualmesh._support.checks import check_strings
from dualmesh.backend.state import ParallelState
from dualmesh.errors import ArgumentError, ShardingError
from dualmesh.runtime.scope import resolve_state, scope_of
from dualmesh.sharding.partition_spec import P
from dualmesh.sharding.plan_report import Report
from dualmesh.topology.topology import Topology

Units = dict[str, tuple[str, ...] | None]
LogicalNames = Mapping[str, Sequence[str | None]]


class ModelPlan(ABC):
    """A plan as the states use it. A model is a torch module, a JAX tree (flax and equinox included) or containers."""

    @abstractmethod
    def resolve(self, parameters: Iterable[Any], topology: Topology | None = None) -> dict[str, P]:
        """Return {path: spec} of a whole model, from (path, shape) or (path, shape, logical names). *Pure.*"""

    def shardings(self, model: Any, *, names: LogicalNames | None = None, state: ParallelState | None = None) -> Any:
        """Return the native sharding of every parameter, as a tree like the model. *Local.*

        Of a torch module: {path: (mesh, placements)}.

        Args:
            names: {path: logical names of its dims} for parameters that no pattern matches.
            state: The state; None: the ambient one.

        Raises:
            ShardingError: Once, with everything that is wrong, as `resolve` says.
        """
        owner = _ready("shardings", state)
        specs = self.specs_in(owner, model, names)
        return owner.models.filled(model, [owner.sharding(spec) for spec in specs])

    def abstract(self, model: Any, *, names: LogicalNames | None = None, state: ParallelState | None = None) -> Any:
        """Return shape, dtype and sharding of every parameter, as a tree like the model, without memory. *Local.*

        JAX: `ShapeDtypeStruct`s, which orbax restores into and `jit(...).lower` takes. Torch: {path: meta DTensor}.

        Raises: as `shardings`.
        """
        owner = _ready("abstract", state)
        return owner.models.abstract(model, self.specs_in(owner, model, names))

    def apply(
        self,
        model: Any,
        *,
        units: str | Iterable[str] | Mapping[str, str | Iterable[str] | None] = (),
        names: LogicalNames | None = None,
        state: ParallelState | None = None,
    ) -> Any:
        """Return the model with its parameters laid out over the ranks; a torch module is changed in place. *Local.*

        Every process holds the same whole model, or, torch, a model on the meta device.

        Args:
            units: Torch: patterns of module paths ("" is the model itself). The modules that match are wrapped by
                FSDP2 (`fully_shard`), each over the axes that its parameters' specs name: the role "params", or
                NAME_fsdp of a view. {pattern: axes} says which axes these are where they are called otherwise; the
                first pattern that matches counts, None means the usual ones. Axes beside these lay a parameter out
                before. Without units parameters are DTensors on the state's array mesh.
            names: As in `shardings`.

        Raises: as `shardings`; also for a unit whose parameters are split over different axes.
        """
        owner = _ready("apply", state)
        return owner.models.apply(model, self.specs_in(owner, model, names), units_of("apply", units))

    def specs_in(self, owner: ParallelState, model: Any, names: LogicalNames | None = None) -> list[P]:
        """Return the spec of every parameter, in the model's order, checked for a state. *Pure.*

        Raises: as `shardings`.
        """
        report = Report()
        parameters = []
        for path, leaf in owner.models.parameters(model):
            shape = () if isinstance(leaf, bool | int | float | complex) else getattr(leaf, "shape", None)
            if shape is None:
                report.add(f"a {type(leaf).__name__} is no array: it has no shape. Leave it out of the model", path)
            else:
                parameters.append((path, tuple(shape), (names or {}).get(path)))
        report.refuse()
        specs = self.resolve(parameters, owner.topology)
        return [specs[path] for path, _, _ in parameters]


def units_of(where: str, units: Any) -> Units:
    """Return {pattern of module paths: the axes over which FSDP splits, or None for the usual ones}. *Pure.*

    Raises:
        ArgumentError: Something else than names was given.

    >>> units_of("apply", ["layers.*", ""]), units_of("apply", {"experts": "efsdp"})
    ({'layers.*': None, '': None}, {'experts': ('efsdp',)})
    """
    if not isinstance(units, Mapping):
        return dict.fromkeys(check_strings(where, "units", units))
    check_strings(where, "units", tuple(units))
    named = {pattern: None if axes is None else check_strings(where, "units", axes) for pattern, axes in units.items()}
    return {pattern: axes or None for pattern, axes in named.items()}


def init_sharded(
    fn: Callable[..., Any],
    plan: ModelPlan,
    *args: Any,
    names: LogicalNames | None = None,
    state: ParallelState | None = None,
) -> Any:
    """Return the model that `fn(*args)` makes, sharded by a plan; no process ever holds all of it. *Local.*

    The values are those of `fn(*args)` in one process. JAX: `fn` is compiled with output shardings, so random keys are
    arguments. Torch: `fn` returns a module and is called twice, on the meta device and for real; each module is cut
    as soon as its parent takes it, and random initialisation after that draws one parameter at a time. All ranks seed
    alike before.

    Args:
        fn: Makes the model; does the same whenever it is called.
        plan: A `dm.ShardingPlan`.
        names: As in `ShardingPlan.shardings`.
        state: The state, in whose scope `fn` runs; None: the ambient one.

    Raises:
        ShardingError: The plan does not fit, or `fn` made another model the second time.

    >>> import dualmesh as dm, numpy as np
    >>> with dm.session(backend="sim", world_size=4):
    ...     _ = dm.init_parallel_state(dp_size=4)
    ...     model = dm.init_sharded(lambda n: {"w": np.arange(n)}, dm.ShardingPlan({"w": dm.P("dp")}), 8)
    ...     model["w"].block(2).tolist()
    [4, 5]
    """
    if not callable(fn) or not isinstance(plan, ModelPlan):
        raise ArgumentError(f"init_sharded: fn={fn!r}, plan={plan!r}. Give a function and a dm.ShardingPlan.")
    owner = _ready("init_sharded", state)
    with scope_of(state):
        return owner.models.init(fn, lambda model: plan.specs_in(owner, model, names), args)


def _ready(where: str, state: ParallelState | None) -> ParallelState:
    owner = resolve_state(where, state)
    owner.require_ready(where)
    if getattr(owner, "models", None) is None:
        raise ShardingError(f"{where}: the backend {owner.backend!r} lays out no models.", backend=owner.backend)
    return owner
