"""`dm.scoped`: modules of flax NNX and equinox, and functions, run in their state whoever calls or transforms them."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import ArgumentError
from tests.jax_backend.worker import in_jax, needs, two_meshes

X = np.arange(8.0, dtype=np.float32)
TWICE = {"a": 4.0, "b": 8.0}


def nnx_module():
    from flax import nnx

    class Scaled(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(np.float32(2.0))

        def __call__(self, x, *, power=1):
            return (self.weight[...] * dm.get_parallel_state().size("sp") * x) ** power

    return Scaled()


def equinox_module():
    import equinox as eqx

    class Scaled(eqx.Module):
        weight: np.ndarray

        def __call__(self, x, *, power=1):
            return (self.weight * dm.get_parallel_state().size("sp") * x) ** power

    return Scaled(np.float32(2.0))


def function():
    def scaled(x, *, power=1):
        return (np.float32(2.0) * dm.get_parallel_state().size("sp") * x) ** power

    return scaled


KINDS = {
    "nnx": pytest.param(nnx_module, marks=needs("flax"), id="nnx"),
    "equinox": pytest.param(equinox_module, marks=needs("equinox"), id="equinox"),
    "function": pytest.param(function, id="function"),
}


@pytest.mark.parametrize("make", KINDS.values())
@in_jax()
def test_calls_run_in_the_state_under_every_transformation_and_restore_the_callers(make):
    import jax

    two_meshes()
    module = make()
    assert float(module(1.0)) == TWICE["a"]
    scoped = dm.scoped(module, "b")
    runs = {
        "eager": lambda x: scoped(x),
        "jit": jax.jit(lambda x: scoped(x)),
        "vmap": jax.vmap(lambda x: scoped(x)),
        "scan": lambda x: jax.lax.scan(lambda c, y: (c, scoped(y)), 0.0, x)[1],
        "checkpoint": lambda x: jax.checkpoint(lambda y: scoped(y))(x),
        "remat": lambda x: dm.remat(lambda y: scoped(y))(x),
        "nested": lambda x: jax.jit(lambda y: scoped(y) + 0 * dm.get_parallel_state().size("sp"))(x),
    }
    for name, run in runs.items():
        np.testing.assert_array_equal(np.asarray(run(X)), TWICE["b"] * X, err_msg=name)
        assert dm.scope_name() == "a", name
    with dm.use_parallel_state("a"):
        gradient = jax.jit(jax.grad(lambda x: scoped(x, power=2).sum()))(X)
    np.testing.assert_array_equal(np.asarray(gradient), 2 * TWICE["b"] ** 2 * X)
    again = dm.scoped(scoped, dm.get_parallel_state_by_name("a"))
    assert float(again(1.0)) == (TWICE["a"] if make is not function else TWICE["b"]), "functions keep the inner scope"


@needs("flax")
@in_jax()
def test_an_nnx_module_stays_the_same_object_with_the_same_state_and_trains():
    import copy

    import jax
    from flax import nnx

    two_meshes()
    module = nnx_module()
    keys = jax.tree.structure(nnx.state(module))
    kind = type(module)
    assert dm.scoped(module, "b") is module
    assert isinstance(module, kind)
    assert jax.tree.structure(nnx.state(module)) == keys

    @nnx.jit
    def step(module, x):
        value, gradients = nnx.value_and_grad(lambda module: module(x).sum())(module)
        module.weight[...] -= 0.1 * gradients.weight[...]
        return value

    assert float(step(module, X)) == TWICE["b"] * X.sum()
    assert float(module.weight[...]) == pytest.approx(2.0 - 0.1 * 4 * X.sum())
    definition, state = nnx.split(module)
    assert float(nnx.merge(definition, state)(1.0)) == pytest.approx(4 * float(module.weight[...]))
    assert float(copy.deepcopy(module)(1.0)) == pytest.approx(4 * float(module.weight[...]))


@needs("equinox")
@in_jax()
def test_an_equinox_module_keeps_its_leaves_and_its_filters():
    import equinox as eqx
    import jax

    two_meshes()
    module = equinox_module()
    scoped = dm.scoped(module, "b")
    assert scoped is not module
    assert float(module(1.0)) == TWICE["a"]
    assert jax.tree.leaves(scoped) == jax.tree.leaves(module)
    assert jax.tree.structure(dm.scoped(module, "b")) == jax.tree.structure(scoped)
    value, gradients = eqx.filter_jit(eqx.filter_value_and_grad(lambda module: module(X).sum()))(scoped)
    assert float(value) == TWICE["b"] * X.sum()
    moved = eqx.apply_updates(scoped, jax.tree.map(lambda g: -0.1 * g, gradients))
    assert float(moved(1.0)) == pytest.approx(4 * (2.0 - 0.1 * 4 * X.sum()))


@needs("flax")
@in_jax()
def test_a_linen_module_is_refused_with_what_to_scope():
    from flax import linen

    two_meshes()
    with pytest.raises(ArgumentError, match=r"flax\.linen module \(Dense\).*dm\.scoped\(module\.apply, 'b'\)"):
        dm.scoped(linen.Dense(2), "b")


@in_jax()
def test_the_name_is_looked_up_at_each_call():
    import jax

    two_meshes()
    scoped = dm.scoped(function(), "later")
    size = jax.jit(lambda x: scoped(x))
    dm.init_parallel_state(dp_size=1, tp_size=8, spec=None, name="later")
    assert float(size(1.0)) == 2.0
    dm.clear_parallel_state()
    dm.init_parallel_state(ulysses_size=8, name="later")
    assert float(size(1.0)) == 16.0
