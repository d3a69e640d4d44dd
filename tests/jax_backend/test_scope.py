"""What jitted code sees of the ambient state, and what JAX's own contexts are afterwards."""

import numpy as np
import pytest

import dualmesh as dm
from tests.jax_backend.worker import in_jax, two_grids, two_meshes

X = np.arange(8.0)
SUMS = {"a": [4.0, 6.0, 8.0, 10.0], "b": [12.0, 16.0]}


def summed():
    """Return the sum over sp, lifted."""
    return dm.shard_map(lambda x: dm.ops.all_reduce(x, "sp"), dm.P("sp"), dm.P())


def nested(traces=None):
    """Return a function that sums over sp under a, under b, and under what is ambient."""
    total = summed()

    def run(x):
        if traces is not None:
            traces.append(dm.scope_name())
        with dm.use_parallel_state("a"):
            first = total(x)
            with dm.use_parallel_state("b"):
                second = total(x)
            third = total(x)
        return first, second, third, total(x)

    return run


def plain(results):
    return [np.asarray(result).tolist() for result in results]


@in_jax()
def test_jit_traces_once_per_scope_and_answers_for_each():
    import jax

    two_grids()
    traces = []

    @jax.jit
    def size(x):
        traces.append(dm.scope_name())
        return x * dm.get_parallel_state().size("dp_shard")

    def ask(name):
        with dm.use_parallel_state(name):
            return float(size(1.0))

    assert [float(size(1.0)), ask("talker"), ask("dense"), ask("talker"), float(size(1.0))] == [4, 8, 4, 8, 4]
    assert traces == ["dense", "talker", "dense"][: len(traces)]
    assert len(traces) <= 3


@in_jax()
def test_the_process_default_is_part_of_the_jit_key():
    import warnings

    import jax

    traces = []

    @jax.jit
    def size(x):
        traces.append(1)
        return x * dm.get_parallel_state().size("dp")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dm.errors.StateWarning)
        found = [float(size(1.0))]
        dm.init_parallel_state(dp_size=8)
        found.append(float(size(1.0)))
        dm.clear_parallel_state()
        found.append(float(size(1.0)))
        dm.init_parallel_state(dp_size=4, tp_size=2)
        found.append(float(size(1.0)))
    assert found == [1, 8, 1, 4]
    assert len(traces) == 3


@in_jax()
def test_what_jit_keys_on_is_a_small_value_that_keeps_no_state_alive():
    import gc
    import weakref

    import jax

    from dualmesh_jax.cache_keys import key_of

    def step(x):
        with dm.use_parallel_state("talker"):
            y = dm.constrain(x, dm.P("dp"))
        return y * dm.get_parallel_state().size("dp")

    states = two_grids()
    keys = [key_of(state) for state in states.values()]
    assert len({*keys}) == 2
    assert keys[0] == key_of(dm.get_parallel_state())
    for key in keys:
        assert {type(getattr(key, slot)).__name__ for slot in key.__slots__} == {"int", "StatePlan"}
    size = jax.jit(step)
    np.testing.assert_array_equal(np.asarray(size(X)), 4 * X)
    kept = [weakref.ref(state) for state in states.values()]
    dm.clear_parallel_state()
    del states
    gc.collect()
    assert [ref() for ref in kept] == [None, None]
    again = two_grids()
    assert key_of(again["dense"]) != keys[0], "another mesh, another answer"
    np.testing.assert_array_equal(np.asarray(size(X)), 4 * X)


@in_jax()
def test_a_scope_of_another_backends_state_rekeys_jit():
    import jax

    from dualmesh.backend.state_plan import StatePlan, World
    from dualmesh.runtime import init, scope
    from dualmesh_sim.state import SimState

    jax_state = dm.init_parallel_state(dp_size=8)
    topology = dm.parallel_spec(dp_size=2, tp_size=2).resolve(4)
    other = SimState(StatePlan(topology, None, "sim", "cpu"), World(4, (0, 1, 2, 3), "cpu", 1, lambda: True), 1.0)
    size = jax.jit(lambda x: x * dm.get_parallel_state().size("dp"))
    assert float(size(1.0)) == jax_state.size("dp") == 8
    with dm.use_parallel_state(other):
        assert float(size(1.0)) == 2
    assert float(size(1.0)) == 8
    assert init.get_parallel_state_by_name("base") is scope.default_state()


@in_jax()
@pytest.mark.parametrize("around", ["nothing", "a", "b", "user mesh", "same mesh", "with mesh"])
def test_nested_scopes_over_two_meshes_give_right_numbers_under_any_outer_mesh(around):
    import contextlib
    import warnings

    import jax
    from jax.sharding import AxisType, Mesh

    a, _ = two_meshes()
    user = Mesh(np.array(jax.devices()).reshape(2, 4), ("dp", "mine"), axis_types=(AxisType.Auto,) * 2)
    contexts = {
        "nothing": contextlib.nullcontext,
        "a": lambda: dm.use_parallel_state("a"),
        "b": lambda: dm.use_parallel_state("b"),
        "user mesh": lambda: jax.set_mesh(user),
        "same mesh": lambda: jax.set_mesh(a.mesh),
        "with mesh": lambda: user,
    }
    last = "b" if around == "b" else "a"
    expected = [SUMS["a"], SUMS["b"], SUMS["a"], SUMS[last]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with contexts[around]():
            traces = []
            step = jax.jit(nested(traces))
            assert plain(step(X)) == plain(step(X)) == expected
            assert len(traces) == 1
            assert plain(nested()(X)) == expected
            around_mesh = jax.sharding.get_mesh()
    assert (around_mesh == user) == (around == "user mesh")
    assert jax.sharding.get_mesh().empty
    assert jax.sharding.get_abstract_mesh().empty


@in_jax()
def test_a_scope_sets_the_mesh_outside_tracing_and_restores_the_users():
    import jax
    from jax.sharding import AxisType, Mesh

    states = two_grids()
    user = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(user):
        with dm.use_parallel_state("dense"):
            assert jax.sharding.get_mesh() == states["dense"].mesh
            with pytest.raises(KeyError), dm.use_parallel_state("talker"):
                raise KeyError
            assert jax.sharding.get_mesh() == states["dense"].mesh
        assert jax.sharding.get_mesh() == user
        assert jax.sharding.get_abstract_mesh() == user.abstract_mesh
    assert jax.sharding.get_mesh().empty


@in_jax()
def test_a_sharded_init_without_inputs_lands_on_all_devices():
    import jax
    import jax.numpy as jnp

    state = two_grids()["dense"]
    with dm.use_parallel_state("dense"):
        made = jax.jit(lambda: jax.lax.with_sharding_constraint(jnp.zeros((8, 4)), state.pspec("dp_shard", "sp")))()
    assert made.addressable_shards[0].data.shape == (2, 2)
    assert len(made.sharding.device_set) == 8


@in_jax()
@pytest.mark.parametrize("transform", ["jit", "grad", "eager grad", "vmap", "scan", "remat", "custom_vjp"])
def test_scopes_open_inside_every_transformation(transform):
    import jax
    import jax.numpy as jnp
    from jax import lax

    two_meshes()
    total = summed()
    read = []

    def both(x):
        with dm.use_parallel_state("b"):
            read.append(dm.get_parallel_state().size("sp"))
            return (total(x) ** 2).sum()

    @jax.custom_vjp
    def custom(x):
        return both(x)

    def backward(x, g):
        with dm.use_parallel_state("a"):
            assert dm.get_parallel_state().size("sp") == 2
        return (g * jax.grad(both)(x),)

    custom.defvjp(lambda x: (both(x), x), backward)

    x = jnp.asarray(X)
    block_sums = X.reshape(4, 2).sum(0)
    value, gradient = (block_sums**2).sum(), np.tile(2 * block_sums, 4)
    runs = {
        "jit": lambda: (jax.jit(both)(x), gradient),
        "grad": lambda: jax.jit(jax.value_and_grad(both))(x),
        "eager grad": lambda: jax.value_and_grad(both)(x),
        "vmap": lambda: (jax.jit(jax.vmap(both))(jnp.stack([x, 2 * x]))[1] / 4, gradient),
        "scan": lambda: (jax.jit(lambda x: lax.scan(lambda c, y: (c + both(y), None), 0.0, x[None])[0])(x), gradient),
        "remat": lambda: jax.jit(jax.value_and_grad(jax.checkpoint(both)))(x),
        "custom_vjp": lambda: jax.jit(jax.value_and_grad(custom))(x),
    }
    found_value, found_gradient = runs[transform]()
    assert float(found_value) == value
    np.testing.assert_array_equal(np.asarray(found_gradient), gradient)
    assert set(read) == {4}
    assert dm.scope_name() == "a"
    assert jax.sharding.get_mesh().empty
    assert jax.sharding.get_abstract_mesh().empty


def transformed(both):
    """Return, by name, (a jitted program around `both`, what it gives for its value) for every transformation."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    @jax.custom_vjp
    def custom(x):
        return both(x)[0]

    custom.defvjp(lambda x: (both(x)[0], x), lambda x, g: (g * x,))
    inside = lambda x: both(x)[0]  # noqa: E731
    return {
        "jit": lambda x: both(x),
        "grad": lambda x: jax.value_and_grad(both, has_aux=True)(x)[0],
        "vmap": lambda x: jax.tree.map(lambda y: y[1], jax.vmap(both)(jnp.stack([2 * x, x]))),
        "scan": lambda x: jax.tree.map(lambda y: y[0], lax.scan(lambda c, y: (c, both(y)), 0.0, x[None])[1]),
        "remat": lambda x: (jax.value_and_grad(jax.checkpoint(inside))(x)[0], both(x)[1]),
        "custom_vjp": lambda x: (jax.value_and_grad(custom)(x)[0], both(x)[1]),
        "cond": lambda x: lax.cond(x.sum() > 0, both, both, x),
    }


@in_jax()
@pytest.mark.parametrize("around", ["nothing", "b", "user mesh", "same mesh", "with mesh"])
def test_values_shardings_and_traces_are_right_in_every_transformation_under_every_mesh(around):
    import contextlib
    import warnings

    import jax
    from jax.sharding import AxisType, Mesh

    states = two_grids()
    user = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    total = dm.shard_map(lambda x: dm.ops.all_reduce(x.sum(), "dp"), dm.P("dp"), dm.P())
    contexts = {
        "nothing": contextlib.nullcontext,
        "b": lambda: dm.use_parallel_state("talker"),
        "user mesh": lambda: jax.set_mesh(user),
        "same mesh": lambda: jax.set_mesh(states["dense"].mesh),
        "with mesh": lambda: user,
    }
    traces = []

    def both(x):
        with dm.use_parallel_state("dense"):
            traces.append(dm.get_parallel_state().size("dp"))
            with dm.use_parallel_state("talker"):
                traces.append(dm.get_parallel_state().size("dp"))
                value = total(x)
            return value, dm.constrain(x + 1, dm.P("sp"))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with contexts[around]():
            before = jax.sharding.get_mesh()
            for name, program in transformed(both).items():
                traces.clear()
                step = jax.jit(program)
                for factor in (1, 2, 3):
                    value, moved = step(factor * X)
                    assert float(value) == factor * X.sum(), name
                    np.testing.assert_array_equal(np.asarray(moved), factor * X + 1, err_msg=name)
                if name not in ("vmap", "scan", "cond"):  # there the layout of what is inside is JAX's business
                    assert moved.sharding.is_equivalent_to(states["dense"].sharding(dm.P("sp")), 1), name
                assert set(traces) == {4, 8}, name
                assert len(traces) <= 4, f"{name}: traced more than once per use"
                assert jax.sharding.get_mesh() == before, name
    assert jax.sharding.get_mesh().empty
    assert jax.sharding.get_abstract_mesh().empty


@in_jax()
def test_exceptions_inside_jit_restore_every_context():
    import jax

    two_meshes()

    def failing(x):
        with dm.use_parallel_state("b"):
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        jax.jit(failing)(X)
    assert dm.scope_name() == "a"
    assert jax.sharding.get_mesh().empty
    assert jax.sharding.get_abstract_mesh().empty
    assert float(jax.jit(lambda x: x * dm.get_parallel_state().size("sp"))(1.0)) == 2


@in_jax()
def test_an_old_answer_never_outlives_its_session_or_its_mesh():
    import jax

    mesh_of = jax.jit(lambda x: dm.constrain(x, dm.P("dp")))
    dm.init_parallel_state(spec=dm.TopologySpec({"dp": 8}))
    assert mesh_of(X).sharding.mesh.axis_names == ("dp",)
    dm.clear_parallel_state()
    states = {"one": dm.TopologySpec({"dp": 8}), "two": dm.TopologySpec({"x": 2, "y": 4})}
    dm.init_parallel_states(states)
    assert mesh_of(X).sharding.mesh.axis_names == ("x", "y")


def asked_by_name(traces):
    """Return jitted functions that ask for "talker" by its name, each in another way, and note when traced."""
    import jax

    def opened(x):
        traces.append("opened")
        with dm.use_parallel_state("talker") as talker:
            return x * talker.size("dp")

    def asked(x):
        traces.append("asked")
        return x * dm.get_parallel_state_by_name("talker").size("dp")

    def size(x):
        traces.append("scoped")
        return x * dm.get_parallel_state().size("dp")

    def if_there(x):
        traces.append("if there")
        try:
            return x * dm.get_parallel_state_by_name("talker").size("dp")
        except dm.errors.UnknownStateError:
            return -x

    lifted = dm.shard_map(lambda x: opened(x), dm.P("dp"), dm.P("dp"))
    scanned = jax.jit(lambda x: jax.lax.scan(lambda carry, _: (opened(carry), None), x, None, length=1)[0])
    functions = {
        **{fn.__name__: jax.jit(fn) for fn in (opened, asked, if_there)},
        **{"scoped": jax.jit(dm.scoped(size, "talker")), "decorated": jax.jit(dm.use_parallel_state("talker")(size))},
        **{"checkpoint": jax.jit(jax.checkpoint(opened)), "lifted": lifted, "scan": scanned},
    }
    return functions


def answers(functions, x):
    """Return what each function makes of ones, or the name of its error."""
    found = {}
    for name, fn in functions.items():
        try:
            found[name] = float(np.asarray(fn(x)).mean())
        except Exception as error:
            found[name] = type(error).__name__
    return found


@in_jax()
@pytest.mark.parametrize("ambient", [None, "thinker"])
def test_jitted_code_that_looks_up_a_name_answers_for_what_it_means_now(ambient):
    """A new name and the old meaning again compile nothing; another meaning answers for it; none is an error."""
    import contextlib

    specs = {"thinker": {"dp": 4, "tp": 2}, "talker": {"dp": 8}, "spare": {"a": 2, "b": 2, "c": 2}}
    dm.init_parallel_states({name: dm.TopologySpec(spec) for name, spec in specs.items()}, default="thinker")
    traces, x = [], np.ones(8, np.float32)
    functions = asked_by_name(traces)

    def scope():
        return contextlib.nullcontext() if ambient is None else dm.use_parallel_state(ambient)

    def now():
        with scope():
            return answers(functions, x)

    assert now() == dict.fromkeys(functions, 8)
    count = len(traces)
    dm.init_parallel_state(spec=dm.TopologySpec({"q": 8}), name="another")
    dm.clear_parallel_state("another")
    assert now() == dict.fromkeys(functions, 8)
    assert len(traces) == count
    dm.clear_parallel_state("talker")
    assert now() == dict.fromkeys(functions, "UnknownStateError") | {"if_there": -1}
    dm.init_parallel_state(spec=dm.TopologySpec({"dp": 2, "tp": 4}), name="talker")
    assert now() == dict.fromkeys(functions, 2)
    dm.clear_parallel_state("talker")
    dm.init_parallel_state(spec=dm.TopologySpec({"dp": 8}), name="talker")
    count = len(traces)
    assert now() == dict.fromkeys(functions, 8)
    assert len(traces) == count


@in_jax()
def test_jitted_code_that_was_given_a_state_refuses_once_it_is_cleared():
    """A captured state is stale in compiled code as it is outside."""
    import jax

    talker = two_grids()["talker"]
    total = dm.shard_map(lambda x: dm.ops.all_reduce(x, "dp", state=talker), dm.P("dp"), dm.P(), state=talker)
    functions = {
        "lifted": jax.jit(lambda x: total(x)),
        "constrained": jax.jit(lambda x: dm.constrain(x, dm.P("dp"), state=talker)),
    }
    assert set(answers(functions, X)) == {"lifted", "constrained"}
    assert "StaleStateError" not in answers(functions, X).values()
    dm.clear_parallel_state("talker")
    assert answers(functions, X) == dict.fromkeys(functions, "StaleStateError")


HELD_OPEN = """
import asyncio, os
os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import dualmesh as dm
from dualmesh.errors import ScopeError

async def held():
    with dm.use_parallel_state("b"):
        await asyncio.sleep(0.02)
        return dm.scope_name(), dm.get_parallel_state().size("tp")

async def beside():
    await asyncio.sleep(0.01)
    return dm.scope_name(), dm.get_parallel_state().size("dp")

async def both():
    return await asyncio.gather(held(), beside())

with dm.session(backend="sim", world_size=4):
    dm.init_parallel_states({"a": dm.TopologySpec({"dp": 4}), "b": dm.TopologySpec({"tp": 4})}, default="a")

    @dm.use_parallel_state("b")
    async def scoped():
        return dm.scope_name()

    assert asyncio.run(dm.scoped(scoped, "b")()) == "b"
    for _ in range(2):
        assert asyncio.run(both()) == [("b", 4), ("a", 4)]
    jax.devices()
    try:
        asyncio.run(both())
    except ScopeError as error:
        assert "held open across an await" in str(error)
    else:
        raise SystemExit("not refused once JAX has started")
"""


def test_blocks_held_open_across_an_await_are_refused_only_once_jax_has_started():
    """Where JAX was imported only, both tasks see their own state; once it runs, it would keep the answer."""
    import subprocess
    import sys

    ended = subprocess.run([sys.executable, "-c", HELD_OPEN], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
