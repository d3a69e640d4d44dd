"""What the core makes of JAX's own partition specs; the blocks they give are in `tests.cross.test_translation`."""

import dualmesh as dm
from dualmesh.arrays.plan import ShardingPlan
from dualmesh.sharding.tree import spec_tree
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
