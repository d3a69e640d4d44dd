"""What `dm.shard_map` and each op add to a program: nothing. The same by hand, as JAX traces and compiles it."""

import re

import numpy as np
import pytest

import dualmesh as dm
from tests.jax_backend.worker import in_jax

GRID = {"a": 2, "b": 2, "c": 2}
EVERYWHERE = dm.P(("a", "b", "c"))


def grid():
    """Register a 2 x 2 x 2 grid."""
    return dm.init_parallel_state(spec=dm.TopologySpec(GRID))


def text_of(jaxpr):
    """Return a program as text, its sets in one order."""
    return re.sub(r"frozenset\(\{(.*?)\}\)", lambda found: str(sorted(found[1].split(", "))), str(jaxpr))


def by_hand(names):
    """Return, by name, (dualmesh's call, the same in jax.lax) over the axes "a", "c"."""
    from jax import lax

    axis, size, ops = ("a", "c"), 4, dm.ops
    ring = tuple((src, (src + 1) % size) for src in range(size))
    return {
        "sum": (lambda x: ops.all_reduce(x, axis), lambda x: lax.psum(x, names)),
        "mean": (lambda x: ops.all_reduce(x, axis, "mean"), lambda x: lax.pmean(x, names)),
        "gather": (lambda x: ops.all_gather(x, axis, 1), lambda x: lax.all_gather(x, names, axis=1, tiled=True)),
        "scatter": (
            lambda x: ops.reduce_scatter(x, axis, 1),
            lambda x: lax.psum_scatter(x, names, scatter_dimension=1, tiled=True),
        ),
        "all_to_all": (
            lambda x: ops.all_to_all(x, axis, 1, 0),
            lambda x: lax.all_to_all(x, names, 1, 0, tiled=True),
        ),
        "shift": (lambda x: ops.shift(x, axis), lambda x: lax.ppermute(x, names, ring)),
        "take_block": (
            lambda x: ops.take_block(x, axis, 1),
            lambda x: lax.dynamic_slice_in_dim(x, lax.axis_index(names) * 2, 2, 1),
        ),
        "axis_index": (lambda x: x + ops.axis_index(axis), lambda x: x + lax.axis_index(names)),
    }


@in_jax()
@pytest.mark.parametrize(
    "name", ["sum", "mean", "gather", "scatter", "all_to_all", "shift", "take_block", "axis_index"]
)
@pytest.mark.parametrize("under", ["forward", "gradient"])
def test_the_program_is_the_hand_written_one(name, under):
    import jax
    from jax.sharding import PartitionSpec

    state = grid()
    ours, hand = by_hand(state.group(("a", "c")))[name]
    lifted = dm.shard_map(ours, EVERYWHERE, EVERYWHERE)
    native = PartitionSpec(state.mesh.axis_names)
    mapped = jax.shard_map(hand, mesh=state.mesh, in_specs=native, out_specs=native, check_vma=False)
    reference = jax.jit(mapped, inline=True)

    def program(fn):
        run = jax.grad(lambda x: (fn(x) ** 2).sum()) if under == "gradient" else fn
        return text_of(jax.make_jaxpr(run)(np.ones((32, 8), np.float32)))

    with jax.sharding.use_abstract_mesh(state.mesh.abstract_mesh):
        assert program(lifted) == program(reference)


def ulysses(gather_heads, gather_sequence):
    """Return causal-free attention over whole sequences from blocks of sequences, (batch, length, heads, width)."""
    import jax.numpy as jnp

    def attention(x):
        q, k, v = (gather_sequence(part) for part in (x, 2 * x, 3 * x))
        scores = jnp.einsum("blhd,bmhd->bhlm", q, k)
        mixed = jnp.einsum("bhlm,bmhd->blhd", jnp.exp(scores - scores.max(-1, keepdims=True)), v)
        return gather_heads(mixed)

    return attention


def all_by_hand(names):
    """Return, by name, (dualmesh's, the hand-written) for every op, and for attention."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    axis, ops, size = ("a", "c"), dm.ops, 4
    pairs = ((0, 3), (2, 1))
    turn = dm.sequence
    enter, leave = pair_by_hand(names)
    return {
        **by_hand(names),
        "max": (lambda x: ops.all_reduce(x, axis, "max"), lambda x: lax.pmax(x, names)),
        "min": (lambda x: ops.all_reduce(x, axis, "min"), lambda x: lax.pmin(x, names)),
        "mean of scatter": (
            lambda x: ops.reduce_scatter(x, axis, 1, "mean"),
            lambda x: lax.psum_scatter(x, names, scatter_dimension=1, tiled=True) / size,
        ),
        "permute": (lambda x: ops.permute(x, axis, pairs), lambda x: lax.ppermute(x, names, pairs)),
        "broadcast": (lambda x: ops.broadcast(x, axis, 2), broadcast_by_hand(names)),
        "enter": (lambda x: ops.enter(x, axis), enter),
        "leave": (lambda x: ops.leave(x, axis), leave),
        "ulysses": (
            ulysses(
                lambda x: turn.gather_heads_scatter_seq(x, seq_dim=1, head_dim=2, axis=axis),
                lambda x: turn.gather_seq_scatter_heads(x, seq_dim=1, head_dim=2, axis=axis),
            ),
            ulysses(
                lambda x: lax.all_to_all(x, names, 1, 2, tiled=True),
                lambda x: lax.all_to_all(x, names, 2, 1, tiled=True),
            ),
        ),
        "remat": (lambda x: dm.remat(jnp.sin)(x), lambda x: jax.checkpoint(jnp.sin)(x)),
        "ragged": (
            lambda x: ops.ragged_all_to_all(x, axis, (1, 1, 1, 1), (1, 1, 1, 1), rows=4),
            lambda x: ragged_by_hand(x, names),
        ),
    }


def ragged_by_hand(x, names):
    """Send one row to each of four indices, in blocks of the longest run that there could be."""
    import jax.numpy as jnp
    from jax import lax

    blocks = jnp.zeros((4, *x.shape), x.dtype).at[:, 0].set(x)
    return lax.all_to_all(blocks, names, 0, 0, tiled=True)[:, 0]


def pair_by_hand(names):
    """Return (identity whose gradient is summed, sum whose gradient is passed on), as one writes them in JAX."""
    import jax
    from jax import lax

    enter, leave = jax.custom_vjp(lambda x: x), jax.custom_vjp(lambda x: lax.psum(x, names))
    enter.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, names),))
    leave.defvjp(lambda x: (lax.psum(x, names), None), lambda _, g: (g,))
    return enter, leave


def broadcast_by_hand(names):
    """Return a broadcast from index 2 as a sum of masked bits, differentiable."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def masked(x):
        return jnp.where(lax.axis_index(names) == 2, x, jnp.zeros_like(x))

    @jax.custom_jvp
    def sent(x):
        bits = lax.bitcast_convert_type(x, jnp.uint32)
        return lax.bitcast_convert_type(lax.psum(masked(bits), names), jnp.float32)

    @sent.defjvp
    def rule(primals, tangents):
        tangent = masked(*tangents)
        return sent(*primals), lax.psum(tangent, names)

    return sent


COLLECTIVE = r"(\S+) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
NAMES = (
    *("sum", "mean", "gather", "scatter", "all_to_all", "shift", "take_block", "axis_index", "max", "min"),
    *("mean of scatter", "permute", "broadcast", "enter", "leave", "ulysses", "remat", "ragged"),
)


@in_jax()
def test_compiled_programs_have_the_collectives_of_the_hand_written_ones_in_count_and_size():
    import jax
    from jax.sharding import PartitionSpec

    state = grid()
    native = PartitionSpec(state.mesh.axis_names)
    found = all_by_hand(state.group(("a", "c")))
    assert set(found) == set(NAMES)
    for name, (ours, hand) in found.items():
        mapped = jax.shard_map(hand, mesh=state.mesh, in_specs=native, out_specs=native, check_vma=False)
        shape = (8, 2, 4, 3) if name == "ulysses" else (32, 8)
        x = np.sin(np.arange(np.prod(shape), dtype=np.float32)).reshape(shape)

        def computed(fn, x=x):
            program = jax.grad(lambda x: (fn(x) ** 2).sum()) if name not in ("max", "min") else fn  # noqa: B023
            compiled = jax.jit(program).lower(x).compile()
            return sorted((op, shape) for shape, op in re.findall(COLLECTIVE, compiled.as_text())), compiled(x)

        (collectives, value), (expected, right) = computed(dm.shard_map(ours, EVERYWHERE, EVERYWHERE)), computed(mapped)
        assert collectives == expected, name
        np.testing.assert_allclose(np.asarray(value), np.asarray(right), rtol=1e-6, err_msg=name)


def told(value):
    return sorted(value) if isinstance(value, frozenset) else str(value)


def operations(jaxpr):
    """Return the operations of a program in order, with parameters and types; what only wraps others is left out."""
    from jax.extend.core import ClosedJaxpr, Jaxpr

    found = []
    for eqn in jaxpr.eqns:
        inner = [getattr(part, "jaxpr", part) for part in eqn.params.values() if isinstance(part, ClosedJaxpr | Jaxpr)]
        wraps = eqn.primitive.name in ("jit", "pjit", "custom_jvp_call", "custom_vjp_call")
        if not wraps:
            names = ("name", "jaxpr", "call_jaxpr")
            params = {key: told(value) for key, value in eqn.params.items() if key not in names}
            found.append((eqn.primitive.name, params, [str(out.aval) for out in eqn.outvars]))
        for part in inner:
            found += operations(part)
    return found


@in_jax()
def test_every_op_and_its_gradient_is_the_hand_written_program_operation_by_operation():
    import jax
    from jax.sharding import PartitionSpec

    state = grid()
    native = PartitionSpec(state.mesh.axis_names)
    for name, (ours, hand) in all_by_hand(state.group(("a", "c"))).items():
        if name == "ragged":
            continue  # its rows can be moved in many ways; its collectives are compared as compiled
        mapped = jax.shard_map(hand, mesh=state.mesh, in_specs=native, out_specs=native, check_vma=False)
        mapped = jax.jit(mapped, inline=True)  # as dualmesh does it, so that nothing is computed that is not needed
        lifted = dm.shard_map(ours, EVERYWHERE, EVERYWHERE)
        x = np.ones((8, 2, 4, 3) if name == "ulysses" else (32, 8), np.float32)

        def program(fn, gradient, x=x):
            run = jax.grad(lambda x: (fn(x) ** 2).sum()) if gradient else fn
            return operations(jax.make_jaxpr(run)(x).jaxpr)

        for gradient in (False, True)[: 1 if name in ("max", "min") else 2]:
            found, expected = program(lifted, gradient), program(mapped, gradient)
            assert [one[0] for one in found] == [one[0] for one in expected], (name, gradient)
            assert found == expected, (name, gradient)
            assert any(one[0] == "shard_map" for one in found)


@in_jax()
def test_ulysses_attention_traces_to_the_hand_written_program():
    import jax
    from jax.sharding import PartitionSpec

    state = grid()
    native = PartitionSpec(state.mesh.axis_names)
    ours, hand = all_by_hand(state.group(("a", "c")))["ulysses"]
    lifted = dm.shard_map(ours, EVERYWHERE, EVERYWHERE)
    mapped = jax.shard_map(hand, mesh=state.mesh, in_specs=native, out_specs=native, check_vma=False)
    x = np.ones((8, 2, 4, 3), np.float32)
    with jax.sharding.use_abstract_mesh(state.mesh.abstract_mesh):
        assert text_of(jax.make_jaxpr(lifted)(x)) == text_of(jax.make_jaxpr(jax.jit(mapped, inline=True))(x))
