"""The JAX backend over this machine's GPUs."""

from tests.gpu import gpu, on_gpu

pytestmark = gpu


def test_shard_map_over_all_gpus():
    code = """
import jax, numpy as np, dualmesh as dm
count = len(jax.devices())
with dm.session(backend="jax", world_size=count):
    state = dm.init_parallel_state(dp_size=count)
    x = np.arange(4.0 * count, dtype=np.float32)
    total = dm.shard_map(lambda x: dm.ops.all_reduce(x.sum(), "dp"), dm.P("dp"), dm.P())
    value, gradient = dm.value_and_grad(total)(dm.distribute(x, dm.P("dp")))
    print(state.device_type, float(value) == x.sum(), bool((dm.to_numpy(gradient) == 1).all()))
"""
    assert on_gpu(code).endswith("True True")
