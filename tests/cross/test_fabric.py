"""A `DistributedState` in running worlds: every mesh and group is of the right ranks and sums what they hold."""

import pytest

import dualmesh as dm
from tests.worlds import worlds

LAYOUTS = [
    (4, (2, 2), None),
    (6, (4, 2), 2),
    (6, (4, 2), None),
    (8, (4, 4), 2),
    (8, (2, 4, 2), 2),
    (8, (2, 4, 2), None),
]
BACKENDS = ("torch", "jax")


def values_of(world_size):
    return [float(3**rank) for rank in range(world_size)]


def placed(rank, world_size, *, streams=None):
    state = dm.DistributedState()
    state.set_global("gloo", "cpu", "localhost", 29500, rank, world_size)
    state.set_exec_device("cpu", streams)
    return state


def total(group, rank, world_size):
    """Return the sum over a native group of a value that differs on every rank."""
    mine = values_of(world_size)
    if hasattr(group, "devices"):
        import jax
        import numpy as np

        ranks = [device.id for device in group.devices.flat]  # one process: ids are ranks
        spec = jax.P("group")
        split = jax.sharding.NamedSharding(group, spec)
        x = jax.device_put(np.array([mine[r] for r in ranks]), split)
        summed = jax.shard_map(lambda x: jax.lax.psum(x, "group"), mesh=group, in_specs=spec, out_specs=spec)
        return float(jax.jit(summed)(x)[ranks.index(rank)])
    import torch
    import torch.distributed as dist

    x = torch.tensor([mine[rank]], dtype=torch.float64)
    dist.all_reduce(x, group=group)
    assert group.rank() == dist.get_process_group_ranks(group).index(rank)
    return x.item()


def federated(world_size, sizes, hsdp):
    found = {}
    here = dm.init_distributed().local_ranks
    for rank in here:
        state = placed(rank, world_size)
        held = set(dm.groups_in_use())
        state.set_federated_scaling(sizes, hsdp=hsdp)
        groups = {
            "federated": state.federated_group[0],
            "replica": state.replica_group and state.replica_group[0],
            "federation": state.federation,
        }
        fabric = state.fabric_in_use
        found[rank] = (
            {
                name: group and (fabric.group_ranks(group), total(group, rank, world_size))
                for name, group in groups.items()
            },
            fabric.mesh_rows(state.hsdp_mesh if hsdp else state.fsdp_mesh),
            (state.is_sender, state.receive_from),
            str(state),
            len(set(dm.groups_in_use()) - held),
        )
        state.unset_federated_scaling()
        assert set(dm.groups_in_use()) == held
    return found


@pytest.mark.parametrize(("world_size", "sizes", "hsdp"), LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_of_federations_sum_the_values_of_their_ranks(backend, world_size, sizes, hsdp):
    topology = dm.FederatedSpec(sizes, hsdp).resolve(world_size)
    value = values_of(world_size)
    answers = {}
    for one in worlds()[backend](federated, world_size, sizes, hsdp, world_size=world_size):
        answers.update(one)
    assert sorted(answers) == list(range(world_size))
    for rank, (groups, rows, roles, text, made) in answers.items():
        wanted = {
            "federated": topology.federated_group(rank),
            "replica": topology.replica_group(rank),
            "federation": topology.federation(rank),
        }
        sums = {name: ranks and (ranks, sum(value[r] for r in ranks)) for name, ranks in wanted.items()}
        assert groups == sums
        assert rows == topology.mesh(rank)
        assert roles == (topology.is_sender(rank), topology.receive_from(rank))
        assert f"federated_group: {list(wanted['federated'])}" in text
        assert (made > 0) == (backend == "torch"), "and none is held once federations are unset"


def sharded(world_size, hsdp):
    found = []
    for rank in dm.init_distributed().local_ranks:
        state = placed(rank, world_size)
        state.set_fsdp()
        fsdp = state.fabric_in_use.mesh_rows(state.fsdp_mesh)
        state.set_hsdp(hsdp)
        order = tuple(reversed(range(world_size)))
        group = state.create_process_group(order, "backwards")
        found.append((fsdp, state.fabric_in_use.mesh_rows(state.hsdp_mesh), total(group, rank, world_size)))
    return found


@pytest.mark.parametrize("world_size", [4, 6, 8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_sharding_meshes_and_groups_against_rank_order(backend, world_size):
    whole = tuple(range(world_size))
    wanted = (
        (whole,),
        tuple(whole[first : first + 2] for first in range(0, world_size, 2)),
        sum(values_of(world_size)),
    )
    for answers in worlds()[backend](sharded, world_size, 2, world_size=world_size):
        assert answers == [wanted] * len(answers)


def trained_on_the_meshes():
    import torch
    from torch.distributed.fsdp import fully_shard

    rank = dm.init_distributed().local_ranks[0]
    state = placed(rank, 4)
    state.set_hsdp(2)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, bias=False)
    whole = model.weight.detach().clone()
    fully_shard(model, mesh=state.hsdp_mesh)
    x = torch.arange(8.0).reshape(2, 4) + rank
    model(x).sum().backward()
    every = [torch.arange(8.0).reshape(2, 4) + r for r in range(4)]
    wanted = torch.stack([torch.autograd.functional.jacobian(lambda w, x=x: (x @ w.T).sum(), whole) for x in every])
    return torch.allclose(model.weight.grad.full_tensor(), wanted.mean(0))


def test_fsdp_trains_on_a_mesh_of_replicas():
    assert worlds()["torch"](trained_on_the_meshes, world_size=4) == [True] * 4


def two_handles():
    import torch.distributed as dist

    rank = dm.init_distributed().local_ranks[0]
    state = placed(rank, 4)
    state.streams = (None, None)  # CPU devices have none; on a GPU set_exec_device(.., streams=2) makes them
    state.set_federated_scaling(2)
    names = {group.group_name for group in state.federated_group}
    again = state.create_process_group(dist.get_process_group_ranks(state.federated_group[0]))
    names.add(again.group_name)
    sums = [total(group, rank, 4) for group in (*state.federated_group, again)]
    return len(names), sums


def test_every_stream_has_a_communicator_of_its_own():
    value = values_of(4)
    for rank, found in enumerate(worlds()["torch"](two_handles, world_size=4)):
        assert found == (3, [value[rank % 2] + value[rank % 2 + 2]] * 3)


def refusals():
    rank = dm.init_distributed().local_ranks[0]
    said = []
    other = dm.init_distributed().world_size
    for change in ({"rank": rank, "world_size": other + 1}, {"rank": other, "world_size": other + 1}):
        state = placed(**change)
        before = str(state)
        try:
            state.set_fsdp()
        except dm.DualmeshError as error:
            said.append((type(error).__name__, str(error), str(state) == before))
    return said


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_place_that_is_not_this_process_is_refused(backend):
    for found in worlds()[backend](refusals, world_size=2):
        assert len(found) == 2
        for kind, text, is_same in found:
            assert (kind, is_same) == ("RankError", True)
            assert "of 3" in text
            assert "of 2" in text
