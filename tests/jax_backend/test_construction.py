"""What libraries make inside a scope, and what they make of a state's shardings."""

import numpy as np

import dualmesh as dm
from tests.jax_backend.worker import in_jax, needs, two_grids, two_meshes

X = np.arange(32.0, dtype=np.float32).reshape(8, 4)


def arrays_of(model):
    import jax

    return [leaf for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.Array)]


@needs("flax", "equinox")
@in_jax()
def test_modules_of_flax_nnx_and_equinox_made_eagerly_in_a_scope_land_on_all_of_its_devices():
    import equinox
    import jax
    from flax import nnx

    two_meshes()
    dm.init_parallel_state(spec=dm.TopologySpec({"dp": 4}), ranks=(4, 5, 6, 7), name="half")
    makes = {
        "nnx": lambda: nnx.state(nnx.Linear(8, 4, rngs=nnx.Rngs(0))),
        "equinox": lambda: equinox.nn.Linear(8, 4, key=jax.random.key(0)),
    }
    for make in makes.values():
        alone = arrays_of(make())
        for name in ("b", "half"):
            with dm.use_parallel_state(name) as state:
                made = arrays_of(make())
            for one, other in zip(alone, made, strict=True):
                assert one.sharding.device_set == {jax.devices()[0]}, "without a scope JAX takes its first device"
                assert other.sharding.device_set == set(state.mesh.devices.flat)
                np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@needs("flax")
@in_jax()
def test_flax_lays_parameters_out_by_the_states_pspecs_eagerly_and_in_jit():
    import jax
    from flax import nnx

    state = two_grids()["dense"]
    spec, bias = dm.P("dp_shard", "ulysses"), dm.P(("dp_shard", "ulysses"))

    def make():
        return nnx.Linear(
            *(8, 16),
            kernel_init=nnx.with_partitioning(nnx.initializers.lecun_normal(), state.pspec("dp_shard", "ulysses")),
            bias_init=nnx.with_partitioning(nnx.initializers.zeros_init(), state.pspec(("dp_shard", "ulysses"))),
            rngs=nnx.Rngs(0),
        )

    with dm.use_parallel_state("dense"):
        made = {"eager": make(), "jit": nnx.jit(make)()}
        said = nnx.get_named_sharding(nnx.state(nnx.eval_shape(make)), state.mesh)
        for sharding, own, ndim in zip(jax.tree.leaves(said), (bias, spec), (1, 2), strict=True):
            assert sharding.is_equivalent_to(state.sharding(own), ndim)
        y = nnx.jit(lambda net, x: net(x))(made["eager"], np.ones((4, 8), np.float32))
    for net in made.values():
        assert net.kernel[...].sharding.is_equivalent_to(state.sharding(spec), 2)
        assert net.bias[...].sharding.is_equivalent_to(state.sharding(bias), 1)
        assert net.kernel[...].addressable_shards[0].data.shape == (2, 8)
    np.testing.assert_array_equal(np.asarray(made["eager"].kernel[...]), np.asarray(made["jit"].kernel[...]))
    np.testing.assert_allclose(np.asarray(y), np.asarray(made["jit"].kernel[...]).sum(0)[None].repeat(4, 0), rtol=1e-4)
    moved = nnx.state(nnx.Linear(8, 16, rngs=nnx.Rngs(0)))
    moved = jax.device_put(moved, jax.tree.map(lambda x: state.sharding(spec if x.ndim == 2 else bias), moved))
    assert moved["kernel"][...].sharding.is_equivalent_to(made["jit"].kernel[...].sharding, 2)


@in_jax()
def test_jit_takes_the_states_shardings_for_inputs_outputs_and_constraints():
    import jax

    state = two_grids()["dense"]
    rows, columns = state.sharding(dm.P("dp")), state.sharding(dm.P(None, "ulysses"))
    seen = []

    def program(x):
        y = jax.lax.with_sharding_constraint(2 * x, state.sharding(dm.P("ulysses", "dp")))
        jax.debug.inspect_array_sharding(y, callback=seen.append)
        return y + 1

    step = jax.jit(program, in_shardings=rows, out_shardings=columns)
    given = step.lower(X).compile().input_shardings[0][0]
    y = step(X)
    np.testing.assert_array_equal(np.asarray(y), 2 * X + 1)
    assert given.is_equivalent_to(rows, 2)
    assert y.sharding == columns
    assert y.addressable_shards[0].data.shape == (8, 2)
    assert seen[-1].is_equivalent_to(state.sharding(dm.P("ulysses", "dp")), 2)
    assert jax.device_put(X, rows).sharding == rows
    described = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=rows)
    assert jax.jit(lambda x: x).lower(described).compile().input_shardings[0][0].is_equivalent_to(rows, 2)
