"""Several factorisations of the same ranks in one state, dense and expert axes in one program, on every backend."""

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.testing import compare_places
from tests.cross import grouped
from tests.worlds import wide_worlds

BACKENDS = ("sim", "torch", "jax")
VERBS = (
    ("all_gather", {"dim": 1}),
    ("reduce_scatter", {"dim": 0, "op": "sum"}),
    ("all_to_all", {"split_dim": 1, "concat_dim": 0}),
    ("shift", {"offset": 1}),
)
TWO = {"extra_parallel_names": ("ep", "emb"), "extra_parallel_sizes": (2, 4)}
SPECS = {
    "inner": dm.parallel_spec(dp_shard_size=4, ulysses_size=2, ep_size=4),
    "outer": dm.parallel_spec(dp_shard_size=4, ulysses_size=2, ep_size=4, extra_parallel_outermost=(True,)),
    "cuts one axis": dm.parallel_spec(dp_shard_size=8, ep_size=2),
    "straddles two": dm.parallel_spec(dp_shard_size=2, ulysses_size=2, cp_size=2, ep_size=4),
    "also over tp": dm.parallel_spec(
        dp_shard_size=2, ulysses_size=2, tp_size=2, ep_size=4, ep_over=("dp_shard", "ulysses", "cp", "tp")
    ),
    "two views": dm.parallel_spec(dp_shard_size=4, ulysses_size=2, **TWO),
    "replicas and stages outside": dm.parallel_spec(dp_replicate_size=2, dp_shard_size=2, pp_size=2, ep_size=2),
    "tp inside": dm.parallel_spec(dp_shard_size=4, tp_size=2, ep_size=2),
    "against grid order": dm.TopologySpec(
        {"a": 2, "b": 2, "c": 2}, views={"turned": dm.View(over=("c", "a"), axes={"x": 2, "y": 2})}
    ),
    "cuts in between": dm.TopologySpec(
        {"a": 4, "b": 2},
        views={"v": dm.View(over=("a", "b"), axes={"x": 2, "y": 2, "z": 2})},
        combined={"xz": ("x", "z")},
    ),
}


def view_axes(spec):
    """Return the axes of the views, and the combined ones that are made of them."""
    names = [name for view in spec.views.values() for name in view.axes]
    return [*names, *(name for name, made in spec.combined.items() if set(made) <= set(names) and len(made) > 1)]


@pytest.mark.parametrize("name", SPECS)
def test_operations_over_view_axes_are_numpys_in_value_and_gradient(name):
    topology = SPECS[name].resolve(8)
    partitions = {axis: topology.partition(axis).tolist() for axis in view_axes(SPECS[name])}
    grouped.check(SPECS[name], partitions, range(8), 8, VERBS, world_size=8)


def test_the_groups_of_the_views_by_hand():
    found = {
        ("inner", "ep"): [[0, 1, 2, 3], [4, 5, 6, 7]],
        ("outer", "ep"): [[0, 2, 4, 6], [1, 3, 5, 7]],
        ("cuts one axis", "ep_fsdp"): [[0, 2, 4, 6], [1, 3, 5, 7]],
        ("straddles two", "ep"): [[0, 1, 2, 3], [4, 5, 6, 7]],
        ("also over tp", "ep_fsdp"): [[0, 4], [1, 5], [2, 6], [3, 7]],
        ("two views", "emb_fsdp"): [[0, 4], [1, 5], [2, 6], [3, 7]],
        ("two views", "ep"): [[0, 1], [2, 3], [4, 5], [6, 7]],
        ("replicas and stages outside", "ep"): [[0, 1], [2, 3], [4, 5], [6, 7]],
        ("replicas and stages outside", "ep_replicate"): [[0, 2], [1, 3], [4, 6], [5, 7]],
        ("tp inside", "ep"): [[0, 2], [1, 3], [4, 6], [5, 7]],
        ("against grid order", "x"): [[0, 1], [2, 3], [4, 5], [6, 7]],
        ("against grid order", "y"): [[0, 4], [1, 5], [2, 6], [3, 7]],
    }
    assert found == {(name, axis): SPECS[name].resolve(8).partition(axis).tolist() for name, axis in found}


def native_groups(spec):
    """Return the native group of every axis with its ranks, by what torch itself says."""
    import torch.distributed as dist

    state = dm.init_parallel_state(spec=spec)
    rank = dist.get_rank()
    return {
        axis: (dist.get_process_group_ranks(state.group(axis)), state.group(axis).rank() == state.index(axis, rank))
        for axis in state.axis_names
    }


@pytest.mark.parametrize("name", ["two views", "also over tp", "against grid order"])
def test_torch_groups_are_the_partitions_in_index_order(name):
    topology = SPECS[name].resolve(8)
    for rank, groups in enumerate(wide_worlds()["torch"](native_groups, SPECS[name], world_size=8)):
        assert groups == {axis: (list(topology.ranks(axis, rank)), True) for axis in topology.axis_names}


WIDTH, TOKENS = 8, 8


def mixture(x, dense, experts):
    """Take a dense layer sharded over all data ranks, then the expert that each block of tokens goes to."""
    from array_api_compat import array_namespace

    xp = array_namespace(x)
    count = dm.ops.axis_size("ep")
    hidden = xp.tanh(x @ dm.ops.all_gather(dense, "dp_shard_sp"))
    own = dm.ops.all_gather(experts, "ep_fsdp", 2)[0]
    sent = dm.ops.all_to_all(xp.reshape(hidden, (count, -1, WIDTH)), "ep", 0, 1)
    back = dm.ops.all_to_all(sent @ own, "ep", 1, 0)
    y = xp.reshape(back, (-1, WIDTH))
    return y, dm.ops.all_reduce(xp.sum(y * y), "dp_shard_sp")


def numpys_mixture(x, dense, experts):
    """Return (y, loss) on global arrays, and their pullback; each rank's tokens are cut into one run per expert."""
    runs = np.arange(len(x)) % TOKENS // (TOKENS // len(experts))
    hidden = np.tanh(x @ dense)
    y = np.einsum("ti,tij->tj", hidden, experts[runs])

    def pullback(weights):
        d_y = weights[0] + 2 * y * weights[1]
        d_hidden = np.einsum("tj,tij->ti", d_y, experts[runs])
        d_experts = np.zeros_like(experts)
        np.add.at(d_experts, runs, np.einsum("ti,tj->tij", hidden, d_y))
        return x.T @ (d_hidden * (1 - hidden**2)), d_experts

    return (y, (y * y).sum()), pullback


@pytest.mark.parametrize("name", ["inner", "outer", "straddles two"])
def test_a_program_over_dense_and_expert_axes_is_right_in_value_and_gradient(name):
    draw = np.random.default_rng(7)
    shapes = ((8 * TOKENS, WIDTH), (WIDTH, WIDTH), (4, WIDTH, WIDTH))
    arrays = [draw.normal(size=shape) for shape in shapes]
    specs = (dm.P("dp_shard_sp"), dm.P("dp_shard_sp"), dm.P("ep", None, "ep_fsdp"))
    wanted, pullback = numpys_mixture(*arrays)
    results = (dm.P("dp_shard_sp"), dm.P())
    compare_places(mixture, arrays, specs, results, SPECS[name], wrt=(1, 2), expected=wanted, pullback=pullback)


def mixed_in_torch():
    state = dm.init_parallel_state(spec=SPECS["two views"])
    asked = {
        "submesh of two views": lambda: state.submesh("ep", "emb_fsdp"),
        "spec of two views": lambda: state.pspec("ep", "emb_fsdp"),
        "array of two views": lambda: dm.distribute(np.zeros((8, 8)), dm.P("ep", "emb_fsdp")),
        "submesh of a view and what it spans": lambda: state.submesh("ep_fsdp", "ulysses"),
        "spec of a view and what it spans": lambda: state.pspec("emb_fsdp", "ulysses"),
    }
    said = {}
    for what, ask in asked.items():
        try:
            said[what] = repr(ask())
        except dm.DualmeshError as error:
            said[what] = f"{type(error).__name__}: {error}"
    legal = [state.submesh("ep_fsdp", "ep").mesh_dim_names, state.submesh("emb").mesh_dim_names]
    return said, legal, dm.get_parallel_state() is state


def test_torch_refuses_axes_of_two_views_in_one_mesh_or_spec():
    for said, legal, _ in wide_worlds()["torch"](mixed_in_torch, world_size=8):
        for what, text in said.items():
            assert text.startswith("ShardingError"), (what, text)
        for what in ("submesh of two views", "spec of two views", "array of two views"):
            assert "ep" in said[what]
            assert "emb" in said[what]
        assert legal == [("ep_fsdp", "ep"), ("emb",)]


def kept_shards(name):
    """Step over a weight per axis pair; return the specs whose sharding a jitted step did not keep."""
    import jax

    state = dm.init_parallel_state(spec=SPECS[name])
    pairs = {
        "two views": [("dp_shard", "ulysses"), ("ep_fsdp", "ep"), ("emb_fsdp", "emb"), ("emb_fsdp", "ulysses")],
        "also over tp": [("dp_shard_sp", "tp"), ("ep_fsdp", "ep"), ("ep_fsdp", "tp")],
        "against grid order": [("a", "b"), ("x", "y"), ("x", "b")],
    }[name]
    specs = [dm.P(*pair) for pair in pairs]
    weights = [dm.distribute(np.arange(64.0 * 64).reshape(64, 64), spec) for spec in specs]

    def blocks(weights):
        return dm.ops.all_reduce(sum((w * w).sum() for w in weights), "world")

    lifted = dm.shard_map(blocks, (specs,), dm.P())

    @jax.jit
    def step(weights):
        return [w - 0.1 * g for w, g in zip(weights, jax.grad(lifted)(weights), strict=True)]

    stepped = step(step(weights))
    meshes = {w.sharding.mesh for w in stepped}
    lost = [s for s, w in zip(specs, stepped, strict=True) if not w.sharding.is_equivalent_to(state.sharding(s), 2)]
    return lost, len(meshes), len({shard.data.shape for shard in stepped[1].addressable_shards})


@pytest.mark.parametrize("name", ["two views", "also over tp", "against grid order"])
def test_jax_keeps_dense_and_expert_shards_through_a_step_on_one_mesh(name):
    assert wide_worlds()["jax"](kept_shards, name, world_size=8) == [([], 1, 1)]


def without_refinement():
    """Return what is said of a view whose strides form no chain with the grid, alone and beside another state."""
    import warnings

    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        one = dm.init_parallel_state(spec=dm.TopologySpec({"a": 2, "b": 3}), name="one")
        two = dm.init_parallel_state(spec=dm.TopologySpec({"a": 3, "b": 2}), name="two")
        said += [str(warning.message) for warning in caught]
    x = np.arange(6.0)
    sums = []
    for state in (one, two):
        with dm.use_parallel_state(state):
            total = dm.shard_map(lambda x: dm.ops.all_reduce(x, "b"), dm.P("world"), dm.P("world"))
            sums.append(dm.to_numpy(total(dm.distribute(x, dm.P("world")))).tolist())
    return said, sums


def test_topologies_without_a_refinement_get_meshes_of_their_own_and_a_warning():
    for backend in BACKENDS:
        for said, sums in wide_worlds()[backend](without_refinement, world_size=6):
            assert sums == [[3.0] * 3 + [12.0] * 3, [1.0] * 2 + [5.0] * 2 + [9.0] * 2]
            assert len(said) == (backend == "jax")
            assert all("no common refinement" in text for text in said)


@pytest.mark.parametrize("ep_size", [3, 5, 16])
def test_a_size_that_does_not_divide_is_refused_with_the_sizes_that_do(ep_size):
    with pytest.raises(dm.DualmeshError, match=r"1, 2, 4, 8"):
        dm.parallel_spec(dp_shard_size=4, ulysses_size=2, ep_size=ep_size).resolve(8)
