"""What dualmesh costs a JAX trainer per step, against floors in the same run. `python -m tests.bench.jax_dispatch`.

A scope against the two JAX context managers that it must enter; a jitted step inside and outside a scope; an eager
call of a lifted function against a hand-jitted one.
"""

from collections.abc import Callable
from typing import Any

import dualmesh as dm
from tests.bench.timing import interleaved, repeated, table


def two_contexts(state: dm.ParallelState) -> Callable[[], None]:
    """Return a function that enters and leaves the two context managers: the floor of a scope."""
    import jax

    user_context: Any = jax.make_user_context(default_value=None)
    mesh, key = state.mesh, ("some", "key")

    def enter_and_leave() -> None:
        with user_context(key), jax.set_mesh(mesh):
            pass

    return enter_and_leave


def programs() -> tuple[Any, Any, Any, Any]:
    """Return (a lifted sum, one that captured 100 numbers, one by hand under jit, an argument) over the axis "dp"."""
    import jax
    import numpy as np
    from jax.sharding import PartitionSpec

    state = dm.get_parallel_state()
    names = state.group("dp")
    by_hand = jax.shard_map(
        lambda x: jax.lax.psum(x, names),
        mesh=state.mesh,
        in_specs=PartitionSpec(names),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    lifted = dm.shard_map(lambda x: dm.ops.all_reduce(x, "dp"), dm.P("dp"), dm.P())
    table = {str(number): float(number) for number in range(100)}
    capturing = dm.shard_map(lambda x: dm.ops.all_reduce(x * table["1"], "dp"), dm.P("dp"), dm.P())
    return lifted, capturing, jax.jit(by_hand), dm.distribute(np.arange(64.0, dtype=np.float32), dm.P("dp"))


def measure() -> None:
    """Print the tables."""
    import jax

    with dm.session(backend="jax", world_size=4):
        state = dm.init_parallel_state(dp_size=4)
        lifted, capturing, by_hand, x = programs()
        step = jax.jit(lambda x: x + 1)
        names = {
            "floor": two_contexts(state),
            "use": dm.use_parallel_state,
            "lifted": lifted,
            "capturing": capturing,
            "by_hand": by_hand,
            "x": x,
            "step": step,
            "wait": jax.block_until_ready,
        }
        scopes = {
            "user context + set_mesh": "floor()",
            "use_parallel_state('base')": "with use('base'): pass",
        }
        steps = {"jitted step, no scope": "step(x)"}
        by_jax = {"jitted step, under jax.set_mesh": "step(x)"}
        inside = {"jitted step, in a scope": "step(x)"}
        calls = {
            "hand-jitted shard_map": "wait(by_hand(x))",
            "dm.shard_map, called eagerly": "wait(lifted(x))",
            "dm.shard_map, 100 captured in a dict": "wait(capturing(x))",
        }
        seconds = interleaved({row: repeated(code, names) for row, code in scopes.items()}, number=5_000)
        table(f"scopes, jax {jax.__version__}", seconds, {"use_parallel_state('base')": "user context + set_mesh"})
        seconds = interleaved({row: repeated(code, names) for row, code in steps.items()}, number=300)
        with jax.set_mesh(state.mesh):
            seconds |= interleaved({row: repeated(code, names) for row, code in by_jax.items()}, number=300)
        with dm.use_parallel_state("base"):
            seconds |= interleaved({row: repeated(code, names) for row, code in inside.items()}, number=300)
        floors = {"jitted step, in a scope": "jitted step, under jax.set_mesh"}
        table("dispatch of a jitted step over 4 devices", seconds, floors)
        seconds = interleaved({row: repeated(code, names) for row, code in calls.items()}, number=200)
        table("eager calls", seconds, dict.fromkeys(list(calls)[1:], "hand-jitted shard_map"))


if __name__ == "__main__":
    measure()
