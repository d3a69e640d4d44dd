import numpy as np

import dualmesh as dm
from dualmesh.partition_spec import slices_of
from dualmesh.plan import ShardingPlan
from dualmesh.tree import spec_tree
from tests.core.all_specs import all_specs
from tests.worlds import jax_pool


def read():
    """Return what the core makes of real JAX partition specs."""
    import jax
    from jax.sharding import PartitionSpec

    given = [PartitionSpec(), jax.P("x", ("a", "b"), None), PartitionSpec(("a",), ()), jax.P("x", unreduced={"z", "y"})]
    plan = ShardingPlan({"w": jax.P("x", ("a", "b"))})
    tree = spec_tree({"w": jax.P("x"), "v": dm.P()}, {"w": 1, "v": [2, 3]}, what="in_specs")
    try:
        dm.P.of(jax.P("x", reduced={"y"}))
        refused = None
    except dm.DualmeshError as error:
        refused = str(error)
    return [dm.P.of(spec) for spec in given], plan.spec_of("w", (2, 2)), tree, refused


def test_jax_specs_are_read_entry_by_entry():
    ((specs, planned, tree, refused),) = jax_pool.run(read, [()])
    assert specs == [dm.P(), dm.P("x", ("a", "b")), dm.P("a"), dm.P("x", partial=("y", "z"))]
    assert planned == dm.P("x", ("a", "b"))
    assert tree == {"w": dm.P("x"), "v": [dm.P(), dm.P()]}
    assert "no word for `reduced`" in refused


def held_by_jax(cases):
    """Return the slices that JAX says each of 8 devices holds, per case of entries."""
    import jax
    from jax.sharding import Mesh, NamedSharding

    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))
    shardings = [NamedSharding(mesh, jax.P(*entries)).devices_indices_map((24, 24)) for entries in cases]
    return [[held[device] for device in jax.devices()] for held in shardings]


def test_jax_gives_every_device_the_slice_that_the_core_says():
    topology = dm.TopologySpec({"a": 2, "b": 2, "c": 2}).resolve(8)
    specs = [spec for spec in all_specs(topology) if not spec.partial]
    (found,) = jax_pool.run(held_by_jax, [([spec.entries for spec in specs],)])
    assert len(specs) == 49
    for spec, held in zip(specs, found, strict=True):
        for rank in range(8):
            expected = slices_of(topology, spec, (24, 24), rank)
            assert [s.indices(24) for s in held[rank]] == [s.indices(24) for s in expected], (spec, rank)
