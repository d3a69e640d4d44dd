"""`compare_ports`: one model written twice, in torch and in JAX, trained with the same numbers and compared.

One function in several places is in `comparison`; whose parameter is whose, in `param_map`.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dualmesh.arrays.distribute import to_numpy
from dualmesh.errors import ArgumentError
from dualmesh.runtime.init import init_parallel_state
from dualmesh.testing.differences import Difference, difference, refuse_differences
from dualmesh.testing.instruments import instruments_of
from dualmesh.testing.param_map import ParamMap
from dualmesh.testing.places import Place, place_named
from dualmesh.testing.pools import DEFAULT_TIMEOUT_S
from dualmesh.testing.recorder import recorded
from dualmesh.testing.recordings import compare_recordings, load, save
from dualmesh.testing.topologies import AnyTopology, in_world


@dataclass(frozen=True)
class Trained:
    """What a port returns. Arrays are global ones (DTensors, JAX arrays) or equal on every process."""

    losses: Sequence[Any]
    """The global loss of every step."""
    gradients: Mapping[str, Any] = field(default_factory=dict)
    """The gradient of the first step by parameter name."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The parameters after the last step by name."""


Port = Callable[[dict[str, Any], Any], Trained]


def compare_ports(
    *,
    torch: Port,
    jax: Port,
    params: Mapping[str, Any],
    param_map: ParamMap,
    inputs: Any,
    topology: AnyTopology,
    places: tuple[str | Place, str | Place] = ("torch", "jax_x64"),
    world_size: int | None = None,
    rtol: float | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> dict[str, Trained]:
    """Train two programs from the same parameters on the same inputs, and fail where anything differs.

    Compared are, in this order: whatever passes taps, values and gradients (so that the first difference names the
    layer; a tap that only one program, or not every rank, passes is a difference); the loss of every step; the gradient
    of every parameter in the first step; every parameter after the last. Each port runs in its own world, with the
    topology registered as "base".

    Args:
        torch: Called with (parameters by its names, as global numpy arrays; inputs); returns a `Trained`.
        jax: The same for the JAX program, in its names.
        params: The first parameters by the names of the torch program, global numpy arrays.
        param_map: Whose parameter is whose.
        inputs: What both get, for example batches of every step.
        topology: A spec or a topology.
        places: Where the two run; the default keeps 64-bit numbers in JAX.
        world_size: Ranks; None: what the sizes of the topology multiply to.
        rtol: See `difference`.
        timeout_s: How long to wait for each.

    Returns:
        {"torch": ..., "jax": ...}: what both returned, as numpy arrays.

    Raises:
        DifferenceError: It begins with the first difference.
        ArgumentError: The map leaves something over, on either side.
    """
    spec, size = in_world("compare_ports", topology, world_size)
    theirs = {"torch": dict(params), "jax": param_map.to_jax(params)}
    ran: dict[str, list[Trained]] = {}
    with tempfile.TemporaryDirectory(prefix="dualmesh_taps_") as folder:
        for name, port, place in zip(("torch", "jax"), (torch, jax), places, strict=True):
            call = (port, theirs[name], inputs, spec, str(Path(folder, name)))
            ran[name] = place_named(place).run(_run_port, *call, world_size=size, timeout_s=timeout_s)
        wrong = _compare_taps(Path(folder), rtol)
    for process in range(len(ran["torch"])):
        wrong += _trained_apart(ran["torch"][process], ran["jax"][0], param_map, rtol, process)
    refuse_differences(f"compare_ports over {spec!r}", wrong)
    return {name: results[0] for name, results in ran.items()}


def _compare_taps(folder: Path, rtol: float | None) -> list[Difference]:
    """Compare what passed the taps of the two programs."""
    torch, jax = (load(folder / name) for name in ("torch", "jax"))
    return compare_recordings(jax, torch, rtol=rtol)


def _trained_apart(
    torch: Trained, jax: Trained, param_map: ParamMap, rtol: float | None, process: int
) -> list[Difference]:
    places = (f"torch, process {process}", "jax")
    pairs: list[tuple[str, Any, Any]] = []
    if len(torch.losses) != len(jax.losses):
        raise ArgumentError(
            f"compare_ports: torch took {len(torch.losses)} steps, jax {len(jax.losses)}. Take as many."
        )
    for step, losses in enumerate(zip(torch.losses, jax.losses, strict=True)):
        pairs.append((f"loss of step {step}", *losses))
    for what, own, other in (
        ("gradient of {}", torch.gradients, jax.gradients),
        ("{} after the last step", torch.parameters, jax.parameters),
    ):
        if not own and not other:
            continue
        mapped, sources = param_map.to_torch(other), param_map.torch_sources(other)
        if mapped.keys() != own.keys():
            raise ArgumentError(
                f"compare_ports: {what.format('parameters')}: only torch has {sorted(own.keys() - mapped.keys())}, "
                f"only jax {sorted(mapped.keys() - own.keys())}. Return every parameter on both sides."
            )
        pairs += [(what.format(f"{name} (jax: {', '.join(sources[name])})"), own[name], mapped[name]) for name in own]
    if not pairs:
        raise ArgumentError("compare_ports: both ports returned no loss, gradient or parameter. Return some.")
    each = (difference(what, one, other, places=places, rtol=rtol) for what, one, other in pairs)
    return [one for one in each if one is not None]


def _run_port(port: Port, params: dict[str, Any], inputs: Any, spec: Any, folder: str) -> Trained:
    """Run a port in a worker; keep what passes its taps."""
    state = init_parallel_state(spec=spec)
    with recorded(state) as recorder:
        found = port(params, inputs)
        instruments_of(state.backend).finished()
    save(Path(folder), state.backend, state.world.size, state.held_ranks, recorder.entries)
    if not isinstance(found, Trained):
        raise ArgumentError(f"compare_ports: the port returned a {type(found).__name__}. Return testing.Trained(...).")
    return Trained(
        [_number(loss) for loss in found.losses],
        {name: to_numpy(x) for name, x in found.gradients.items()},
        {name: to_numpy(x) for name, x in found.parameters.items()},
    )


def _number(loss: Any) -> Any:
    return loss if isinstance(loss, int | float) else to_numpy(loss)
