"""Which device is which rank, and of which type the axes are."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import BackendError, SessionError
from tests.jax_backend.worker import fresh, in_jax

X = np.arange(8.0, dtype=np.float32)


def reopened(**settings):
    dm.init_distributed("jax").close()
    return dm.session(backend="jax", **settings)


@in_jax()
def test_the_devices_themselves_say_the_order_and_the_world():
    import jax

    devices = jax.devices()
    for order in (devices[::-1], devices[2:6]):
        with reopened(device_order=order) as session:
            state = dm.init_parallel_state(dp_size=len(order))
            assert session.world_size == len(order)
            assert list(state.mesh.devices.flat) == order
            index = dm.shard_map(lambda: dm.ops.axis_index("dp")[None], (), dm.P("dp"))()
            assert [int(shard.data[0]) for shard in index.addressable_shards] == [
                order.index(shard.device) for shard in index.addressable_shards
            ]


@in_jax()
def test_topology_hands_the_order_to_jax():
    import jax
    from jax.experimental import mesh_utils

    with reopened(device_order="topology"):
        state = dm.init_parallel_state(dp_size=8)
        assert list(state.mesh.devices.flat) == list(mesh_utils.create_device_mesh((8,), jax.devices()).flat)


@in_jax()
def test_what_is_no_order_is_refused_and_so_is_a_late_one():
    import jax

    with pytest.raises(SessionError, match="runs already, and device_order hold"):
        dm.init_distributed("jax", device_order="topology")
    devices = jax.devices()
    for wrong in ("torus", [devices[0], devices[0]], [3], 7, []):
        with pytest.raises(SessionError, match=r"device_order=.*Give 'topology'"), reopened(device_order=wrong):
            pass
    with pytest.raises(SessionError, match="axis_types='manual'"), reopened(axis_types="manual"):
        pass


def test_other_backends_have_no_device_order():
    with pytest.raises(BackendError, match="backend 'sim' has no device_order"):
        dm.init_distributed("sim", world_size=2, device_order="topology")


def test_the_users_own_runtime_can_still_be_ordered():
    code = """
import jax, dualmesh as dm
jax.config.update("jax_num_cpu_devices", 2)
with dm.session("jax", device_order=jax.devices()[::-1]):
    state = dm.init_parallel_state(dp_size=2)
    print([device.id for device in state.mesh.devices.flat])
"""
    assert fresh(code) == "[1, 0]"


@in_jax()
def test_explicit_axes_put_shardings_into_types_and_everything_works_on_them():
    import jax
    from jax.sharding import AxisType

    with reopened(axis_types="explicit"):
        state = dm.init_parallel_state(spec=dm.TopologySpec({"dp": 4, "tp": 2}))
        assert state.mesh.axis_types == (AxisType.Explicit,) * 2
        total = dm.shard_map(lambda x: dm.ops.all_reduce(x, "dp"), dm.P("dp"), dm.P())
        x = dm.distribute(X, dm.P("tp"))
        seen = []

        @jax.jit
        def step(x):
            y = dm.constrain(2 * x, dm.P("dp"))
            seen.append(str(jax.typeof(y).sharding.spec))
            return y

        with dm.use_parallel_state("base"):
            y = step(x)
            np.testing.assert_array_equal(np.asarray(y), 2 * X)
            assert y.sharding.is_equivalent_to(state.sharding(dm.P("dp")), 1)
            assert "dp" in seen[0]
            for given in (x, y, X):
                np.testing.assert_array_equal(np.asarray(total(given)), np.asarray(given).reshape(4, 2).sum(0))
            gradient = jax.jit(jax.grad(lambda x: (total(x) ** 2).sum()))(x)
        np.testing.assert_array_equal(np.asarray(gradient), np.tile(2 * X.reshape(4, 2).sum(0), 4))


@in_jax()
def test_two_states_on_disjoint_devices_work_in_turn():
    specs = {"left": (0, 1, 2, 3), "right": (7, 6, 5, 4)}
    states = {
        name: dm.init_parallel_state(spec=dm.TopologySpec({"dp": 2, "tp": 2}), ranks=ranks, name=name)
        for name, ranks in specs.items()
    }
    assert not set(states["left"].mesh.devices.flat) & set(states["right"].mesh.devices.flat)
    total = dm.shard_map(lambda x: dm.ops.all_reduce(x, "tp"), dm.P("tp"), dm.P())
    for name, state in states.items():
        with dm.use_parallel_state(name):
            y = total(X)
            np.testing.assert_array_equal(np.asarray(y), X[:4] + X[4:])
            assert y.sharding.device_set == set(state.mesh.devices.flat)
