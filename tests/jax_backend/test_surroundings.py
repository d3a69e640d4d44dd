"""Where JAX would compute on another mesh than the scope's: an error that names both, and no numbers."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import ArgumentError, OutsideShardMapError, ShardingError
from tests.jax_backend.worker import in_jax, two_grids, two_meshes

X = np.arange(8.0, dtype=np.float32)
SUMS = {"a": [4.0, 6.0, 8.0, 10.0], "b": [12.0, 16.0]}
A_MESH, B_MESH = r"\('dp': 4, 'sp': 2\)", r"\('dp': 2, 'sp': 4\)"


def bare_sum(x, **given):
    """Return the sum over sp by JAX's own shard_map; without mesh= it is compiled for the mesh around."""
    import jax
    from jax.sharding import PartitionSpec

    total = jax.shard_map(
        lambda x: jax.lax.psum(x, "sp"),
        in_specs=PartitionSpec("sp"),
        out_specs=PartitionSpec(),
        check_vma=False,
        **given,
    )
    return total(x)


def unsplit_sum(x):
    import jax
    from jax.sharding import PartitionSpec

    return jax.shard_map(
        lambda x: jax.lax.psum(x, "sp"), in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )(x)


def bare_constraint(x):
    import jax
    from jax.sharding import PartitionSpec

    return jax.lax.with_sharding_constraint(x, PartitionSpec("sp"))


def inside(name, fn):
    """Return `fn` in a scope that is opened where it is traced."""

    def run(x):
        with dm.use_parallel_state(name):
            return fn(x)

    return run


def transformations():
    """Return the ways to trace a function, by name."""
    import jax

    return {
        "jit": lambda fn: jax.jit(fn),
        "eager gradient": lambda fn: lambda x: jax.vjp(fn, x)[0],
        "jitted gradient": lambda fn: jax.jit(lambda x: jax.vjp(fn, x)[0]),
        "scan": lambda fn: jax.jit(lambda x: jax.lax.scan(lambda c, y: (c, fn(y)), 0.0, x[None])[1]),
        "named vmap": lambda fn: jax.jit(lambda x: jax.vmap(fn, axis_name="rows")(x[None])[0]),
        "nested jit": lambda fn: jax.jit(jax.jit(fn)),
        "decorated": lambda fn: jax.jit(dm.use_parallel_state("b")(fn)),
    }


@in_jax()
@pytest.mark.parametrize("around", ["scope", "users mesh"])
def test_what_jax_would_compute_on_another_mesh_than_the_scopes_is_refused_with_both(around):
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, Mesh

    two_meshes()
    user = Mesh(np.array(jax.devices()).reshape(4, 2), ("dp", "sp"), axis_types=(AxisType.Auto,) * 2)
    context = dm.use_parallel_state("a") if around == "scope" else jax.set_mesh(user)
    both = rf"State 'b' is on the mesh {B_MESH} of State 'b'.*under the mesh {A_MESH}.*dm\.shard_map and dm\.constrain"
    with context:
        before = jax.sharding.get_mesh()
        for name, transformed in transformations().items():
            for bare in (bare_sum, unsplit_sum, bare_constraint):
                with pytest.raises((ValueError, RuntimeError), match=both):
                    transformed(inside("b", bare))(jnp.asarray(X))
                assert jax.sharding.get_mesh() == before, name
                assert jax.sharding.get_abstract_mesh() == before.abstract_mesh
    assert jax.sharding.get_abstract_mesh().empty


@in_jax()
def test_what_names_its_mesh_is_right_in_a_scope_over_another():
    import jax
    import jax.numpy as jnp

    a, b = two_meshes()
    lifted = dm.shard_map(lambda x: dm.ops.all_reduce(x, "sp"), dm.P("sp"), dm.P())
    constrain = jax.lax.with_sharding_constraint

    def back_and_forth(x):
        with dm.use_parallel_state("a"):
            return lifted(x) + bare_sum(x), bare_constraint(x)

    for name in ("jit", "eager gradient", "jitted gradient"):  # in scan and vmap shardings are JAX's business
        transformed = transformations()[name]
        with dm.use_parallel_state("a"):
            x = jnp.asarray(X)
            for right in (lifted, lambda x: bare_sum(x, mesh=b.mesh)):
                assert np.asarray(transformed(inside("b", right))(x)).tolist() == SUMS["b"], name
            for moved in (lambda x: dm.constrain(x, dm.P("sp")), lambda x: constrain(x, b.sharding(dm.P("sp")))):
                # What lies on the mesh around loses its shards on the way out (see the warning of two meshes).
                y = transformed(inside("b", moved))(dm.distribute(X, dm.P("dp"), state=b))
                np.testing.assert_array_equal(np.asarray(y), X)
                assert y.sharding.is_equivalent_to(b.sharding(dm.P("sp")), 1), name
    with dm.use_parallel_state("a"):
        total, moved = jax.jit(inside("b", back_and_forth))(X)
    assert np.asarray(total).tolist() == [2 * value for value in SUMS["a"]]
    assert moved.sharding.is_equivalent_to(a.sharding(dm.P("sp")), 1)


@in_jax()
def test_without_a_mesh_around_jit_bare_specs_mean_the_innermost_scopes_mesh():
    import jax

    _, b = two_meshes()
    x = dm.distribute(X, dm.P("dp"), state=b)
    for outer in ("a", "b"):
        found = jax.jit(inside(outer, inside("b", lambda x: (bare_sum(x), bare_constraint(x)))))(x)
        assert np.asarray(found[0]).tolist() == SUMS["b"]
        assert found[1].sharding.is_equivalent_to(b.sharding(dm.P("sp")), 1)


@in_jax()
def test_an_eager_gradient_computes_on_arrays_of_both_meshes_inside_a_scope():
    import jax
    import jax.numpy as jnp

    a, b = two_meshes()
    with dm.use_parallel_state("a"):
        for state, spec in ((a, dm.P("dp")), (b, dm.P("sp"))):
            x = dm.distribute(X, spec, state=state)
            value, gradient = jax.value_and_grad(inside("b", lambda x: (2 * jnp.sin(x)).sum()))(x)
            np.testing.assert_allclose(float(value), 2 * np.sin(X).sum(), rtol=1e-5)
            np.testing.assert_allclose(np.asarray(gradient), 2 * np.cos(X), rtol=1e-5)


@in_jax()
def test_a_scope_over_some_of_the_devices_does_not_compute_on_the_mesh_around():
    import jax

    two_meshes()
    dm.init_parallel_state(spec=dm.TopologySpec({"sp": 4}), ranks=(0, 1, 2, 3), name="small")
    small = r"State 'small' is on the mesh \('sp': 4, 'ranks_0_to_3': 1\) of State 'small'"
    with dm.use_parallel_state("a"), pytest.raises(ValueError, match=rf"{small}.*under the mesh {A_MESH}"):
        jax.jit(inside("small", bare_sum))(X)


def look_alikes():
    """Register states of one spec over other devices and over the same in another order: ranks 0-3, 4-7, 3-0."""
    spec, ranks = dm.TopologySpec({"dp": 2, "tp": 2}), {"left": (0, 1, 2, 3), "right": (4, 5, 6, 7)}
    ranks["turned"] = (3, 2, 1, 0)
    return {name: dm.init_parallel_state(spec=spec, ranks=own, name=name) for name, own in ranks.items()}


@in_jax()
@pytest.mark.parametrize("other", ["right", "turned"])
def test_operations_of_a_state_on_other_devices_are_refused_inside_anothers_shard_map(other):
    import jax
    from jax.sharding import PartitionSpec

    states = look_alikes()
    theirs = states[other]
    refused = {
        "all_reduce": lambda x: dm.ops.all_reduce(x, "dp", state=theirs),
        "all_gather": lambda x: dm.ops.all_gather(x, "world", state=theirs),
        "axis_index": lambda x: x + dm.ops.axis_index("tp", state=theirs),
        "broadcast": lambda x: dm.ops.broadcast(x, "tp", state=theirs),
    }
    both = rf"{other}.* on the mesh \('dp': 2, 'tp': 2, 'ranks_.*{other}.*per rank of the mesh \(.*'ranks_0_to_3': 1\)"
    for body in refused.values():
        with pytest.raises(OutsideShardMapError, match=both):
            dm.shard_map(body, dm.P("dp"), dm.P("dp"), state=states["left"])(X)
        names = PartitionSpec("dp")
        with pytest.raises(OutsideShardMapError, match=both):
            jax.shard_map(body, mesh=states["left"].mesh, in_specs=names, out_specs=names)(X)
    with pytest.raises(dm.errors.RankError, match=r"inside dm\.shard_map"):
        dm.shard_map(lambda x: x + theirs.index("dp"), dm.P("dp"), dm.P("dp"), state=states["left"])(X)
    with dm.use_parallel_state(theirs):
        index = dm.shard_map(lambda: dm.ops.axis_index("world")[None], (), dm.P("world"))()
    assert {theirs.members[int(shard.data[0])]: shard.device for shard in index.addressable_shards} == {
        rank: jax.devices()[rank] for rank in theirs.members
    }


@in_jax()
def test_shard_maps_and_scopes_of_another_mesh_are_refused_inside_a_shard_map():
    import jax

    two_meshes()
    mesh = rf"on the mesh {B_MESH} of State 'b'.*inside a shard_map over the mesh {A_MESH} of State 'a'"

    def scoped(x):
        with dm.use_parallel_state("b"):
            return x

    def nested(x):
        inner = dm.shard_map(
            lambda x: x, dm.P("sp"), dm.P("sp"), state=dm.get_parallel_state_by_name("b"), axes=("sp",)
        )
        return inner(x)

    for body, where in ((scoped, "use_parallel_state"), (nested, "shard_map")):
        for axes in (("dp",), None):
            outer = dm.shard_map(body, dm.P("dp"), dm.P("dp"), axes=axes)
            for run in (outer, jax.jit(outer)):
                with pytest.raises(ArgumentError, match=rf"{where}: State 'b' is {mesh}"):
                    run(X)
    assert dm.scope_name() == "a"
    assert jax.sharding.get_abstract_mesh().empty


@in_jax()
def test_partly_manual_shard_maps_nest_on_one_mesh():
    import jax

    two_grids()

    def inner(x):
        return dm.ops.all_reduce(x, "sp")

    def outer(x):
        with dm.use_parallel_state("dense"):
            summed = dm.shard_map(inner, dm.P(None, "sp"), dm.P(), axes=("sp",))(x)
            return summed + dm.ops.all_reduce(x.sum(), "dp")

    x = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    found = jax.jit(dm.shard_map(outer, dm.P("dp"), dm.P("dp"), axes=("dp",)))(x)
    np.testing.assert_array_equal(np.asarray(found), x[:, :2] + x[:, 2:] + x.sum())


@in_jax()
def test_states_on_other_devices_in_one_jit_are_refused_with_both():
    import jax

    states = look_alikes()
    total = dm.shard_map(lambda x: dm.ops.all_reduce(x, "dp"), dm.P("dp"), dm.P())
    uses = {"shard_map": total, "constrain": lambda x: dm.constrain(x, dm.P("dp"))}
    for other in ("right", "turned"):
        for first in uses.values():
            for where, then in uses.items():
                program = lambda x: (inside("left", first)(x), inside(other, then)(x))  # noqa: B023, E731
                named = (
                    rf"{where}: State '{other}' is on .*one jit with the mesh \(.*of State 'left', over .*dm\.reshard"
                )
                for scope in ("left", None):
                    context = dm.use_parallel_state(scope or other)
                    expected = named if scope else rf"State 'left' is on .*one jit with the mesh.*of State '{other}'"
                    with context, pytest.raises(ShardingError, match=expected):
                        jax.jit(program)(X)
                with pytest.raises(ShardingError, match=named):
                    jax.jit(program)(X)
    for name in states:  # each in a jit of its own works, whatever was traced before
        moved = jax.jit(inside(name, uses["constrain"]))(X)
        assert moved.sharding.is_equivalent_to(states[name].sharding(dm.P("dp")), 1)
