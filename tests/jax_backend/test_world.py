"""Worlds of devices: started, asked for too late, opened again. Where JAX must not have started: a fresh process."""

import pytest

import dualmesh as dm
from dualmesh.errors import BackendError, SessionError
from tests.jax_backend.worker import fresh, in_jax


def test_importing_and_asking_start_nothing_and_torch_is_not_needed():
    code = """
import sys
sys.modules["torch"] = None
import dualmesh as dm, dualmesh_jax, jax
from dualmesh.backend import discovery
from jax._src import xla_bridge
assert discovery.load("jax").world() is None
assert not xla_bridge.backends_are_initialized()
with dm.session(backend="jax", world_size=3) as session:
    assert discovery.load("jax").world() is session.world
    print(session.world_size, session.local_ranks, session.world.device_type, dm.init_parallel_state(dp_size=3).backend)
assert discovery.load("jax").world() is None
"""
    assert fresh(code) == "3 (0, 1, 2) cpu jax"


def test_too_few_devices_once_jax_has_started_is_an_error_with_the_cure():
    code = """
import jax, dualmesh as dm
jax.devices()
try:
    dm.init_distributed("jax", world_size=4)
except dm.errors.SessionError as error:
    print(error, error.asked, error.found)
print(dm.init_distributed("jax", world_size=1).world_size)
"""
    said, size = fresh(code).splitlines()
    assert "4 ranks were asked for, but JAX has 1 cpu device" in said
    assert "jax.config.update('jax_num_cpu_devices', 4)" in said
    assert "before JAX is first used" in said
    assert size == "1"


def test_a_device_count_in_the_environment_is_kept():
    code = """
import dualmesh as dm
try:
    dm.init_distributed("jax", world_size=4)
except dm.errors.SessionError as error:
    print(error)
with dm.session("jax") as session:
    print(session.world_size)
"""
    said, size = fresh(code, XLA_FLAGS="--xla_force_host_platform_device_count=2").splitlines()
    assert "Set XLA_FLAGS=--xla_force_host_platform_device_count=4" in said
    assert size == "2"


@in_jax(4)
def test_a_session_can_be_opened_again_with_another_size():
    import jax
    import numpy as np

    first = dm.init_parallel_state(dp_size=4)
    lifted = dm.shard_map(lambda x: dm.ops.all_reduce(x, "dp"), dm.P("dp"), dm.P())
    assert np.asarray(lifted(np.arange(8.0))).tolist() == [12.0, 16.0]
    dm.init_distributed("jax").close()
    with dm.session(backend="jax", world_size=8) as session:
        assert session.local_ranks == tuple(range(8))
        second = dm.init_parallel_state(dp_size=8)
        assert list(second.mesh.devices.flat) == jax.devices()
        assert np.asarray(lifted(np.arange(8.0))).tolist() == [28.0]
        with pytest.raises(dm.StaleStateError, match=r"session it was built in ended|was cleared"):
            first.mesh  # noqa: B018
        with pytest.raises(SessionError, match="8 ranks runs already, asked for 2"):
            dm.init_distributed("jax", world_size=2)


@in_jax(4)
def test_another_device_type_is_refused_and_nothing_is_built():
    with pytest.raises(BackendError, match=r"device_type='tpu'.*'cpu'"):
        dm.init_parallel_state(dp_size=4, device_type="tpu")
    assert dm.init_distributed("jax").states() == []


@pytest.mark.parametrize("world_size", [0, -1, True, 2.0])
def test_sizes_that_are_none_are_refused(world_size):
    @in_jax(1)
    def refused():
        from dualmesh.backend import discovery
        from dualmesh.backend.backend import Launch

        with pytest.raises(SessionError, match="at least 1"):
            discovery.load("jax").start(Launch(world_size=world_size))

    refused()
