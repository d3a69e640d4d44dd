"""What JAX's users do by hand: checkify, typed random keys, partly manual regions, eager gradients, x64 toggled."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import ArrayTypeError, RankError, ShardingError
from tests.jax_backend.processes import in_processes
from tests.jax_backend.worker import fresh, in_jax

ROWS = np.arange(32, dtype=np.float32).reshape(8, 4)


@in_jax(4)
def test_checkify_goes_through_lifted_functions_outside_scopes():
    """JAX itself checkifies a shard_map only where no mesh is ambient, so dualmesh sets none there."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import checkify

    dm.init_parallel_state(spec=dm.TopologySpec({"a": 2, "b": 2}))
    lifted = dm.shard_map(lambda x: dm.ops.all_reduce(x, "a"), dm.P("a"), dm.P())

    def fn(x):
        checkify.check(jnp.all(x > -1.0), "x must be above -1")
        return lifted(1.0 / (x + 1.0))

    checked = jax.jit(checkify.checkify(fn, errors=checkify.user_checks | checkify.float_checks))
    error, value = checked(ROWS)
    error.throw()
    halves = 1 / (ROWS + 1)
    np.testing.assert_allclose(value, halves[:4] + halves[4:], rtol=1e-6)
    with pytest.raises(checkify.JaxRuntimeError, match="x must be above -1"):
        checked(ROWS - 2)[0].throw()


@in_jax(4)
def test_random_keys_are_compared_as_keys_and_refused_where_numbers_are_meant():
    """Numpy has no dtype for typed keys; each refusal says how to get their numbers."""
    import jax

    dm.init_parallel_state(spec=dm.TopologySpec({"a": 4}))
    keys = jax.random.split(jax.random.key(7), 4)
    laid = dm.distribute(keys, dm.P("a"))
    np.testing.assert_array_equal(jax.random.key_data(laid), jax.random.key_data(keys))
    same = dm.shard_map(lambda x: x, dm.P("a"), dm.P("a"), check_replicated=True)(laid)
    np.testing.assert_array_equal(jax.random.key_data(same), jax.random.key_data(keys))
    with pytest.raises(ShardingError, match="declares the result equal on ranks 0 and 1, but it differs"):
        dm.shard_map(lambda x: x, dm.P("a"), dm.P(), check_replicated=True)(laid)
    for where, call in {
        "to_numpy": lambda: dm.to_numpy(laid),
        "shard_local": lambda: dm.shard_local(keys, dm.P("a")),
        "": lambda: dm.distribute(keys, dm.P("a"), check=True),
        "distribute with pad=True": lambda: dm.distribute(keys[:3], dm.P("a"), pad=True),
        "global_norm": lambda: dm.global_norm([keys]),
    }.items():
        with pytest.raises(ArrayTypeError, match=rf"{where}.*: found random keys \(key<fry>, shape .*key_data"):
            call()


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
def test_axes_left_to_jax_are_constrained_inside_a_partly_manual_region(axis_types):
    """As `lax.with_sharding_constraint` by hand; the axes of the region are refused by name."""
    fresh(PARTLY, AXIS_TYPES=axis_types)


PARTLY = """
import os
import numpy as np, dualmesh as dm
from dualmesh.errors import ArgumentError
dm.init_distributed("jax", world_size=4, axis_types=os.environ["AXIS_TYPES"])
import jax
state = dm.init_parallel_state(spec=dm.TopologySpec({"a": 2, "b": 2}))
rows = np.arange(32, dtype=np.float32).reshape(8, 4)
def of_part(x):
    return dm.ops.all_reduce(dm.constrain(x * 2, dm.P(None, "b")), "a")
lifted = dm.shard_map(of_part, dm.P("a"), dm.P(), axes=("a",))
y = lifted(dm.distribute(rows, dm.P("a")))
np.testing.assert_array_equal(dm.to_numpy(y), 2 * (rows[:4] + rows[4:]))
assert y.addressable_shards[0].data.shape == (4, 2), y.sharding
for spec, axes, text in (
    (dm.P("a"), ("a",), "names a, along which arrays are this rank's blocks here.*leaves to JAX: b"),
    (dm.P(("b", "a")), ("a",), "names a, along"),
    (dm.P("b"), None, "called inside shard_map"),
):
    try:
        dm.shard_map(lambda x: dm.constrain(x, spec), dm.P("a"), dm.P("a"), axes=axes)(dm.distribute(rows, dm.P("a")))
    except ArgumentError as error:
        import re
        assert re.search(text, str(error)), error
    else:
        raise SystemExit(f"{spec} was not refused")
"""


@in_jax(4)
def test_an_eager_gradient_in_a_scope_on_other_devices_is_refused_in_words_about_gradients():
    """Outside scopes it is right; in one JAX computes on the scope's mesh until the gradient ends."""
    import jax

    enc = dm.init_parallel_state(spec=dm.TopologySpec({"tp": 1}), ranks=(0,), name="enc")
    lm = dm.init_parallel_state(spec=dm.TopologySpec({"tp": 3}), ranks=(1, 2, 3), name="lm")
    lifted = dm.shard_map(lambda h: dm.ops.all_reduce((h**2).sum(), "tp"), dm.P("tp"), dm.P(), state=lm)

    def loss(x):
        return lifted(dm.reshard(2 * x, src=(enc, dm.P()), dst=(lm, dm.P("tp"))))

    x = dm.distribute(np.arange(3, dtype=np.float32), dm.P(), state=enc)
    value, gradient = jax.value_and_grad(loss)(x)
    assert (float(value), gradient.tolist()) == (20.0, [0.0, 8.0, 16.0])
    with (
        dm.use_parallel_state(enc),
        pytest.raises(ShardingError, match=r"State 'lm' .* inside an eager gradient .* scope of .*State 'enc'"),
    ):
        jax.value_and_grad(loss)(x)
    with pytest.raises(ShardingError, match="Take it outside any scope"):
        dm.value_and_grad(loss, state=enc)(x)


@in_jax(4)
def test_toggled_64_bits_change_the_arrays_made_after_and_no_others():
    """Host arrays get their dtype before JAX sees them: it caches by the dtype that they have."""
    import jax

    dm.init_parallel_state(spec=dm.TopologySpec({"a": 4}))
    lifted = dm.shard_map(lambda x: dm.ops.all_reduce(x, "a"), dm.P("a"), dm.P())
    wide = ROWS.astype(np.float64)
    makers = (
        lambda: dm.distribute(wide, dm.P("a")),
        lambda: dm.shard_local(wide, dm.P("a")),
        lambda: dm.constrain(wide, dm.P("a")),
        lambda: lifted(wide),
        lambda: dm.reshard(wide, src=("base", dm.P()), dst=("base", dm.P("a"))),
    )
    kept = []
    for bits in (32, 64, 32, 64):
        with jax.enable_x64(bits == 64):
            made = [make() for make in makers]
            assert [str(x.dtype) for x in made] == [f"float{bits}"] * len(made)
            for x in made:
                np.testing.assert_allclose(float(dm.global_norm([x])), np.linalg.norm(np.asarray(x)), rtol=1e-6)
            kept += made
    with jax.enable_x64(True):
        for x in kept:
            assert dm.constrain(x, dm.P()).dtype == x.dtype == dm.to_numpy(x).dtype


@in_processes(2, 2)
def test_what_all_ranks_of_a_process_agree_on_needs_no_rank():
    """Two ranks that load the same data, or share a group, have one answer; others are asked to be named."""
    import jax

    process = jax.process_index()
    roles = {"data": ("dp",), "params": ("dp", "tp")}
    rows = dm.init_parallel_state(spec=dm.TopologySpec({"dp": 2, "tp": 2}, roles=roles), name="rows")
    columns = dm.init_parallel_state(spec=dm.TopologySpec({"tp": 2, "dp": 2}, roles=roles), name="columns")
    roles = {"data": ("dp",), "params": ("dp",)}
    stages = dm.init_parallel_state(spec=dm.TopologySpec({"pp": 2, "dp": 2}, roles=roles), name="stages")
    across = dm.init_parallel_state(spec=dm.TopologySpec({"dp": 2, "pp": 2}, roles=roles), name="across")
    assert (rows.data_index, rows.index("dp"), rows.ranks("tp")) == (process, process, (2 * process, 2 * process + 1))
    assert rows.submesh("tp").devices.tolist() == stages.fsdp_mesh.devices.tolist() == jax.local_devices()
    asked = lambda: columns.data_index, lambda: rows.index("tp"), lambda: rows.ranks("dp"), lambda: across.fsdp_mesh
    for ask in asked:
        with pytest.raises(RankError, match=rf"this process holds the ranks {2 * process}, {2 * process + 1}"):
            ask()


def test_a_reshard_inside_jit_on_explicit_axes_changes_the_type_or_is_refused():
    """Between states that share a mesh it moves the array, with a gradient; between two meshes JAX has no such move."""
    fresh(EXPLICIT)


EXPLICIT = """
import numpy as np, dualmesh as dm
from dualmesh.errors import ShardingError
dm.init_distributed("jax", world_size=4, axis_types="explicit")
import jax
specs = {"a": dm.TopologySpec({"dp": 2, "tp": 2}), "b": dm.TopologySpec({"sp": 4})}
a, b = dm.init_parallel_states(specs, default="a").values()
rows = np.arange(32, dtype=np.float32).reshape(8, 4)
x = dm.distribute(rows, dm.P("dp", "tp"))
move = jax.jit(lambda x: dm.reshard(2 * x, src=("a", dm.P("dp", "tp")), dst=("b", dm.P("sp"))))
y = move(x)
assert y.sharding.is_equivalent_to(b.sharding(dm.P("sp")), 2), y.sharding
np.testing.assert_array_equal(dm.to_numpy(y, state=b), 2 * rows)
g = jax.jit(jax.grad(lambda x: (dm.reshard(x, src=("a", dm.P("dp", "tp")), dst=("b", dm.P("sp"))) ** 2).sum()))(x)
np.testing.assert_array_equal(np.asarray(g), 2 * rows)
c = dm.init_parallel_state(spec=dm.TopologySpec({"ep": 4}), ranks=(3, 1, 0, 2), name="c")
try:
    jax.jit(lambda x: dm.reshard(x, src=("a", dm.P("dp", "tp")), dst=("c", dm.P("ep"))))(x)
except ShardingError as error:
    assert "reshard: inside jit" in str(error), error
else:
    raise SystemExit("not refused")
"""
