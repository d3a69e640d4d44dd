"""Values still to be summed: a `dm.P`'s `partial` is JAX's `unreduced`, which there is on Explicit axes."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import ShardingError
from dualmesh.sharding.partition_spec import canonical
from tests.core.all_specs import TOPOLOGIES, all_specs
from tests.jax_backend.test_devices import reopened
from tests.jax_backend.worker import in_jax


@in_jax()
@pytest.mark.parametrize("name", ["2x2x2", "view", "inner view"])
def test_the_way_there_and_back_is_the_identity_for_every_spec(name):
    with reopened(axis_types="explicit"):
        state = dm.init_parallel_state(spec=TOPOLOGIES[name].spec)
        specs = all_specs(state.topology)
        assert sum(bool(spec.partial) for spec in specs) > 15
        for spec in specs:
            sharding = state.sharding(spec)
            assert sharding.spec == state.pspec(*spec.entries, partial=spec.partial)
            assert bool(sharding.spec.unreduced) == bool(spec.partial)
            assert state.spec_of(sharding) == canonical(state.topology, spec)
            assert state.sharding(state.spec_of(sharding)) == sharding


@in_jax()
def test_on_axes_that_are_not_explicit_a_sum_is_refused_by_name():
    state = dm.init_parallel_state(spec=dm.TopologySpec({"a": 2, "b": 4}))
    for ask in (lambda: state.pspec("a", partial="b"), lambda: state.sharding(dm.P(partial="b"))):
        with pytest.raises(ShardingError, match=r"partial over b.*axis_types='explicit'"):
            ask()


@in_jax()
def test_an_unreduced_array_is_read_moved_and_mapped_by_its_value():
    import jax

    with reopened(axis_types="explicit"):
        state = dm.init_parallel_state(spec=dm.TopologySpec({"a": 2, "b": 4}))
        one, other = np.arange(64.0).reshape(8, 8), np.arange(64.0).reshape(8, 8)[::-1] / 8
        x, y = dm.distribute(one, dm.P("a", "b")), dm.distribute(other, dm.P("b"))
        summed = state.sharding(dm.P("a", partial="b"))
        with dm.use_parallel_state("base"):
            found = jax.jit(lambda x, y: jax.numpy.einsum("ij,jk->ik", x, y, out_sharding=summed.spec))(x, y)
        assert state.spec_of(found) == dm.P("a", partial="b")
        whole = one @ other
        ways = {"src": dm.P("a", partial="b"), "dst": dm.P("b")}
        for value in (
            found,
            dm.constrain(found, dm.P(None, "b")),
            dm.reshard(found, dm.P()),
            dm.reshard(found, **ways),
        ):
            np.testing.assert_allclose(dm.to_numpy(value), whole, rtol=1e-6)
        lifted = dm.shard_map(lambda x: 2 * x, dm.P("a"), dm.P("a"))
        np.testing.assert_allclose(dm.to_numpy(lifted(found)), 2 * whole, rtol=1e-6)
        with pytest.raises(ShardingError, match=r"reshard src: .*partial over b"):
            dm.reshard(x, **ways)
