"""Tests whose body runs in the JAX worker, inside an open session; pytest's own process imports no JAX."""

import functools
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.worlds import jax_world


def in_jax(world_size=8):
    """Run the decorated test's body in the worker, where `world_size` devices are in session."""

    def decorate(body):
        @functools.wraps(body)
        def test(**arguments):
            jax_world(functools.partial(_called, body, arguments), world_size=world_size)

        return test

    return decorate


def needs(*libraries):
    """Skip a test, with the reason, where libraries are not installed; none is imported here."""
    missing = [name for name in libraries if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def _called(body, arguments):
    body(**arguments)


def fresh(code, **env):
    """Return what a fresh interpreter prints for some code; the environment says nothing about JAX but `env`."""
    from os import environ

    kept = {key: value for key, value in environ.items() if not key.startswith(("XLA_", "JAX_"))}
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**kept, "JAX_PLATFORMS": "cpu", **env},
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def two_grids():
    """Register "dense" (4 x 2, first) and "talker" (8) before first use: one refined mesh."""
    import dualmesh as dm

    specs = {
        "dense": dm.parallel_spec(dp_size=4, dp_shard_size=4, ulysses_size=2),
        "talker": dm.parallel_spec(dp_size=8, dp_shard_size=8),
    }
    return dm.init_parallel_states(specs, default="dense")


def two_meshes():
    """Register "a" (4 x 2), use it, then "b" (2 x 4) with the same names: two meshes over the same devices."""
    import warnings

    import dualmesh as dm

    a = dm.init_parallel_state(spec=dm.TopologySpec({"dp": 4, "sp": 2}), name="a")
    assert a.mesh.axis_names == ("dp", "sp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dm.errors.StateWarning)
        b = dm.init_parallel_state(spec=dm.TopologySpec({"dp": 2, "sp": 4}), name="b")
    return a, b
