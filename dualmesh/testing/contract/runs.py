"""What workers run: the cases of `cases` through `dm.*` and the array API only, on whichever backend is open."""

from typing import Any

import array_api_compat
import numpy as np

import dualmesh as dm
from dualmesh.testing.contract.cases import cotangent
from dualmesh.testing.contract.oracle import COMBINED, TOPOLOGIES, VIEWS
from dualmesh.testing.instruments import instruments_of

BATCH = 64
"""Cases in one program: compiling takes longer than in proportion."""


def opened(world: Any) -> Any:
    """Register the topology of a world."""
    views = {"view": dm.View(**VIEWS[world])} if world in VIEWS else {}
    spec = dm.TopologySpec(TOPOLOGIES[world], combined=COMBINED.get(world), views=views, roles={"loss": ("world",)})
    return dm.init_parallel_state(spec=spec)


def applied(case: Any, x: Any) -> Any:
    """Call the collective of a case on a block."""
    xp = array_api_compat.array_namespace(x)
    if case.memory == "transposed":
        x = xp.permute_dims(xp.permute_dims(x, (2, 1, 0)) + 0, (2, 1, 0))
    elif case.memory == "strided":
        x = xp.repeat(x, 2, axis=2)[:, :, ::2]
    elif case.memory == "expanded":
        x = xp.broadcast_to(x[:1], x.shape)
    if case.verb == "axis_index":
        return x * 0 + dm.ops.axis_index(case.axis)
    settings = dict(case.settings)
    if case.verb == "ragged_all_to_all":
        counts, index = xp.asarray(settings.pop("counts")), dm.ops.axis_index(case.axis)
        settings |= {"send_counts": counts[index], "recv_counts": counts[:, index]}
    return getattr(dm.ops, case.verb)(x, case.axis, **settings)


def collectives(world: Any, cases: Any) -> Any:
    """Run cases and return {case: result of all ranks, (world, *block), or the error's text}."""
    opened(world)
    return _together_or_one_by_one(_results, cases)


def gradients(world: Any, cases: Any, shapes: Any) -> Any:
    """Return {case: gradient of all ranks' blocks} of the sum over ranks of sum(w * op(x)), w = `cotangent`."""
    opened(world)
    return _together_or_one_by_one(lambda some: _gradients(some, shapes), cases)


def _together_or_one_by_one(run: Any, cases: Any) -> Any:
    found: dict[Any, Any] = {}
    for first in range(0, len(cases), BATCH):
        found |= _batch_or_one_by_one(run, cases[first : first + BATCH])
    return found


def _batch_or_one_by_one(run: Any, cases: Any) -> Any:
    try:
        return run(cases)
    except Exception:
        found: dict[Any, Any] = {}
        for case in cases:
            try:
                found |= run([case])
            except Exception as error:
                found[case] = f"{type(error).__name__}: {error}"
        return found


def _results(cases: Any) -> Any:
    xs = [dm.distribute(case.blocks(dm.get_parallel_state().world_size), dm.P("world")) for case in cases]

    def each(*blocks: Any) -> Any:
        return tuple(applied(case, block[0])[None, ...] for case, block in zip(cases, blocks, strict=True))

    specs = (dm.P("world"),) * len(cases)
    ys = dm.shard_map(each, specs, specs)(*xs)
    return {case: np.asarray(dm.to_numpy(y)) for case, y in zip(cases, ys, strict=True)}


def _gradients(cases: Any, shapes: Any) -> Any:
    world = dm.get_parallel_state().world_size
    xs = [dm.distribute(case.blocks(world), dm.P("world")) for case in cases]
    ws = [dm.distribute(cotangent(case, shapes[case]), dm.P("world")) for case in cases]

    def objective(xs: Any, ws: Any) -> Any:
        total = 0.0
        for case, x, w in zip(cases, xs, ws, strict=True):
            xp = array_api_compat.array_namespace(x)
            total = total + xp.sum(w[0] * applied(case, x[0]))
        return dm.ops.all_reduce(total, "world")

    lifted = dm.shard_map(objective, (dm.P("world"), dm.P("world")), dm.P())
    _, grads = instruments_of(dm.get_parallel_state().backend).compiled(dm.value_and_grad(lifted))(xs, ws)
    return {case: np.asarray(dm.to_numpy(grad)) for case, grad in zip(cases, grads, strict=True)}


def special_values() -> Any:
    """Return {verb: (what rank 0 of axis "a" sent, what came back there)} for values that arithmetic would change."""
    opened(4)
    bits = np.array([-0.0, 0.0, np.nan, -np.inf, 5e-324, 1.0])
    bits[2:3].view(np.uint64)[0] |= np.uint64(12345)
    sent = np.stack([bits, bits[::-1], bits[[3, 0, 1, 2, 5, 4]], bits[[1, 2, 0, 4, 3, 5]]])

    def each(x: Any) -> Any:
        here = x[0]
        gathered = dm.ops.all_gather(here, "a")
        moved = dm.ops.shift(dm.ops.shift(here, "a"), "a", -1)
        counts = array_api_compat.array_namespace(x).asarray([[0, 6], [6, 0]])[dm.ops.axis_index("a")]
        there = dm.ops.ragged_all_to_all(here, "a", counts, counts, rows=6)
        entered = dm.ops.enter(here, "a")
        return tuple(y[None, ...] for y in (gathered, dm.ops.broadcast(here, "a", 1), moved, there, entered))

    world = dm.P("world")
    found = dm.shard_map(each, world, world)(dm.distribute(sent, world))
    gathered, cast, moved, there, entered = (np.asarray(dm.to_numpy(y)) for y in found)
    return {
        "all_gather": (np.concatenate([sent[0], sent[2]]), gathered[0]),
        "broadcast": (sent[2], cast[0]),
        "shift": (sent, moved),
        "ragged_all_to_all": (sent[[2, 3, 0, 1]], there),
        "enter": (sent, entered),
    }
