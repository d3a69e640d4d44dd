"""Functions of one framework inside the other's training step: values and gradients against each alone."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.testing import assert_same
from tests.joint import joint_world, lone_world

ROWS, WIDTH, OUT = 8, 6, 4


def weights():
    rng = np.random.default_rng(0)
    shapes = ((ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH, OUT))
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


RTOL = 8e-7  # seven steps of float32


def by_numpy(x, inner, head):
    """Return the loss, mean((tanh(x inner) head)^2), and its gradients by inner and head, rounded to float32."""
    x, inner, head = (array.astype(np.float64) for array in (x, inner, head))
    hidden = np.tanh(x @ inner)
    out = hidden @ head
    back = 2 * out / out.size
    found = (out**2).mean(), x.T @ ((back @ head.T) * (1 - hidden**2)), hidden.T @ back
    return [np.float32(one) for one in found]


def trained(step, x, inner, head):
    """Return the loss and gradients of a per-rank step over dp, on the ambient state."""
    arrays = [dm.distribute(x, dm.P("dp")), dm.distribute(inner, dm.P()), dm.distribute(head, dm.P())]
    lifted = dm.shard_map(step, (dm.P("dp"), dm.P(), dm.P()), dm.P())
    loss, gradients = dm.value_and_grad(lifted, argnums=(1, 2))(*arrays)
    return [dm.to_numpy(one) for one in (loss, *gradients)]


def torch_hidden(x, inner):
    return (x @ inner).tanh()


def jax_hidden(x, inner):
    import jax.numpy as jnp

    return jnp.tanh(x @ inner)


def head_loss(hidden, head):
    """Return the mean over all ranks' rows: written once, runs in both frameworks."""
    out = hidden @ head
    return dm.ops.all_reduce((out * out).sum(), "dp") / (ROWS * OUT)


def test_a_torch_models_hidden_states_go_to_a_jax_head_and_back():
    """One step with the border in it equals the pure-torch and the pure-JAX step, loss and all gradients."""

    def steps(*arrays):
        from dualmesh import interop

        state = dm.init_parallel_state(dp_size=2, tp_size=2)
        head = interop.call_jax(head_loss)
        mixed = trained(lambda x, inner, last: head(torch_hidden(x, inner), last), *arrays)
        alone = trained(lambda x, inner, last: head_loss(torch_hidden(x, inner), last), *arrays)
        with dm.use_parallel_state(state.on("jax")):
            other = trained(lambda x, inner, last: head_loss(jax_hidden(x, inner), last), *arrays)
        return mixed, alone, other

    expected = by_numpy(*weights())
    for results in joint_world(steps, *weights()):
        assert_same("mixed, torch, JAX", [expected] * 3, results, rtol=RTOL)


def test_a_jax_models_hidden_states_go_to_a_torch_head_and_back():
    """The reverse, inside a jitted step: torch computes the head as a callback on each rank's block."""

    def steps(*arrays):
        import jax

        from dualmesh import interop

        state = dm.init_parallel_state(dp_size=2, tp_size=2)
        head = interop.call_torch(lambda hidden, last: ((hidden @ last) ** 2).sum())

        def step(x, inner, last):
            return dm.ops.all_reduce(head(jax_hidden(x, inner), last), "dp") / (ROWS * OUT)

        with dm.use_parallel_state(state.on("jax")):
            specs = (dm.P("dp"), dm.P(), dm.P())
            given = [dm.distribute(x, spec) for x, spec in zip(arrays, specs, strict=True)]
            graded = jax.jit(jax.value_and_grad(dm.shard_map(step, specs, dm.P()), argnums=(1, 2)))
            loss, gradients = graded(*given)
            return [dm.to_numpy(one) for one in (loss, *gradients)]

    for found in joint_world(steps, *weights()):
        assert_same("loss and gradients", by_numpy(*weights()), found, rtol=RTOL)


def test_a_function_of_dtensors_is_one_of_global_arrays():
    """On DTensors JAX sees the whole arrays, and gradients come back split as JAX left them."""

    def step(x, inner, head):
        import jax.numpy as jnp

        from dualmesh import interop

        dm.init_parallel_state(dp_size=2, tp_size=2)
        loss_of = interop.call_jax(lambda x, inner, head: {"loss": jnp.mean((jnp.tanh(x @ inner) @ head) ** 2)})
        split = [dm.distribute(x, dm.P("dp")), dm.distribute(inner, dm.P(None, "tp")), dm.distribute(head, dm.P("tp"))]
        split = [one.requires_grad_() for one in split]
        loss = loss_of(*split)["loss"]
        loss.backward()
        return [dm.to_numpy(one) for one in (loss.detach(), split[1].grad, split[2].grad)]

    for found in joint_world(step, *weights()):
        assert_same("loss and gradients", by_numpy(*weights()), found, rtol=RTOL)


def test_one_rank_alone_needs_no_state():
    """Without a parallel state both are plain functions; integers have no gradient and pass."""

    def both():
        import jax
        import jax.numpy as jnp
        import torch

        from dualmesh import interop

        x = torch.tensor([1.0, 2.0], requires_grad=True)
        count = torch.tensor([1, 3], dtype=torch.int32)
        y, n = interop.call_jax(lambda x, n: (x**3 * n, n + 1))(x, count)
        y.sum().backward()
        scaled = interop.call_torch(lambda x, n: {"y": x**3 * n})
        graded = jax.jit(jax.value_and_grad(lambda x, n: scaled(x, n)["y"].sum()))
        value, gradient = graded(jnp.array([1.0, 2.0]), jnp.array([1, 3], jnp.int32))
        return x.grad.tolist(), n.tolist(), n.requires_grad, float(value), gradient.tolist()

    assert lone_world(both) == ([3.0, 36.0], [2, 4], False, 25.0, [3.0, 36.0])


def test_large_blocks_cross_in_callbacks():
    """A callback on megabytes does not wait for the threads that run it."""

    def large():
        import jax
        import jax.numpy as jnp

        from dualmesh import interop

        double = interop.call_torch(lambda x: x * 2)
        x = jnp.arange(4_000_000, dtype=jnp.float32)
        gradient = jax.jit(jax.grad(lambda x: double(double(x)).sum()))(x)
        return float(gradient.min()), float(gradient.max())

    assert lone_world(large) == (4.0, 4.0)


def test_global_arrays_are_refused_in_a_torch_callback():
    """Outside shard_map each process would compute on what it does not hold."""

    def refused():
        import jax

        from dualmesh import interop

        state = dm.init_parallel_state(dp_size=4)
        with dm.use_parallel_state(state.on("jax")):
            x = dm.distribute(np.ones(4, np.float32), dm.P("dp"))
            with pytest.raises(dm.DualmeshError) as error:
                jax.jit(interop.call_torch(lambda x: x * 2))(x)
            return str(error.value)

    assert all("call_torch: called on global arrays" in message for message in joint_world(refused))
