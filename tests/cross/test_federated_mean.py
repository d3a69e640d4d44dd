"""Federated averaging: every rank ends with numpy's weighted mean of the federations' models, laid out as before."""

import numpy as np
import pytest

import dualmesh as dm
from tests.worlds import worlds

LAYOUTS = [
    ((4, 4), None),
    ((4, 4), 2),
    ((4, 2), None),
    ((4, 2), 2),
    ((2, 4, 2), None),
    ((2, 4, 2), 2),
]
WEIGHTS = (None, (3, 1, 2))


def models(sizes, seed=0):
    """Return the model of each federation: its arrays, and the dim over which each is sharded (None: not)."""
    draw = np.random.default_rng(seed)
    shapes = {"rows": (8, 3), "columns": (3, 4), "plain": (5,), "whole": (2, 3)}
    return [{name: draw.normal(size=shape).astype("float32") for name, shape in shapes.items()} for _ in sizes]


DIMS = {"rows": 0, "columns": 1, "whole": None, "odd": 0}


def mean_of(parts, weights):
    weights = np.array([1] * len(parts) if weights is None else weights[: len(parts)], float)
    return {
        name: sum(w * m[name].astype(float) for w, m in zip(weights, parts, strict=True)) / weights.sum()
        for name in parts[0]
    }


def weights_for(weights, sizes):
    return None if weights is None else weights[: len(sizes)]


# -- torch -------------------------------------------------------------------------------------------------------------


def on_torch(sizes, hsdp, through):
    import torch
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    world = sum(sizes)
    rank = dm.init_distributed().local_ranks[0]
    topology = dm.FederatedSpec(sizes, hsdp).resolve(world)
    if through == "named":
        state = dm.init_parallel_state(spec=dm.FederatedSpec(sizes, hsdp), name="federation")
        mesh = state.submesh("shard")
    else:
        state = dm.DistributedState()
        state.set_global("gloo", "cpu", "localhost", 29500, rank, world)
        state.set_federated_scaling(sizes, hsdp)
        mesh = state.hsdp_mesh if hsdp else state.fsdp_mesh
    mine = models(sizes)[topology.federated_rank(rank)]
    odd = np.arange(14, dtype="float32").reshape(7, 2) * (1 + topology.federated_rank(rank))

    def laid_out(name, value):
        dim = DIMS[name]
        places = [Replicate()] * (mesh.ndim - 1) + [Replicate() if dim is None else Shard(dim)]
        return torch.nn.Parameter(distribute_tensor(torch.from_numpy(value), mesh, places))

    tree = {name: laid_out(name, mine[name]) for name in ("rows", "columns", "whole")}
    tree = {"sharded": tree, "others": [torch.from_numpy(mine["plain"]), (laid_out("odd", odd),)]}
    found = []
    for weights in WEIGHTS:
        mean = dm.federated_mean(tree, state, weights_for(weights, sizes))
        for before, after in zip(tree["sharded"].values(), mean["sharded"].values(), strict=True):
            assert (before.placements, before.device_mesh, before.shape) == (
                after.placements,
                after.device_mesh,
                after.shape,
            )
            assert not after.requires_grad
        dtensors = {**mean["sharded"], "odd": mean["others"][1][0]}
        assert all(isinstance(x, DTensor) for x in dtensors.values())
        found.append(
            {name: x.full_tensor().numpy() for name, x in dtensors.items()} | {"plain": mean["others"][0].numpy()}
        )
    return found


@pytest.mark.parametrize("through", ["named", "distributed"])
@pytest.mark.parametrize(("sizes", "hsdp"), LAYOUTS)
def test_torch_tensors_and_shards_become_numpys_weighted_mean(sizes, hsdp, through):
    parts = models(sizes)
    for number, part in enumerate(parts):
        part["odd"] = np.arange(14, dtype="float32").reshape(7, 2) * (1 + number)
    for found in worlds()["torch"](on_torch, sizes, hsdp, through, world_size=sum(sizes)):
        for weights, mean in zip(WEIGHTS, found, strict=True):
            for name, wanted in mean_of(parts, weights).items():
                np.testing.assert_allclose(mean[name], wanted, rtol=1e-5, atol=1e-6, err_msg=f"{name} {weights}")


def odd_cases():
    import torch

    state = dm.init_parallel_state(spec=dm.FederatedSpec((4, 2), shard_size=2), name="federation")
    rank = state.own_rank()
    topology = state.spec.federation
    number, replica = topology.federated_rank(rank), topology.replica_rank(rank)
    left_out = torch.full((3,), float("nan") if number == 1 else 2.0)
    narrow = torch.full((3,), 1.0 + number / 128, dtype=torch.bfloat16)
    own = torch.tensor([10.0 * number + replica], dtype=torch.complex64)
    found = {
        "left out": dm.federated_mean(left_out, "federation", (1, 0)).tolist(),
        "narrow": dm.federated_mean(narrow, "federation").float().tolist(),
        "replicas": dm.federated_mean(own, "federation", average_replicas=True).tolist(),
        "empty": tuple(dm.federated_mean(torch.zeros(0, 2), "federation").shape),
    }
    with dm.use_parallel_state("federation"):
        found["ambient"] = dm.federated_mean(own, weights=(1, 3)).tolist()
    said = {}
    for name, call in {
        "shape": lambda: dm.federated_mean(torch.zeros(2 + (rank == 3)), state),
        "weights": lambda: dm.federated_mean(torch.zeros(2), state, (1, 1 + (rank == 3))),
        "integer": lambda: dm.federated_mean({"steps": torch.tensor(3)}, state),
        "array": lambda: dm.federated_mean([1.0], state),
        "many": lambda: dm.federated_mean(torch.zeros(2), state, (1, 2, 3)),
        "state": lambda: dm.federated_mean(torch.zeros(2), dm.init_parallel_state(dp_size=6, name="plain")),
    }.items():
        try:
            call()
        except dm.DualmeshError as error:
            said[name] = f"{type(error).__name__}: {error}"
    return found, said


def test_torch_leaves_out_weightless_federations_and_refuses_what_differs():
    for rank, (found, said) in enumerate(worlds()["torch"](odd_cases, world_size=6)):
        assert found["left out"] == [2.0] * 3
        assert found["narrow"] == [1.0] * 3  # 1 + 1/256, which bfloat16 rounds to even
        assert found["replicas"] == [(0.5 + 10) / 2]
        assert found["empty"] == (0, 2)
        assert found["ambient"] == [(rank % 2 + 30) / 4]  # the sender of shard p is in replica p
        assert "AgreementError" in said["shape"]
        assert "(3,)" in said["shape"]
        assert "(2,)" in said["shape"]
        assert ("3" if rank != 3 else "0, 1, 2, 4, 5") in said["weights"].split("gave")[0]
        assert "int64" in said["integer"]
        assert "float" in said["array"]
        assert "3 weights given for 2 federations" in said["many"]
        assert "State 'plain' has no federations" in said["state"]


# -- JAX ---------------------------------------------------------------------------------------------------------------


def outside_in_jax(sizes, hsdp, through):
    import jax

    world = sum(sizes)
    topology = dm.FederatedSpec(sizes, hsdp).resolve(world)
    devices = np.array(jax.devices()[:world])
    if through == "named":
        state = dm.init_parallel_state(spec=dm.FederatedSpec(sizes, hsdp), name="federation")
        scope = dm.use_parallel_state("federation")
    else:
        state = dm.DistributedState()
        state.set_global("gloo", "cpu", "localhost", 29500, 0, world)
        state.set_federated_scaling(sizes, hsdp)
        scope = jax.set_mesh(jax.sharding.Mesh(devices, ("other",)))
    trees = []
    for number, model in enumerate(models(sizes)):
        rows = topology.mesh(topology.communicating(number)[0])
        mesh = jax.sharding.Mesh(devices[np.array(rows)], ("replica", "shard"))

        def laid_out(name, value, mesh=mesh):
            dim = DIMS.get(name)
            spec = jax.P() if dim is None else jax.P(*[None] * dim, "shard")
            return jax.device_put(value, jax.sharding.NamedSharding(mesh, spec))

        trees.append({name: laid_out(name, value) for name, value in model.items()})
    found = []
    with scope:
        for weights in WEIGHTS:
            means = dm.federated_mean(trees, state, weights_for(weights, sizes))
            assert isinstance(means, list)
            for before, after in zip(jax.tree.leaves(trees), jax.tree.leaves(means), strict=True):
                assert before.sharding == after.sharding
                for shard in after.addressable_shards:  # replicas have the same bits
                    np.testing.assert_array_equal(shard.data, np.asarray(after)[shard.index])
            found.append([{name: np.asarray(x) for name, x in mean.items()} for mean in means])
    return found


@pytest.mark.parametrize("through", ["named", "distributed"])
@pytest.mark.parametrize(("sizes", "hsdp"), LAYOUTS)
def test_jax_arrays_of_federations_become_numpys_weighted_mean(sizes, hsdp, through):
    parts = models(sizes)
    (found,) = worlds()["jax"](outside_in_jax, sizes, hsdp, through, world_size=sum(sizes))
    for weights, means in zip(WEIGHTS, found, strict=True):
        for mean in means:
            for name, wanted in mean_of(parts, weights).items():
                np.testing.assert_allclose(mean[name], wanted, rtol=1e-5, atol=1e-6, err_msg=f"{name} {weights}")


def blocks_of(sizes, hsdp):
    """Return a block for every rank: of its federation, and of its shard where equal ranks hold equal shards."""
    topology = dm.FederatedSpec(sizes, hsdp).resolve(sum(sizes))
    draw = np.random.default_rng(1)
    shards = hsdp or (sizes[0] if topology.is_symmetric else 1)
    parts = draw.normal(size=(len(sizes), shards, 3)).astype("float32")
    place = [(topology.federated_rank(r), topology.shard_index(r) % shards) for r in range(sum(sizes))]
    return parts, place


def inside(sizes, hsdp, jitted):
    state = dm.init_parallel_state(spec=dm.FederatedSpec(sizes, hsdp), name="federation")
    parts, place = blocks_of(sizes, hsdp)
    x = dm.distribute(np.stack([parts[at] for at in place]), dm.P("world"))
    found = []
    for weights in WEIGHTS:

        def mean(block, weights=weights):
            return dm.federated_mean({"block": block}, state, weights_for(weights, sizes))["block"]

        lifted = dm.shard_map(mean, dm.P("world"), dm.P("world"))
        if jitted:
            import jax

            lifted = jax.jit(lifted)
        found.append(dm.to_numpy(lifted(x)))
    return found


@pytest.mark.parametrize(("sizes", "hsdp"), LAYOUTS)
@pytest.mark.parametrize("backend", ["sim", "torch", "jax"])
def test_blocks_in_shard_map_become_numpys_weighted_mean(backend, sizes, hsdp):
    parts, place = blocks_of(sizes, hsdp)
    for found in worlds()[backend](inside, sizes, hsdp, backend == "jax", world_size=sum(sizes)):
        for weights, blocks in zip(WEIGHTS, found, strict=True):
            w = np.array([1] * len(sizes) if weights is None else weights[: len(sizes)], float)
            wanted = np.tensordot(w / w.sum(), parts, 1)
            np.testing.assert_allclose(blocks, [wanted[shard] for _, shard in place], rtol=1e-5, atol=1e-6)


def replicas_that_differ():
    """Average blocks of replicas that hold different values, in `shard_map` and, on JAX, as arrays outside."""
    state = dm.init_parallel_state(spec=dm.FederatedSpec((4, 2), shard_size=2), name="federation")
    topology = state.spec.federation
    own = np.array([[[100.0 * topology.federated_rank(r) + 10 * topology.shard_index(r) + r]] for r in range(6)])
    found = {}
    for asked in (True, False):
        mean = dm.shard_map(
            lambda block, asked=asked: dm.federated_mean(block, state, (3, 1), average_replicas=asked),
            dm.P("world"),
            dm.P("world"),
        )
        found["inside", asked] = dm.to_numpy(mean(own.astype("float32")))
    if state.backend == "jax":
        import jax

        arrays = []
        for number in range(2):
            rows = np.array(topology.mesh(topology.communicating(number)[0]))
            mesh = jax.sharding.Mesh(state.mesh.devices.ravel()[rows], ("replica", "shard"))
            blocks = [jax.device_put(own[r, 0].astype("float32"), state.mesh.devices.flat[r]) for r in rows.flat]
            layout = jax.sharding.NamedSharding(mesh, jax.P("shard"))
            arrays.append(jax.make_array_from_single_device_arrays((2,), layout, blocks))
        means = dm.federated_mean(arrays, state, (3, 1), average_replicas=True)
        shards = [shard for mean in means for shard in mean.addressable_shards]
        found["outside", True] = np.stack([np.asarray(shard.data) for shard in shards])
    return found


@pytest.mark.parametrize("backend", ["sim", "torch", "jax"])
def test_replicas_that_differ_are_averaged_in_their_federation_first_where_asked(backend):
    first = [10.0 * s + np.mean([s, s + 2]) for s in (0, 1)]  # ranks 0, 2 and 1, 3 hold shards 0 and 1
    second = [100.0 + 10 * s + 4 + s for s in (0, 1)]
    averaged = np.array([(3 * a + b) / 4 for a, b in zip(first, second, strict=True)])
    senders = np.array([0.0, 13.0])  # ranks 0 and 3: shards are spread over replicas
    unaveraged = (3 * senders + second) / 4
    shards = [0, 1, 0, 1, 0, 1]
    for found in worlds()[backend](replicas_that_differ, world_size=6):
        np.testing.assert_allclose(found["inside", True].ravel(), averaged[shards], rtol=1e-6)
        np.testing.assert_allclose(found["inside", False].ravel(), unaveraged[shards], rtol=1e-6)
        if backend == "jax":
            np.testing.assert_allclose(found["outside", True].ravel(), averaged[shards], rtol=1e-6)


def refused_in_jax():
    import jax
    import jax.numpy as jnp

    state = dm.init_parallel_state(spec=dm.FederatedSpec((4, 2)), name="federation")
    devices = np.array(jax.devices()[:6])

    def on(ranks, shape, spec=None):
        mesh = jax.sharding.Mesh(devices[ranks], ("shard",))
        return jax.device_put(jnp.zeros(shape), jax.sharding.NamedSharding(mesh, spec or jax.P()))

    first, second = on([0, 1, 2, 3], (4,)), on([4, 5], (4,))
    said = {}
    for name, trees in {
        "one": first,
        "structure": [{"a": first}, [second]],
        "shape": [first, on([4, 5], (6,))],
        "devices": [first, on([3, 4], (4,))],
        "order": [on([3, 2, 1, 0], (4,), jax.P("shard")), second],
        "integer": [first.astype(int), second.astype(int)],
    }.items():
        try:
            dm.federated_mean(trees, state)
        except dm.DualmeshError as error:
            said[name] = str(error)
    return said


def test_jax_refuses_trees_and_layouts_that_are_not_federations():
    (said,) = worlds()["jax"](refused_in_jax, world_size=6)
    assert "list of 2 trees" in said["one"]
    assert "federation 1 gave" in said["structure"]
    assert "[6]" in said["shape"]
    assert "federation 1 is" in said["devices"]
    assert "in rank order" in said["order"]
    assert "int32" in said["integer"]
