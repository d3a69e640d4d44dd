"""Small trainings with optax, flax NNX, equinox and orbax, equal to the run on one device; shards asserted."""

import numpy as np
import pytest

import dualmesh as dm
from tests.jax_backend.worker import fresh, in_jax, needs

RATE, STEPS = 0.05, 3
LAYOUTS = {
    "data parallel": {"w1": dm.P(), "w2": dm.P()},
    "fsdp": {"w1": dm.P(("dp", "tp")), "w2": dm.P(("dp", "tp"))},
    "tensor parallel": {"w1": dm.P(None, "tp"), "w2": dm.P("tp")},
    "both": {"w1": dm.P("dp", "tp"), "w2": dm.P("tp", None)},
}


def grid():
    return dm.init_parallel_state(spec=dm.TopologySpec({"dp": 4, "tp": 2}))


def problem():
    draw = np.random.default_rng(0)
    weights = {"w1": draw.normal(size=(8, 16)) / 3, "w2": draw.normal(size=(16, 4)) / 4}
    data = draw.normal(size=(STEPS, 16, 8)), draw.normal(size=(STEPS, 16, 4))
    to_float = lambda x: x.astype(np.float32)  # noqa: E731
    return {name: to_float(w) for name, w in weights.items()}, tuple(map(to_float, data))


def predicted(weights, x):
    import jax.numpy as jnp

    return jnp.tanh(x @ weights["w1"]) @ weights["w2"]


def trained(params, xs, ys, *, keep=lambda params: params, place=lambda x: x, predict=predicted):
    """Train by optax's Adam in one jit; return (params, losses)."""
    import jax
    import optax

    optimizer = optax.adam(RATE)
    state = jax.jit(optimizer.init)(params)

    @jax.jit
    def step(params, state, x, y):
        value, gradients = jax.value_and_grad(lambda params: ((predict(params, x) - y) ** 2).mean())(params)
        updates, state = optimizer.update(gradients, state, params)
        return keep(optax.apply_updates(params, updates)), state, value

    losses = []
    for x, y in zip(xs, ys, strict=True):
        params, state, loss = step(params, state, place(x), place(y))
        losses.append(float(loss))
    return params, losses


def on_one_device():
    """Return what one device computes, without dualmesh."""
    weights, (xs, ys) = problem()
    params, losses = trained(weights, xs, ys)
    return {name: np.asarray(w) for name, w in params.items()}, losses


@needs("optax")
@in_jax()
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("remat", [False, True])
def test_plain_pytrees_train_alike_in_every_layout_and_stay_in_it(layout, remat):
    wanted, losses = on_one_device()
    state, specs = grid(), LAYOUTS[layout]
    weights, (xs, ys) = problem()
    params, found = trained(
        {name: dm.distribute(w, specs[name]) for name, w in weights.items()},
        xs,
        ys,
        keep=lambda params: {name: dm.constrain(w, specs[name]) for name, w in params.items()},
        place=lambda x: dm.distribute(x, dm.P("dp")),
        predict=dm.remat(predicted) if remat else predicted,
    )
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for name, w in params.items():
        np.testing.assert_allclose(np.asarray(w), wanted[name], rtol=1e-4, atol=1e-6)
        assert w.sharding.is_equivalent_to(state.sharding(specs[name]), 2)
        assert w.addressable_shards[0].data.shape == tuple(
            cut.stop - cut.start for cut in dm.local_slices(specs[name], w.shape, 0)
        )


@needs("flax", "optax")
@in_jax()
def test_an_nnx_module_trains_with_optax_as_on_one_device():
    import jax.numpy as jnp
    import optax
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, weights):
            self.w1, self.w2 = nnx.Param(jnp.asarray(weights["w1"])), nnx.Param(jnp.asarray(weights["w2"]))

        def __call__(self, x):
            return predicted({"w1": self.w1[...], "w2": self.w2[...]}, x)

    def run(net, place):
        optimizer = nnx.Optimizer(net, optax.adam(RATE), wrt=nnx.Param)

        @nnx.jit
        def step(net, optimizer, x, y):
            value, gradients = nnx.value_and_grad(lambda net: ((net(x) - y) ** 2).mean())(net)
            optimizer.update(net, gradients)
            return value

        return [float(step(net, optimizer, place(x), place(y))) for x, y in zip(xs, ys, strict=True)]

    weights, (xs, ys) = problem()
    losses = run(Net(weights), lambda x: x)
    np.testing.assert_allclose(losses, on_one_device()[1], rtol=1e-5)
    state, specs = grid(), LAYOUTS["both"]
    with dm.use_parallel_state(state):
        net = dm.scoped(Net(weights), "base")
        for name, spec in specs.items():
            getattr(net, name)[...] = dm.distribute(weights[name], spec)
        found = run(net, lambda x: dm.distribute(x, dm.P("dp")))
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for name, spec in specs.items():
        assert getattr(net, name)[...].sharding.is_equivalent_to(state.sharding(spec), 2)


@needs("equinox", "optax")
@in_jax()
def test_an_equinox_module_trains_with_optax_as_on_one_device():
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import optax

    class Net(eqx.Module):
        w1: jax.Array
        w2: jax.Array

        def __call__(self, x):
            return predicted({"w1": self.w1, "w2": self.w2}, x)

    def run(net, place):
        optimizer = optax.adam(RATE)
        opt_state = optimizer.init(eqx.filter(net, eqx.is_array))

        @eqx.filter_jit
        def step(net, opt_state, x, y):
            value, gradients = eqx.filter_value_and_grad(lambda net: ((net(x) - y) ** 2).mean())(net)
            updates, opt_state = optimizer.update(gradients, opt_state, net)
            return eqx.apply_updates(net, updates), opt_state, value

        losses = []
        for x, y in zip(xs, ys, strict=True):
            net, opt_state, loss = step(net, opt_state, place(x), place(y))
            losses.append(float(loss))
        return net, losses

    weights, (xs, ys) = problem()
    _, losses = run(Net(jnp.asarray(weights["w1"]), jnp.asarray(weights["w2"])), lambda x: x)
    state, specs = grid(), LAYOUTS["both"]
    net = Net(*(dm.distribute(weights[name], spec) for name, spec in specs.items()))
    net, found = run(dm.scoped(net, "base"), lambda x: dm.distribute(x, dm.P("dp")))
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    np.testing.assert_allclose(losses, on_one_device()[1], rtol=1e-5)
    for name, spec in specs.items():
        assert getattr(net, name).sharding.is_equivalent_to(state.sharding(spec), 2)


@needs("orbax", "optax")
def test_orbax_writes_under_one_topology_and_reads_under_another(tmp_path):
    # A process of its own: orbax keeps threads and a loop that would outlive the test.
    code = f"""
import warnings
warnings.simplefilter("ignore")
import jax, numpy as np, orbax.checkpoint as ocp
import dualmesh as dm
whole = {{"w": np.arange(64.0, dtype=np.float32).reshape(8, 8), "b": np.arange(8.0, dtype=np.float32)}}
path = {str(tmp_path / "checkpoint")!r}
with dm.session("jax", world_size=8):
    dm.init_parallel_state(spec=dm.TopologySpec({{"dp": 4, "tp": 2}}))
    with ocp.StandardCheckpointer() as checkpointer:
        specs = {{"w": dm.P("dp", "tp"), "b": dm.P("tp")}}
        checkpointer.save(path, {{name: dm.distribute(x, specs[name]) for name, x in whole.items()}})
    dm.clear_parallel_state()
    state = dm.init_parallel_state(spec=dm.TopologySpec({{"dp": 2, "fsdp": 4}}))
    specs = {{"w": dm.P("fsdp", "dp"), "b": dm.P(("dp", "fsdp"))}}
    target = {{n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=state.sharding(specs[n])) for n, x in whole.items()}}
    with ocp.StandardCheckpointer() as checkpointer:
        read = checkpointer.restore(path, target)
    for name, x in whole.items():
        np.testing.assert_array_equal(dm.to_numpy(read[name]), x)
        assert read[name].sharding.is_equivalent_to(state.sharding(specs[name]), x.ndim)
    print("read", read["w"].addressable_shards[0].data.shape)
"""
    assert fresh(code).splitlines()[-1] == "read (2, 4)"


@needs("optax")
@in_jax()
def test_dense_constraints_ulysses_and_experts_meet_in_one_jit_from_named_states():
    import jax
    import jax.numpy as jnp

    dm.init_parallel_states(
        {
            "thinker": dm.parallel_spec(dp_size=4, ulysses_size=2),
            "talker": dm.parallel_spec(dp_size=8, ep_size=8),
        },
        default="thinker",
    )
    draw = np.random.default_rng(3)
    make = lambda *shape: draw.normal(size=shape).astype(np.float32)  # noqa: E731
    x, dense, experts = make(8, 16, 4, 2), make(8, 8) / 3, make(8, 8, 8) / 3

    def attend(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    def mixed_by_experts(rows, own):
        sent = dm.ops.all_to_all(rows, "ep", split_dim=0, concat_dim=0)
        return dm.ops.all_to_all(jnp.tanh(sent @ own[0]), "ep", split_dim=0, concat_dim=0)

    def loss(x, dense, experts):
        with dm.use_parallel_state("thinker"):
            turned = dm.constrain(x.reshape(8, 16, 8) @ dense, dm.P("dp", "ulysses")).reshape(x.shape)
            ulysses = dm.shard_map(
                lambda x: dm.sequence.ulysses_attention(x, x, x, attend), dm.P("dp", "ulysses"), dm.P("dp", "ulysses")
            )
            rows = ulysses(turned).reshape(8 * 16, 8)
        with dm.use_parallel_state("talker"):
            return (dm.shard_map(mixed_by_experts, (dm.P("dp"), dm.P("ep")), dm.P("dp"))(rows, experts) ** 2).sum()

    def on_one(x, dense, experts):
        turned = (x.reshape(8, 16, 8) @ dense).reshape(x.shape)
        rows = attend(turned, turned, turned).reshape(8, 8, 2, 8)  # (rank, expert, rows, width)
        return (jnp.tanh(jnp.einsum("reij,ejk->reik", rows, experts)) ** 2).sum()

    value, gradients = jax.jit(jax.value_and_grad(on_one, (1, 2)))(x, dense, experts)
    states = {name: dm.get_parallel_state_by_name(name) for name in ("thinker", "talker")}
    given = (
        dm.distribute(x, dm.P("dp", "ulysses")),
        dm.distribute(dense, dm.P("dp_shard_sp")),
        dm.distribute(experts, dm.P("ep"), state=states["talker"]),
    )

    @jax.jit
    def step(x, dense, experts):
        value, gradients = jax.value_and_grad(loss, (1, 2))(x, dense, experts)
        return value, tuple(w - 0.1 * g for w, g in zip((dense, experts), gradients, strict=True))

    found, moved = step(*given)
    np.testing.assert_allclose(float(found), float(value), rtol=1e-4)
    specs = (("thinker", dm.P("dp_shard_sp")), ("talker", dm.P("ep")))
    for (name, spec), new, old, gradient in zip(specs, moved, (dense, experts), gradients, strict=True):
        np.testing.assert_allclose(np.asarray(new), old - 0.1 * np.asarray(gradient), rtol=1e-3, atol=1e-4)
        assert new.sharding.is_equivalent_to(states[name].sharding(spec), new.ndim), name


@needs("optax")
@pytest.mark.parametrize("world", [4, 8])
def test_the_composite_example_trains_as_on_one_device(world):
    code = f"""
import sys
sys.path.insert(0, "examples")
import composite_jax
found = composite_jax.train({world}, 6)
alone = composite_jax.train(1, 6)
print(max(abs(a - b) for a, b in zip(found.losses, alone.losses)) < 1e-4, found.losses[-1] < found.losses[0])
print(found.reports[0].split(":")[0], len(found.reports))
"""
    said = fresh(code, XLA_FLAGS=f"--xla_force_host_platform_device_count={world}").splitlines()
    assert said == ["True True", "talker step 1 6"]


MOMENTS = """
import sys
sys.path.insert(0, "examples")
import jax
import numpy as np
import composite_jax, jax_trainer

compiled = []
def counted(fn, jit=jax.jit, **settings):
    compiled.append((getattr(fn, "__name__", ""), jit(fn, **settings)))
    return compiled[-1][1]
jax.jit = counted

trainer = composite_jax.Trainer()
trainer.set_up(4)
trainer.build()
def strays():
    placed = {x.shape: x.sharding for x in jax.tree.leaves(trainer.parameters)}
    assert len(placed) == 4
    for x in jax.tree.leaves(trainer.optimizer_state):
        if x.ndim and x.sharding != placed[x.shape] or len(x.addressable_shards) < 4:
            yield x.shape, x.sharding
print(list(strays()), trainer.optimizer_state[1][0].mu["talker"]["experts"].addressable_shards[0].data.shape)
for number in range(3):
    trainer.step(number)
print(list(strays()))
trainer.tear_down()
jax_trainer.train(4, 3, None)
print([fn._cache_size() for name, fn in compiled if name == "update"])
"""


def test_the_examples_keep_optimizer_states_as_their_parameters_lie_and_compile_their_step_once():
    """No moment is whole on one device, at first and after steps; the second step runs the first's program."""
    said = fresh(MOMENTS, XLA_FLAGS="--xla_force_host_platform_device_count=4").splitlines()
    assert [said[0], said[1], said[-1]] == ["[] (2, 16, 16)", "[]", "[1, 1]"]
