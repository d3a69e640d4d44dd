"""Federated averaging: every rank ends with numpy's weighted mean of the federations' models, laid out as before."""

import functools
from contextlib import contextmanager

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.testing import assert_same, assert_sharded_as
from tests.worlds import compiled, worlds

LAYOUTS = {  # world size: (federations, hsdp)
    6: [((4, 2), None), ((4, 2), 2)],
    8: [((4, 4), None), ((4, 4), 2), ((2, 4, 2), None), ((2, 4, 2), 2)],
}
WEIGHTS = (None, (3, 1, 2))
THROUGH = ("named", "distributed")
RTOL = 2e-7  # less than two steps of float32


@contextmanager
def federation(sizes, hsdp, name="federation"):
    """Register federations under a name that is free again afterwards."""
    yield dm.init_parallel_state(spec=dm.FederatedSpec(sizes, hsdp), name=name)
    dm.clear_parallel_state(name)


def models(sizes, seed=0):
    """Return the model of each federation: its arrays, and the dim over which each is sharded (None: not)."""
    draw = np.random.default_rng(seed)
    shapes = {"rows": (8, 3), "columns": (3, 4), "plain": (5,), "whole": (2, 3)}
    return [{name: draw.normal(size=shape).astype("float32") for name, shape in shapes.items()} for _ in sizes]


DIMS = {"rows": 0, "columns": 1, "whole": None, "odd": 0}


def mean_of(parts, weights):
    weights = np.array([1] * len(parts) if weights is None else weights[: len(parts)], float)
    return {
        name: (sum(w * m[name].astype(float) for w, m in zip(weights, parts, strict=True)) / weights.sum()).astype("f4")
        for name in parts[0]
    }


def weights_for(weights, sizes):
    return None if weights is None else weights[: len(sizes)]


# -- torch -------------------------------------------------------------------------------------------------------------


def on_torch(sizes, hsdp, through):
    world = sum(sizes)
    rank = dm.init_distributed().local_ranks[0]
    topology = dm.FederatedSpec(sizes, hsdp).resolve(world)
    if through == "named":
        with federation(sizes, hsdp) as state:
            return means_on_torch(sizes, topology.federated_rank(rank), state, state.submesh("shard"))
    state = dm.DistributedState()
    state.set_global("gloo", "cpu", "localhost", 29500, rank, world)
    state.set_federated_scaling(sizes, hsdp)
    found = means_on_torch(sizes, topology.federated_rank(rank), state, state.hsdp_mesh if hsdp else state.fsdp_mesh)
    state.unset_federated_scaling()
    return found


def means_on_torch(sizes, number, state, mesh):
    import torch
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mine = models(sizes)[number]
    odd = np.arange(14, dtype="float32").reshape(7, 2) * (1 + number)

    def laid_out(name, value):
        dim = DIMS[name]
        places = [Replicate()] * (mesh.ndim - 1) + [Replicate() if dim is None else Shard(dim)]
        return torch.nn.Parameter(distribute_tensor(torch.from_numpy(value), mesh, places))

    tree = {name: laid_out(name, mine[name]) for name in ("rows", "columns", "whole")}
    tree = {"sharded": tree, "others": [torch.from_numpy(mine["plain"]), (laid_out("odd", odd),)]}
    found = {}
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
        wholes = {name: x.full_tensor().numpy() for name, x in dtensors.items()}
        found[weights] = {**wholes, "plain": mean["others"][0].numpy()}
    return found


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("world_size", LAYOUTS)
def test_torch_tensors_and_shards_become_numpys_weighted_mean(world_size, through):
    for sizes, hsdp in LAYOUTS[world_size]:
        parts = models(sizes)
        for number, part in enumerate(parts):
            part["odd"] = np.arange(14, dtype="float32").reshape(7, 2) * (1 + number)
        wanted = {weights: mean_of(parts, weights) for weights in WEIGHTS}
        for rank, one in enumerate(found("torch", world_size)):
            means = one["arrays"][sizes, hsdp, through]
            assert_same(f"{sizes} {hsdp} on rank {rank}: weights", wanted, means, rtol=RTOL)


def odd_cases(state):
    import torch

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
    for rank, (mean, said) in enumerate(one["odd cases"] for one in found("torch", 6)):
        assert mean["left out"] == [2.0] * 3
        assert mean["narrow"] == [1.0] * 3  # 1 + 1/256, which bfloat16 rounds to even
        assert mean["replicas"] == [(0.5 + 10) / 2]
        assert mean["empty"] == (0, 2)
        assert mean["ambient"] == [(rank % 2 + 30) / 4]  # the sender of shard p is in replica p
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
        with federation(sizes, hsdp) as state, dm.use_parallel_state("federation"):
            return means_in_jax(sizes, topology, state, devices)
    state = dm.DistributedState()
    state.set_global("gloo", "cpu", "localhost", 29500, 0, world)
    state.set_federated_scaling(sizes, hsdp)
    with jax.set_mesh(jax.sharding.Mesh(devices, ("other",))):
        found = means_in_jax(sizes, topology, state, devices)
    state.unset_federated_scaling()
    return found


def means_in_jax(sizes, topology, state, devices):
    import jax

    trees = []
    for number, model in enumerate(models(sizes)):
        rows = topology.mesh(topology.communicating(number)[0])
        mesh = jax.sharding.Mesh(devices[np.array(rows)], ("replica", "shard"))

        def laid_out(name, value, mesh=mesh):
            dim = DIMS.get(name)
            spec = jax.P() if dim is None else jax.P(*[None] * dim, "shard")
            return jax.device_put(value, jax.sharding.NamedSharding(mesh, spec))

        trees.append({name: laid_out(name, value) for name, value in model.items()})
    found = {}
    for weights in WEIGHTS:
        means = dm.federated_mean(trees, state, weights_for(weights, sizes))
        assert isinstance(means, list)
        for before, after in zip(jax.tree.leaves(trees), jax.tree.leaves(means), strict=True):
            assert before.sharding == after.sharding
            whole = np.asarray(after)
            for shard in after.addressable_shards:  # replicas have the same bits
                assert_same(f"shard on {shard.device}", whole[shard.index], shard.data, rtol=0)
        found[weights] = [{name: np.asarray(x) for name, x in mean.items()} for mean in means]
    return found


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("world_size", LAYOUTS)
def test_jax_arrays_of_federations_become_numpys_weighted_mean(world_size, through):
    (one,) = found("jax", world_size)
    for sizes, hsdp in LAYOUTS[world_size]:
        wanted = {weights: [mean_of(models(sizes), weights)] * len(sizes) for weights in WEIGHTS}
        assert_same(f"{sizes} {hsdp}: weights", wanted, one["arrays"][sizes, hsdp, through], rtol=RTOL)


def blocks_of(sizes, hsdp):
    """Return a block for every rank: of its federation, and of its shard where equal ranks hold equal shards."""
    topology = dm.FederatedSpec(sizes, hsdp).resolve(sum(sizes))
    draw = np.random.default_rng(1)
    shards = hsdp or (sizes[0] if topology.is_symmetric else 1)
    parts = draw.normal(size=(len(sizes), shards, 3)).astype("float32")
    place = [(topology.federated_rank(r), topology.shard_index(r) % shards) for r in range(sum(sizes))]
    return parts, place


def wrong_inside(sizes, hsdp):
    """Return what is wrong with the mean of blocks, by weights; on JAX jitted too."""
    said = []
    parts, place = blocks_of(sizes, hsdp)
    with federation(sizes, hsdp) as state:
        x = dm.distribute(np.stack([parts[at] for at in place]), dm.P("world"), state=state)
        for weights in WEIGHTS:

            def mean(block, weights=weights):
                return dm.federated_mean({"block": block}, state, weights_for(weights, sizes))["block"]

            w = np.array([1] * len(sizes) if weights is None else weights[: len(sizes)], float)
            means = np.tensordot(w / w.sum(), parts, 1).astype("float32")
            wanted = np.stack([means[shard] for _, shard in place])
            found = compiled(dm.shard_map(mean, dm.P("world"), dm.P("world"), state=state))(x)
            try:
                assert_sharded_as(found, dm.P("world"), state=state, values=wanted, rtol=RTOL)
            except dm.DualmeshError as error:
                said.append(f"{sizes} {hsdp} {weights}: {error}")
    return said


@pytest.mark.parametrize("world_size", LAYOUTS)
@pytest.mark.parametrize("backend", ["sim", "torch", "jax"])
def test_blocks_in_shard_map_become_numpys_weighted_mean(backend, world_size):
    for one in found(backend, world_size):
        assert one["blocks"] == [[]] * len(LAYOUTS[world_size])


def replicas_that_differ(state):
    """Average blocks of replicas that hold different values, in `shard_map` and, on JAX, as arrays outside."""
    topology = state.spec.federation
    own = np.array([[[100.0 * topology.federated_rank(r) + 10 * topology.shard_index(r) + r]] for r in range(6)])
    found = {}
    for asked in (True, False):
        mean = dm.shard_map(
            lambda block, asked=asked: dm.federated_mean(block, state, (3, 1), average_replicas=asked),
            dm.P("world"),
            dm.P("world"),
            state=state,
        )
        found["inside", asked] = dm.to_numpy(mean(own.astype("float32")), state=state).ravel()
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
        found["outside", True] = np.stack([np.asarray(shard.data) for shard in shards]).ravel()
    return found


@pytest.mark.parametrize("backend", ["sim", "torch", "jax"])
def test_replicas_that_differ_are_averaged_in_their_federation_first_where_asked(backend):
    first = [10.0 * s + np.mean([s, s + 2]) for s in (0, 1)]  # ranks 0, 2 and 1, 3 hold shards 0 and 1
    second = [100.0 + 10 * s + 4 + s for s in (0, 1)]
    averaged = np.array([(3 * a + b) / 4 for a, b in zip(first, second, strict=True)], "float32")
    senders = np.array([0.0, 13.0])  # ranks 0 and 3: shards are spread over replicas
    unaveraged = ((3 * senders + second) / 4).astype("float32")
    shards = [0, 1, 0, 1, 0, 1]
    wanted = {("inside", True): averaged[shards], ("inside", False): unaveraged[shards]}
    wanted |= {("outside", True): averaged[shards]} if backend == "jax" else {}
    for one in found(backend, 6):
        assert_same(f"mean on {backend}", wanted, one["replicas"], rtol=RTOL)


def refused_in_jax(state):
    import jax
    import jax.numpy as jnp

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
    (said,) = (one["refused"] for one in found("jax", 6))
    assert "list of 2 trees" in said["one"]
    assert "federation 1 gave" in said["structure"]
    assert "[6]" in said["shape"]
    assert "federation 1 is" in said["devices"]
    assert "in rank order" in said["order"]
    assert "int32" in said["integer"]


def everything(world_size):
    """Return what one world finds."""
    layouts, backend = LAYOUTS[world_size], dm.init_distributed().backend
    found = {"blocks": [wrong_inside(*layout) for layout in layouts]}
    if backend != "sim":
        arrays = on_torch if backend == "torch" else outside_in_jax
        found["arrays"] = {(*layout, how): arrays(*layout, how) for layout in layouts for how in THROUGH}
    if world_size == 6:
        with federation((4, 2), 2) as state:
            found["replicas"] = replicas_that_differ(state)
            found |= {"odd cases": odd_cases(state)} if backend == "torch" else {}
    if world_size == 6 and backend == "jax":
        with federation((4, 2), None) as state:
            found["refused"] = refused_in_jax(state)
    return found


@functools.cache
def found(backend, world_size):
    """Return what every process found, in a world that all tests share."""
    return worlds()[backend](everything, world_size, world_size=world_size)
