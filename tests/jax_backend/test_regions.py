"""What JAX runs on behalf of traced code later (rules, transposes, recomputes) runs in that code's state."""

import functools

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import ScopeError
from tests.jax_backend.worker import in_jax, needs, two_meshes

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3) / 7 - 0.6
WEIGHT = np.linspace(-1, 1, 18, dtype=np.float32).reshape(3, 6)


def two_on_one_mesh():
    """Register "thinker" (2 x 4, the default) and "talker" (4 x 2) before first use: one mesh for both."""
    specs = {"thinker": dm.TopologySpec({"dp": 2, "tp": 4}), "talker": dm.TopologySpec({"dp": 4, "tp": 2})}
    return dm.init_parallel_states(specs, default="thinker")


def copied_in():
    """Return the identity whose gradient is summed over the ambient state's axis "tp": tensor parallelism's entry."""
    import jax

    @jax.custom_vjp
    def copy_in(x):
        return x

    copy_in.defvjp(lambda x: (x, None), lambda _, g: (dm.ops.all_reduce(g, "tp"),))
    return copy_in


def scaled(kind):
    """Return x * the ambient state's size of "dp", whose gradient a custom rule gives."""
    import jax

    def size():
        return dm.get_parallel_state().size("dp")

    if kind == "jvp":
        scale = jax.custom_jvp(lambda x: x * size())
        scale.defjvp(lambda primals, tangents: (primals[0] * size(), tangents[0] * size()))
    else:
        scale = jax.custom_vjp(lambda x: x * size())
        scale.defvjp(lambda x: (x * size(), None), lambda _, g: (g * size(),))
    return scale


def in_talker(fn):
    """Return `fn` in a scope of the talker that is left when it returns."""

    def call(*args):
        with dm.use_parallel_state("talker"):
            return fn(*args)

    return call


@in_jax()
@pytest.mark.parametrize("ambient", ["thinker", "talker"])
@pytest.mark.parametrize("how", ["eager", "jit", "remat", "checkpoint", "scan", "vjp", "dm"])
def test_a_rule_in_a_lifted_function_communicates_in_the_lifted_functions_state(how, ambient):
    """The gradient is numpy's, whatever is ambient where it is taken."""
    import jax
    import jax.numpy as jnp

    talker, copy_in = two_on_one_mesh()["talker"], copied_in()

    def per_rank(x, w):
        if how == "scan":
            x = jax.lax.scan(lambda carry, _: (copy_in(carry), None), x, None, length=1)[0]
            return dm.ops.leave(jnp.sin(x @ w), "tp")
        return dm.ops.leave(jnp.sin((jax.checkpoint(copy_in) if how == "checkpoint" else copy_in)(x) @ w), "tp")

    lifted = dm.shard_map(per_rank, (dm.P("dp"), dm.P(None, "tp")), dm.P("dp"), state=talker)

    def loss(x):
        return lifted(x, WEIGHT).sum()

    gradient = {
        "jit": lambda x: jax.jit(jax.grad(loss))(x),
        "remat": jax.grad(dm.remat(loss)),
        "vjp": lambda x: jax.vjp(jax.jit(loss), x)[1](jnp.ones(()))[0],
        "dm": lambda x: dm.value_and_grad(loss)(x)[1],
    }.get(how, jax.grad(loss))
    expected = sum(np.cos(ROWS @ part) @ part.T for part in (WEIGHT[:, :3], WEIGHT[:, 3:]))
    with dm.use_parallel_state(ambient):
        np.testing.assert_allclose(np.asarray(gradient(jnp.asarray(ROWS))), expected, rtol=1e-4, atol=1e-5)


@in_jax()
@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_a_rule_on_global_arrays_runs_in_the_scope_of_its_forward(kind):
    """Each transformation takes 4, the talker's size, although the scope is left before the rule is traced."""
    import jax
    import jax.numpy as jnp

    two_on_one_mesh()
    scale = scaled(kind)
    inner = jax.jit(scale)

    def scanned(x):
        return jax.lax.scan(lambda carry, _: (scale(carry), None), x, None, length=1)[0]

    ways = {
        "grad": jax.grad(in_talker(scale)),
        "grad of jit": jax.grad(jax.jit(in_talker(scale))),
        "jit inside": jax.grad(in_talker(inner)),
        "jit of grad": jax.jit(jax.grad(in_talker(inner))),
        "scan": jax.jit(jax.grad(in_talker(scanned))),
        "cond": jax.grad(in_talker(lambda x: jax.lax.cond(x > 0, scale, lambda y: 4 * y, x))),
        "checkpoint": jax.grad(jax.checkpoint(in_talker(scale))),
        "policy": jax.grad(
            jax.checkpoint(in_talker(scale), policy=jax.checkpoint_policies.everything_saveable, prevent_cse=False)
        ),
        "dm.remat": jax.grad(in_talker(dm.remat(scale))),
        "dm.scoped": jax.grad(dm.scoped(scale, "talker")),
        "vmap": lambda x: jax.grad(lambda y: jax.vmap(in_talker(scale))(y * jnp.ones(1))[0])(x),
        "vjp, called later": lambda x: in_talker(lambda y: jax.vjp(scale, y))(x)[1](jnp.ones(()))[0],
        "linear_transpose": lambda x: jax.linear_transpose(jax.linearize(in_talker(scale), x)[1], x)(jnp.ones(()))[0],
    }
    if kind == "jvp":
        ways["jvp"] = lambda x: jax.jvp(in_talker(scale), (x,), (jnp.ones(()),))[1]
        ways["linearize, called later"] = lambda x: in_talker(lambda y: jax.linearize(scale, y))(x)[1](jnp.ones(()))
        ways["jacfwd"] = jax.jacfwd(jax.jit(in_talker(scale)))
    for ambient in ("thinker", "talker"):
        with dm.use_parallel_state(ambient):
            found = {way: float(gradient(jnp.asarray(0.5))) for way, gradient in ways.items()}
        assert found == dict.fromkeys(ways, 4.0), ambient
    assert {way: float(gradient(jnp.asarray(0.5))) for way, gradient in ways.items()} == dict.fromkeys(ways, 4.0)
    assert float(jax.grad(scale)(0.5)) == 2, "the default's, outside"


@in_jax()
def test_a_rule_may_open_scopes_of_its_own():
    """Inside, the innermost scope holds, the default's too; after it the region's again."""
    import jax

    two_on_one_mesh()
    seen = []

    def backward(_, g):
        seen.append(dm.scope_name())
        for name in ("thinker", "talker"):
            with dm.use_parallel_state(name):
                seen.append((dm.scope_name(), dm.get_parallel_state().size("dp")))
        seen.append(dm.get_parallel_state().size("dp"))
        return (g,)

    identity = jax.custom_vjp(lambda x: x)
    identity.defvjp(lambda x: (x, None), backward)
    jax.grad(in_talker(identity))(0.5)
    assert seen == ["talker", ("thinker", 2), ("talker", 4), 4]
    assert dm.scope_name() == "thinker"


@in_jax()
def test_nested_scopes_each_keep_their_rules():
    """The default inside the talker is the default's, also when the gradient is taken in the talker."""
    import jax

    two_on_one_mesh()
    scale = scaled("vjp")

    def both(x):
        with dm.use_parallel_state("talker"):
            y = scale(x)
            with dm.use_parallel_state("thinker"):
                return scale(y)

    for take in (jax.grad(both), jax.jit(jax.grad(both)), in_talker(jax.grad(both))):
        assert float(take(0.5)) == 8
        assert float(in_talker(jax.grad(scale))(0.5)) == 4


@in_jax()
def test_states_on_meshes_of_their_own_keep_their_rules_too():
    """Two meshes over the same devices: the rule of b sums over b's axis."""
    import jax

    _, b = two_meshes()
    summed = jax.custom_vjp(lambda x: x)
    summed.defvjp(lambda x: (x, None), lambda _, g: (dm.ops.all_reduce(g, "sp") * dm.get_parallel_state().size("sp"),))
    lifted = dm.shard_map(lambda x: summed(x) * (1 + dm.ops.axis_index("sp")), dm.P(), dm.P("sp"), state=b)
    gradient = jax.grad(lambda x: lifted(x).sum())(np.ones(3, np.float32))
    np.testing.assert_array_equal(np.asarray(gradient), np.full(3, 4 * 4 * (1 + 2 + 3 + 4)))


@in_jax()
def test_a_rule_of_a_state_that_is_gone_is_refused():
    """What is left of a cleared state's trace says so, and gives no other state's answer."""
    import gc

    import jax

    two_on_one_mesh()
    scale = scaled("vjp")
    _, pull = in_talker(lambda x: jax.vjp(scale, x))(0.5)
    dm.clear_parallel_state("talker")
    gc.collect()
    with pytest.raises(ScopeError, match=r"traced in the state 'talker', .*that state was cleared since.*jax\.vjp"):
        pull(np.float32(1))


@in_jax()
@needs("flax")
def test_a_scoped_flax_module_keeps_its_rules():
    """The module of one state in the step of another: the gradient of its input is its own state's."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    two_on_one_mesh()
    scale = scaled("vjp")

    class Scale(nnx.Module):
        def __call__(self, x):
            return scale(x)

    module = dm.scoped(Scale(), "talker")
    assert float(jax.grad(lambda x: module(x))(jnp.asarray(0.5))) == 4
    assert float(jax.jit(jax.grad(lambda x: module(x)))(jnp.asarray(0.5))) == 4


@in_jax()
def test_code_of_one_topology_is_compiled_without_marks():
    """The compiled program is the hand-written one's, and scopes of the default add nothing."""
    import jax

    dm.init_parallel_state(spec=dm.TopologySpec({"dp": 4, "tp": 2}))
    lifted = dm.shard_map(lambda x: dm.ops.all_reduce(x, "tp"), dm.P("tp"), dm.P())
    with dm.use_parallel_state("base"):
        assert "dualmesh" not in jax.jit(lifted).lower(ROWS).as_text()


@in_jax()
def test_a_callback_runs_in_the_state_that_it_was_bound_in_or_is_refused():
    """XLA's threads know no scope: a function bound where it is traced does, another one's question is an error."""
    import jax

    talker, names = two_on_one_mesh()["talker"], []

    def host(x):
        try:
            names.append(dm.scope_name())
        except ScopeError as error:
            names.append(str(error).split("(")[0].strip())
        return np.asarray(x)

    def called(wrap):
        def per_rank(x):
            return jax.pure_callback(wrap(host), jax.ShapeDtypeStruct(x.shape, x.dtype), x)

        names.clear()
        jax.block_until_ready(dm.shard_map(per_rank, dm.P("world"), dm.P("world"), state=talker)(np.ones(8)))
        return set(names), len(names)

    assert called(dm.bind) == ({"talker"}, 8)
    assert called(lambda fn: fn) == ({"get_parallel_state: this is a JAX callback"}, 8)


@in_jax()
def test_a_rule_of_a_forward_in_a_scope_of_the_default_runs_in_the_default():
    """Its pullback is called in another scope, which is not the forward's."""
    import jax

    dm.init_parallel_states({"a": dm.TopologySpec({"dp": 8}), "b": dm.TopologySpec({"dp": 2, "tp": 4})}, default="a")

    @jax.custom_vjp
    def scale(x):
        return x * dm.get_parallel_state().size("dp")

    scale.defvjp(lambda x: (scale(x), None), lambda _, gradient: (gradient * dm.get_parallel_state().size("dp"),))
    with dm.use_parallel_state("a"):
        _, pull = jax.vjp(scale, np.float32(1.0))
        _, pull_jitted = jax.vjp(jax.jit(scale), np.float32(1.0))
    with dm.use_parallel_state("b"):
        assert [float(pull(np.float32(1.0))[0]), float(pull_jitted(np.float32(1.0))[0])] == [8.0, 8.0]


@in_jax()
@pytest.mark.parametrize("is_early", [False, True])
def test_a_rule_of_a_forward_outside_any_scope_runs_in_the_default_whatever_scope_is_open_then(is_early):
    """Also where jitted code was compiled, and its pullback called, before the second topology was registered."""
    import jax

    dm.init_parallel_state(spec=dm.TopologySpec({"dp": 8}), name="a")
    scale, jitted, one = scaled("vjp"), jax.jit(scaled("vjp")), np.float32(1.0)
    if is_early:
        assert [float(jax.grad(fn)(one)) for fn in (scale, jitted)] == [8.0, 8.0]
    dm.init_parallel_state(spec=dm.TopologySpec({"dp": 2, "tp": 4}), name="b")
    pulls = [jax.vjp(fn, one)[1] for fn in (scale, jitted)]
    pushed = jax.linearize(scaled("jvp"), one)[1]
    with dm.use_parallel_state("b"):
        assert [float(pull(one)[0]) for pull in pulls] == [8.0, 8.0]
        assert float(pushed(one)) == 8.0
        assert [float(jax.grad(fn)(one)) for fn in (scale, jitted)] == [2.0, 2.0]
    dm.clear_parallel_state("a")
    assert [float(jax.grad(fn)(one)) for fn in (scale, jitted)] == [2.0, 2.0], "b is the default now"


@in_jax(1)
@pytest.mark.parametrize("kind", ["pure", "io", "debug"])
@pytest.mark.parametrize("is_jitted", [False, True])
def test_a_callback_in_the_calling_thread_that_nobody_bound_is_refused_outside_scopes(kind, is_jitted):
    """On one device JAX calls it in the thread that waits; the default may not be what the code was traced in."""
    import jax
    from jax.experimental import io_callback

    dm.init_parallel_states({"a": dm.TopologySpec({"dp": 1}), "b": dm.TopologySpec({"tp": 1})}, default="a")
    seen = []

    def host(x):
        try:
            seen.append(dm.scope_name() or dm.get_parallel_state().names[0])
        except ScopeError as error:
            seen.append(str(error)[:42])
        return x

    def ask(fn, x):
        if kind == "debug":
            jax.debug.callback(fn, x)
            return x
        call = jax.pure_callback if kind == "pure" else io_callback
        return call(fn, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    for fn in (host, dm.bind(host)):
        program = functools.partial(ask, fn)
        program = jax.jit(program) if is_jitted else program
        jax.block_until_ready(program(jax.numpy.ones(2)))
        jax.effects_barrier()
    assert seen == ["get_parallel_state: this is a JAX callback", "a"]
