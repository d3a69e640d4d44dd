"""Functions of global arrays: compiled once, right gradients in the inputs' shardings, named errors."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import ArgumentError, ShapeError, ShardingError, UnknownAxisError
from tests.jax_backend.worker import in_jax, two_grids, two_meshes


@in_jax()
def test_eager_calls_compile_once_per_state_and_the_callable_keeps_what_was_compiled():
    import gc
    import weakref

    import jax.numpy as jnp

    two_meshes()
    traces = []

    def body(x):
        traces.append(dm.scope_name())
        return dm.ops.all_reduce(x, "sp")

    lifted = dm.shard_map(body, dm.P("sp"), dm.P())
    x = dm.distribute(jnp.arange(8.0), dm.P("sp"))
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(lifted(x)), [4.0, 6.0, 8.0, 10.0])
    with dm.use_parallel_state("b"):
        for _ in range(2):
            np.testing.assert_array_equal(np.asarray(lifted(np.arange(8.0))), [12.0, 16.0])
    lifted(x)
    assert traces == ["a", "b"]
    kept = weakref.ref(body)
    del body, lifted
    gc.collect()
    assert kept() is None, "nothing but the callable keeps the function and its programs"


@in_jax()
def test_gradients_equal_numpys_and_keep_the_inputs_shardings():
    import jax

    two_grids()
    rng = np.random.default_rng(0)
    x, w, b = rng.normal(size=(8, 6)), rng.normal(size=(6, 4)), rng.normal(size=4)
    specs = {"x": dm.P("dp", "sp"), "w": dm.P("sp", "dp"), "b": dm.P()}

    def loss(x, w, b):
        y = dm.ops.all_reduce(x @ dm.ops.all_gather(w, "dp", 1), "sp") + b
        objective, _ = dm.token_mean((y**2).sum() / dm.ops.axis_size("sp"), y.shape[0] / dm.ops.axis_size("sp"))
        return dm.ops.all_reduce(objective, "world")

    given = [
        dm.distribute(value.astype(np.float32), spec) for value, spec in zip((x, w, b), specs.values(), strict=True)
    ]
    lifted = dm.shard_map(loss, tuple(specs.values()), dm.P())
    y = x @ w + b
    expected = [2 * y @ w.T / 8, 2 * x.T @ y / 8, 2 * y.sum(0) / 8]
    eager = dm.value_and_grad(lifted, (0, 1, 2))
    for run in (eager, jax.jit(eager)):
        value, gradients = run(*given)
        np.testing.assert_allclose(float(value), (y**2).sum() / 8, rtol=1e-5)
        for gradient, wanted, source in zip(gradients, expected, given, strict=True):
            np.testing.assert_allclose(np.asarray(gradient), wanted, rtol=1e-4, atol=1e-5)
            assert gradient.sharding.is_equivalent_to(source.sharding, source.ndim)


@in_jax()
def test_value_and_grad_of_trees_and_of_what_is_no_scalar():
    dm.init_parallel_state(dp_size=8)
    tree = {"one": dm.distribute(np.arange(8.0), dm.P("dp")), "two": [dm.distribute(np.ones(2), dm.P())]}
    specs = {"one": dm.P("dp"), "two": dm.P()}

    def body(tree):
        return dm.ops.all_reduce((tree["one"] ** 2).sum() * tree["two"][0].sum(), "dp")

    lifted = dm.shard_map(body, (specs,), dm.P())
    value, gradient = dm.value_and_grad(lifted)(tree)
    assert float(value) == 280.0
    np.testing.assert_array_equal(np.asarray(gradient["one"]), 4 * np.arange(8.0))
    np.testing.assert_array_equal(np.asarray(gradient["two"][0]), [140.0, 140.0])
    with pytest.raises(ShapeError, match=r"shape \(8,\)"):
        dm.value_and_grad(lambda x: x)(np.arange(8.0))


@in_jax()
def test_partial_results_are_summed():
    two_grids()
    total = dm.shard_map(
        lambda x: (x, x.sum()), dm.P("dp", "sp"), (dm.P("dp", partial="sp"), dm.P(partial=("dp", "sp")))
    )
    x = np.arange(32.0).reshape(8, 4)
    rows, whole = total(x)
    np.testing.assert_array_equal(np.asarray(rows), x[:, :2] + x[:, 2:])
    assert rows.addressable_shards[0].data.shape == (2, 2)
    assert float(whole) == x.sum()


@in_jax()
def test_specs_may_be_jaxs_own_and_numpy_inputs_are_put_by_spec():
    import jax
    from jax.sharding import PartitionSpec

    two_grids()
    lifted = dm.shard_map(lambda x, n: x * n, [PartitionSpec("dp"), dm.P()], PartitionSpec("dp"))
    y = lifted(np.arange(8.0), 3)
    assert y.addressable_shards[0].data.shape == (2,)
    np.testing.assert_array_equal(np.asarray(y), 3 * np.arange(8.0))
    np.testing.assert_array_equal(np.asarray(jax.jit(lifted)(np.arange(8.0), 2)), 2 * np.arange(8.0))


@in_jax()
def test_some_axes_can_be_left_to_jax():
    import jax

    state = two_grids()["dense"]
    lifted = dm.shard_map(lambda x: dm.ops.all_reduce(x, "sp"), dm.P(None, "sp"), dm.P(), axes=("sp",))
    x = dm.distribute(np.arange(32.0).reshape(8, 4), dm.P("dp", "sp"))
    y = jax.jit(lifted)(x)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(x)[:, :2] + np.asarray(x)[:, 2:])
    assert y.sharding.is_equivalent_to(state.sharding(dm.P("dp")), 2)
    with pytest.raises(ShardingError, match="leaves that to JAX"):
        dm.shard_map(lambda x: x, dm.P("dp"), dm.P("dp"), axes=("sp",))(x)


@in_jax()
def test_check_replicated_names_the_ranks_that_differ():
    import jax

    two_grids()
    right = dm.shard_map(lambda x: dm.ops.all_reduce(x, "sp"), dm.P("sp"), dm.P(), check_replicated=True)
    np.testing.assert_array_equal(np.asarray(right(np.arange(8.0))), [4.0, 6.0, 8.0, 10.0])
    wrong = dm.shard_map(lambda x: x, dm.P("sp"), dm.P(), check_replicated=True)
    with pytest.raises(ShardingError, match="equal on ranks 0 and 1, but it differs"):
        wrong(np.arange(8.0))
    with pytest.raises(ArgumentError, match="outside jit"):
        jax.jit(right)(np.arange(8.0))


@in_jax()
def test_mistakes_are_named():
    import jax

    two_grids()
    x = np.arange(8.0)
    same = lambda x: x  # noqa: E731
    with pytest.raises(UnknownAxisError, match=r"in_specs.*'spp'.*Did you mean"):
        dm.shard_map(same, dm.P("spp"), dm.P())(x)
    with pytest.raises(ShapeError, match="dim 0 has size 6"):
        dm.shard_map(same, dm.P("dp"), dm.P("dp"))(np.arange(6.0))
    with pytest.raises(ShardingError, match="do not fit"):
        dm.shard_map(same, (dm.P("dp"), dm.P()), dm.P("dp"))(x)
    with pytest.raises(ShardingError, match="more entries"):
        dm.shard_map(same, dm.P("dp"), dm.P("dp", "sp"))(x)
    inner = dm.shard_map(same, dm.P("dp"), dm.P("dp"))
    with pytest.raises(ArgumentError, match="inside a shard_map"):
        dm.shard_map(inner, dm.P("dp"), dm.P("dp"))(x)
    with pytest.raises(ShardingError, match=r"lies on .*'dense' is over"):
        inner(jax.device_put(x, jax.devices()[3]))


@in_jax()
def test_one_jit_over_other_devices_is_refused_with_both_meshes():
    import jax
    from jax.sharding import AxisType, Mesh

    two_grids()
    lifted = dm.shard_map(lambda x: x, dm.P("dp"), dm.P("dp"))
    four = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(four):
        np.testing.assert_array_equal(np.asarray(lifted(np.arange(8.0))), np.arange(8.0))
        with pytest.raises(ShardingError, match=r"State 'dense' is on .*atom_4x2.*one jit with the mesh \('x': 2"):
            jax.jit(lifted)(np.arange(8.0))
    assert jax.sharding.get_mesh().empty


@in_jax()
def test_remat_recomputes_under_the_forwards_scope():
    import jax

    two_meshes()
    read = []

    def layer(x, power, *, name):
        read.append(dm.get_parallel_state().size("sp"))
        return dm.ops.all_reduce(jax.numpy.sin(x), "sp").sum() ** power

    def objective(x):
        with dm.use_parallel_state("b"):
            value = dm.shard_map(
                lambda x: dm.remat(layer)(x, 2, name="static") / 4 / dm.ops.axis_size("dp"),
                dm.P("sp"),
                dm.P(partial=("dp", "sp")),
            )(x)
        return value

    x = np.arange(8.0)
    value, gradient = jax.jit(jax.value_and_grad(objective))(x)
    np.testing.assert_allclose(float(value), np.sin(x).sum() ** 2, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(gradient), 2 * np.sin(x).sum() * np.cos(x), rtol=1e-4)
    assert set(read) == {4}
    assert "remat" in str(jax.make_jaxpr(objective)(x)) or "checkpoint" in str(jax.make_jaxpr(objective)(x))


@in_jax()
def test_sync_gradients_sums_a_tree():
    two_grids()
    lifted = dm.shard_map(lambda x: dm.sync_gradients({"w": x, "b": [2 * x]}, "sp"), dm.P("sp"), dm.P())
    summed = lifted(np.arange(8.0))
    np.testing.assert_array_equal(np.asarray(summed["w"]), [4.0, 6.0, 8.0, 10.0])
    np.testing.assert_array_equal(np.asarray(summed["b"][0]), [8.0, 12.0, 16.0, 20.0])


@in_jax()
def test_an_array_in_another_device_order_is_named_and_can_be_moved():
    import jax

    spec = dm.TopologySpec({"dp": 8})
    dm.init_parallel_state(spec=spec)
    turned = dm.init_parallel_state(spec=spec, ranks=tuple(range(7, -1, -1)), name="turned")
    x = dm.distribute(np.arange(8.0), dm.P("dp"))
    total = dm.shard_map(lambda x: dm.ops.all_reduce(x, "dp", state=turned), dm.P("dp"), dm.P(), state=turned)
    with pytest.raises(ShardingError, match=r"lies on .*in this order, but State 'turned' is over .*dm\.distribute"):
        total(x)
    assert float(total(dm.distribute(x, dm.P("dp"), state=turned))[0]) == 28.0
    assert jax.sharding.get_mesh().empty


@in_jax()
def test_a_captured_variable_that_changed_is_seen_by_the_next_eager_call():
    import jax.numpy as jnp

    two_grids()
    weight, scale, traces = jnp.ones(8), 1.0, []

    def helper(x):
        return x * scale

    def body(x):
        traces.append(1)
        return helper(dm.ops.all_reduce((x * weight[: len(x)]).sum(), "dp"))

    lifted = dm.shard_map(body, dm.P("dp"), dm.P())
    x = np.arange(8.0)
    assert [float(lifted(x)) for _ in range(3)] == [28.0] * 3
    assert len(traces) == 1
    weight = jnp.full(8, 2.0)
    with pytest.warns(dm.errors.StateWarning, match=r"body captured has another value.*as an argument") as said:
        assert float(lifted(x)) == 56.0
    assert "/dualmesh" not in said[0].filename
    scale = 3.0
    with pytest.warns(dm.errors.StateWarning, match="captured"):
        assert float(lifted(x)) == 168.0
    assert float(lifted(x)) == 168.0
    assert len(traces) == 3


@in_jax()
def test_what_tracing_itself_changes_compiles_nothing_anew():
    import warnings

    two_grids()
    calls, log, seen = 0, [], {"shapes": ()}

    def body(x):
        nonlocal calls
        calls += 1
        log.append(calls)
        seen["shapes"] += (x.shape,)
        return dm.ops.all_reduce(x.sum(), "dp")

    lifted = dm.shard_map(body, dm.P("dp"), dm.P())
    with warnings.catch_warnings():
        warnings.simplefilter("error", dm.errors.StateWarning)
        assert [float(lifted(np.arange(8.0))) for _ in range(3)] == [28.0] * 3
        assert [float(lifted(np.arange(16.0))) for _ in range(2)] == [120.0] * 2
        assert float(lifted(np.arange(8.0))) == 28.0
    assert (calls, log, len(seen["shapes"])) == (2, [1, 2], 2)


@in_jax()
def test_what_changed_inside_a_captured_container_is_seen_by_the_next_eager_call():
    two_grids()
    params, layers = {"w": np.full(8, 1.0), "deep": {"b": 0.0}}, [1.0]
    endless = []
    endless.append(endless)

    def body(x):
        assert len(endless) == 1
        total = (x * params["w"][: len(x)] * layers[-1]).sum() + params["deep"]["b"] / dm.ops.axis_size("dp")
        return dm.ops.all_reduce(total, "dp")

    lifted = dm.shard_map(body, dm.P("dp"), dm.P())
    x = np.arange(8.0)
    assert [float(lifted(x)) for _ in range(2)] == [28.0, 28.0]
    for change, expected in (
        (lambda: params.update(w=np.full(8, 2.0)), 56.0),
        (lambda: layers.append(3.0), 168.0),
        (lambda: params["deep"].update(b=1.0), 169.0),
    ):
        change()
        with pytest.warns(dm.errors.StateWarning, match="captured has another value"):
            assert float(lifted(x)) == expected
        assert float(lifted(x)) == expected
    params["w"][:] = 100.0  # in place, inside an array: not looked at
    assert float(lifted(x)) == 169.0


@in_jax()
@pytest.mark.parametrize("give", ["distribute", "shard_local", "shard_map"])
def test_wide_integers_are_narrowed_where_they_fit_and_refused_where_they_would_wrap(give):
    from dualmesh.errors import ArrayTypeError

    dm.init_parallel_state(dp_size=8)
    same = dm.shard_map(lambda x: x, dm.P("dp"), dm.P("dp"))
    run = {
        "distribute": lambda x: dm.distribute(x, dm.P("dp")),
        "shard_local": lambda x: dm.shard_local(x, dm.P("dp")),
        "shard_map": same,
    }[give]
    tokens = np.arange(8, dtype=np.int64) * 31_000
    assert run(tokens).dtype == np.int32
    np.testing.assert_array_equal(np.asarray(run(tokens)), tokens)
    assert run(np.linspace(0, 1, 8)).dtype == np.float32
    for wide in (tokens + 2**31, -tokens - 2**31 - 1, tokens.astype(np.uint64) + 2**32):
        with pytest.raises(ArrayTypeError, match=rf"{give}: u?int64 values from .* do not fit u?int32.*jax_enable_x64"):
            run(wide)


RATE = {"value": 1.0}


@in_jax()
def test_what_is_traced_anew_sees_globals_attributes_and_variables_as_they_are_now():
    """A static argument, another jit, another shape: each trace as that of a `jax.shard_map` written by hand."""
    import functools
    from contextvars import ContextVar
    from types import SimpleNamespace

    import jax

    state = dm.init_parallel_state(spec=dm.TopologySpec({"dp": 8}))
    config, variable, table = SimpleNamespace(temperature=1.0), ContextVar("scale", default=1.0), {"shift": 0.0}

    def scaled(x):
        return x * config.temperature * RATE["value"] * variable.get() + table["shift"]

    by_hand = jax.shard_map(
        lambda x: scaled(jax.lax.psum(x, "dp")),
        mesh=state.mesh,
        in_specs=jax.P("dp"),
        out_specs=jax.P(),
        check_vma=False,
    )
    lifted = dm.shard_map(lambda x: scaled(dm.ops.all_reduce(x, "dp")), dm.P("dp"), dm.P())

    def found(fn):
        config.temperature, RATE["value"], table["shift"] = 1.0, 1.0, 0.0
        token = variable.set(1.0)
        x = np.arange(8, dtype=np.float32)
        step = jax.jit(lambda x, phase: fn(x) + 0 * len(phase), static_argnums=1)
        results = [step(x, "warmup")]
        config.temperature = 2.0
        results.append(step(x, "train"))
        RATE["value"] = 10.0
        results.append(jax.jit(lambda x: fn(x) - 0)(x))
        variable.set(3.0)
        results.append(jax.jit(jax.value_and_grad(lambda x: fn(x).sum()))(x)[0])
        table["shift"] = 1.0
        results.append(jax.jit(lambda x: jax.lax.scan(lambda carry, _: (carry, fn(x)), x, None, length=1)[1][0])(x))
        results.append(jax.jit(functools.partial(jax.vmap(fn)))(np.stack([x, x]))[1])
        variable.reset(token)
        return [float(np.asarray(result).reshape(-1)[0]) for result in results]

    assert found(lifted) == found(by_hand) == [28, 56, 560, 1680, 1681, 1681]


@in_jax()
def test_a_tracer_in_an_attribute_is_met_in_its_own_trace_only():
    """Weights that a trainer puts into an object get their gradient in every jit, as by hand."""
    from types import SimpleNamespace

    import jax

    dm.init_parallel_state(spec=dm.TopologySpec({"dp": 8}))
    box = SimpleNamespace()
    lifted = dm.shard_map(lambda x: dm.ops.all_reduce(x, "dp") * box.weight, dm.P("dp"), dm.P())
    x = np.arange(8, dtype=np.float32)

    def loss(weight, x):
        box.weight = weight
        return lifted(x).sum()

    for _ in range(2):
        assert float(jax.jit(lambda weight, x: jax.grad(loss)(weight, x))(2.0, x)) == 28
        assert float(jax.jit(jax.checkpoint(lambda weight, x: loss(weight, x)))(2.0, x)) == 56
    box.weight = 3.0
    assert float(lifted(x)[0]) == 84


@in_jax()
def test_a_tracer_in_an_attribute_in_an_eager_gradient_does_not_spoil_later_calls():
    """It is met in the gradient that put it there, each time; what eager calls keep never sees it."""
    from types import SimpleNamespace

    import jax

    dm.init_parallel_state(spec=dm.TopologySpec({"dp": 8}))
    box = SimpleNamespace(weight=5.0)
    lifted = dm.shard_map(lambda x: dm.ops.all_reduce(x, "dp") * box.weight, dm.P("dp"), dm.P())
    x = np.arange(8, dtype=np.float32)
    assert float(lifted(x)[0]) == 140

    def loss(weight, x):
        box.weight = weight
        return lifted(x).sum()

    assert float(jax.grad(loss)(2.0, x)) == 28
    assert float(jax.grad(loss)(2.0, x + 1)) == 36
    np.testing.assert_array_equal(jax.vmap(loss, (0, None))(np.arange(3, dtype=np.float32), x), [0, 28, 56])
    assert float(jax.jacfwd(loss)(2.0, x)) == 28
    assert float(jax.grad(lambda weight: jax.grad(loss)(weight, x) * weight)(2.0)) == 28
    assert float(dm.value_and_grad(loss)(np.float32(2.0), x)[1]) == 28
    box.weight = 5.0
    assert float(lifted(x)[0]) == 140


@in_jax()
def test_an_eager_gradient_or_vmap_sees_what_is_true_when_it_is_taken():
    """Globals, attributes, closure cells, contextvars, arrays filled anew: also after eager calls."""
    from contextvars import ContextVar

    import jax

    dm.init_parallel_state(spec=dm.TopologySpec({"dp": 8}))
    variable, filled, factor = ContextVar("scale", default=1.0), np.ones(1, np.float32), 1.0

    class Layer:
        weight = 1.0

        def __call__(self, x):
            return x * self.weight * RATE["value"] * variable.get() * filled * factor

    layer = Layer()
    lifted = dm.shard_map(lambda x: layer(dm.ops.all_reduce(x, "dp")), dm.P("dp"), dm.P())
    x = np.arange(8, dtype=np.float32)
    transformations = {
        "grad": lambda fn: jax.grad(lambda x: fn(x).sum())(x)[0],
        "value_and_grad": lambda fn: dm.value_and_grad(lambda x: fn(x).sum())(x)[1][0],
        "linearize": lambda fn: jax.linearize(fn, x)[1](np.ones_like(x) / 8)[0],
        "vmap": lambda fn: jax.vmap(fn)(np.stack([x, x]))[1][0] / 28,
    }

    def found(fn, transform):
        nonlocal factor
        RATE["value"], layer.weight, filled[:], factor = 1.0, 1.0, 1.0, 1.0
        fn(x)
        results = [transform(fn)]
        RATE["value"], layer.weight = 2.0, 3.0
        results.append(transform(fn))
        filled[:], factor = 5.0, 7.0
        token = variable.set(11.0)
        results.append(transform(fn))
        variable.reset(token)
        return [float(result) for result in results]

    expected = [1, 6, 2310]
    for name, transform in transformations.items():
        assert found(lifted, transform) == expected, name
    RATE["value"] = 1.0


@in_jax()
def test_an_eager_gradient_of_an_unchanged_function_compiles_nothing_anew():
    """It is traced each time, and what it becomes is found among what was compiled, other values of weights too."""
    import logging

    import jax

    dm.init_parallel_state(spec=dm.TopologySpec({"dp": 8}))
    weights = {"w": np.float32(1.0) * np.ones(8, np.float32)}
    passed = jax.custom_vjp(lambda x: x * 1.0)
    passed.defvjp(lambda x: (x, None), lambda _, gradient: (gradient,))

    def body(x):
        return dm.ops.all_reduce(jax.numpy.maximum(x * weights["w"][: len(x)], 0).sum(), "dp")

    lifted = dm.shard_map(body, dm.P("dp"), dm.P())
    by_rule = dm.shard_map(lambda x: passed(body(x)), dm.P("dp"), dm.P())
    x = dm.distribute(np.arange(1, 9, dtype=np.float32), dm.P("dp"))

    def gradient(weight):
        weights["w"] = np.full(8, weight, np.float32)
        return float(jax.grad(lambda x: lifted(x) * 1.0)(x)[0])

    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    assert [gradient(1.0), gradient(2.0)] == [1.0, 2.0]
    with jax.log_compiles():
        logging.getLogger("jax").addHandler(handler)
        assert [gradient(2.0), gradient(5.0)] == [2.0, 5.0]
    logging.getLogger("jax").removeHandler(handler)
    assert not [message for message in said if message.startswith("Compiling")]
    for _ in range(2):  # a rule of one's own is right, and may be compiled anew
        assert float(jax.grad(by_rule)(x)[0]) == 5.0
