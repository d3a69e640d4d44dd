"""JAX models by a plan: plain trees, equinox and flax NNX modules, models born sharded."""

from importlib.util import find_spec

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import ArgumentError, ShardingError
from tests.jax_backend.worker import in_jax

SPEC = dm.TopologySpec({"fsdp": 2, "tp": 2, "sp": 2})
PLAN = dm.ShardingPlan({"layers.*.*e*": dm.P("tp", "fsdp"), "layers.*.bias": dm.P(("tp", "fsdp"))}, default=dm.P())
needs_equinox = pytest.mark.skipif(find_spec("equinox") is None, reason="equinox is not installed (extra: test)")
needs_flax = pytest.mark.skipif(find_spec("flax") is None, reason="flax is not installed (extra: test)")


def shards(x):
    return {shard.data.shape for shard in x.addressable_shards}


def equal(one, other):
    """Tell whether two trees have the same structure and the same bits."""
    import jax

    same = jax.tree.map(lambda a, b: a is b if callable(a) else bool(np.array_equal(a, b)), one, other)
    return all(jax.tree.leaves(same))


def tree(key):
    import jax

    keys = jax.random.split(key, 4)
    layer = {"kernel": (8, 4), "bias": (4,)}
    layers = [
        {name: jax.random.normal(keys[2 * i + j], shape) for j, (name, shape) in enumerate(layer.items())}
        for i in range(2)
    ]
    return {"layers": layers, "scale": jax.numpy.ones(3)}


@in_jax()
def test_a_tree_is_cut_described_and_born_by_the_plan():
    import jax

    state = dm.init_parallel_state(spec=SPEC)
    whole = tree(jax.random.key(0))
    applied, born = PLAN.apply(whole), dm.init_sharded(tree, PLAN, jax.random.key(0))
    abstract, shardings = PLAN.abstract(whole), PLAN.shardings(whole)
    jax.tree.map(lambda a, s: np.testing.assert_equal(a.sharding, s), abstract, shardings)
    for model in (applied, born):
        assert equal(model, whole)
        assert shards(model["layers"][1]["kernel"]) == {(4, 2)}
        assert shards(model["layers"][0]["bias"]) == {(1,)}
        same = jax.tree.map(lambda x, a: x.sharding.is_equivalent_to(a.sharding, x.ndim), model, abstract)
        assert all(jax.tree.leaves(same))
    assert state.spec_of(born["layers"][0]["kernel"]) == dm.P("tp", "fsdp")


@in_jax()
def test_mistakes_are_named():
    import jax

    state = dm.init_parallel_state(spec=SPEC)
    with pytest.raises(ShardingError, match=r"size 3, which 'fsdp' of size 2 does not divide: scale"):
        dm.ShardingPlan({"scale": dm.P("fsdp"), "**": dm.P()}).apply(tree(jax.random.key(0)))
    with pytest.raises(ShardingError, match=r"no pattern matches, and the plan has no default: layers.0.bias"):
        dm.init_sharded(tree, dm.ShardingPlan({"**.kernel": dm.P()}), jax.random.key(0))
    with pytest.raises(ArgumentError, match="units="):
        dm.ShardingPlan({"scale": dm.P()}).apply({"scale": np.ones(3)}, units="x")
    with pytest.raises(ShardingError, match="is not on the mesh of"):
        state.spec_of(np.ones(3))


@needs_equinox
@in_jax()
def test_an_equinox_module_keeps_its_functions_and_computes_the_same():
    import equinox
    import jax

    dm.init_parallel_state(spec=SPEC)

    def made(key):
        return equinox.nn.MLP(4, 8, 8, 2, key=key)

    whole = made(jax.random.key(1))
    for model in (PLAN.apply(whole), dm.init_sharded(made, PLAN, jax.random.key(1))):
        assert equal(model, whole)
        assert shards(model.layers[1].weight) == {(4, 4)}
        assert shards(model.layers[1].bias) == {(2,)}
        x = np.arange(4.0, dtype=np.float32)
        np.testing.assert_allclose(equinox.filter_jit(lambda m, x: m(x))(model, x), whole(x), rtol=1e-5)


@needs_flax
@in_jax()
def test_a_flax_module_has_paths_without_the_key_of_its_variables():
    import jax
    from flax import nnx

    state = dm.init_parallel_state(spec=SPEC)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)])
            self.act = nnx.relu

        def __call__(self, x):
            return self.layers[1](self.act(self.layers[0](x)))

    def made(key):
        return nnx.state(Net(nnx.Rngs(key)), nnx.Param)

    whole = Net(nnx.Rngs(jax.random.key(2)))
    structure, _ = nnx.split(whole, nnx.Param)
    paths = [path for path, _ in state.models.parameters(whole)]
    assert paths == ["layers.0.bias", "layers.0.kernel", "layers.1.bias", "layers.1.kernel"]
    assert [path for path, _ in state.models.parameters(nnx.state(whole, nnx.Param))] == paths
    born = nnx.merge(structure, dm.init_sharded(made, PLAN, jax.random.key(2)))
    for model in (PLAN.apply(whole), born):
        assert shards(model.layers[0].kernel[...]) == {(2, 4)}
        assert shards(model.layers[1].bias[...]) == {(1,)}
        x = np.arange(4.0, dtype=np.float32)
        np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(model, x), whole(x), rtol=1e-5)
