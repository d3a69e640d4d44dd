"""A `DistributedState` in running worlds: every mesh and group is of the right ranks and sums what they hold."""

import functools

import pytest

import dualmesh as dm
from dualmesh.testing import assert_same
from tests.worlds import worlds

LAYOUTS = {  # world size: (federations, hsdp)
    4: [((2, 2), None)],
    6: [((4, 2), 2), ((4, 2), None)],
    8: [((4, 4), 2), ((2, 4, 2), 2), ((2, 4, 2), None)],
}
BACKENDS = ("torch", "jax")


def values_of(world_size):
    return [float(3**rank) for rank in range(world_size)]


def placed(rank, world_size, *, streams=None):
    state = dm.DistributedState()
    state.set_global("gloo", "cpu", "localhost", 29500, rank, world_size)
    state.set_exec_device("cpu", streams)
    return state


def total(group, rank, world_size, known):
    """Return the sum over a native group of a value that differs on every rank; equal meshes are summed over once."""
    mine = values_of(world_size)
    if not hasattr(group, "devices"):
        import torch
        import torch.distributed as dist

        x = torch.tensor([mine[rank]], dtype=torch.float64)
        dist.all_reduce(x, group=group)
        assert group.rank() == dist.get_process_group_ranks(group).index(rank)
        return x.item()
    import jax
    import numpy as np

    ranks = [device.id for device in group.devices.flat]  # one process: ids are ranks
    if group not in known:
        spec = jax.P("group")
        x = jax.device_put(np.array([mine[r] for r in ranks]), jax.sharding.NamedSharding(group, spec))
        summed = jax.shard_map(lambda x: jax.lax.psum(x, "group"), mesh=group, in_specs=spec, out_specs=spec)
        known[group] = np.asarray(jax.jit(summed)(x)).tolist()
    return known[group][ranks.index(rank)]


def federated(world_size, sizes, hsdp):
    found, known = {}, {}
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
                name: group and (fabric.group_ranks(group), total(group, rank, world_size, known))
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


@pytest.mark.parametrize("world_size", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_of_federations_sum_the_values_of_their_ranks(backend, world_size):
    layouts = zip(LAYOUTS[world_size], *(one["federated"] for one in found(backend, world_size)), strict=True)
    for (sizes, hsdp), *answers in layouts:
        check_federations(backend, world_size, sizes, hsdp, answers)


def check_federations(backend, world_size, sizes, hsdp, found):
    topology = dm.FederatedSpec(sizes, hsdp).resolve(world_size)
    value = values_of(world_size)
    answers = {}
    for one in found:
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
    found, known = [], {}
    for rank in dm.init_distributed().local_ranks:
        state = placed(rank, world_size)
        state.set_fsdp()
        fsdp = state.fabric_in_use.mesh_rows(state.fsdp_mesh)
        state.set_hsdp(hsdp)
        order = tuple(reversed(range(world_size)))
        group = state.create_process_group(order, "backwards")
        found.append((fsdp, state.fabric_in_use.mesh_rows(state.hsdp_mesh), total(group, rank, world_size, known)))
    return found


@pytest.mark.parametrize("world_size", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_sharding_meshes_and_groups_against_rank_order(backend, world_size):
    whole = tuple(range(world_size))
    wanted = (
        (whole,),
        tuple(whole[first : first + 2] for first in range(0, world_size, 2)),
        sum(values_of(world_size)),
    )
    for one in found(backend, world_size):
        assert one["sharded"] == [wanted] * len(one["federated"][0])


def trained_on_the_meshes():
    """Return the gradient of the sum over ranks of what a layer makes of rows that differ on every rank."""
    import torch
    from torch.distributed.fsdp import fully_shard

    rank = dm.init_distributed().local_ranks[0]
    state = placed(rank, 4)
    state.set_hsdp(2)
    model = torch.nn.Linear(4, 3, bias=False)
    fully_shard(model, mesh=state.hsdp_mesh)
    model(rows_of(torch.arange(8.0), rank)).sum().backward()
    return model.weight.grad.full_tensor().numpy()


def rows_of(line, rank):
    return line.reshape(2, 4) * (1 + rank)


def test_fsdp_trains_on_a_mesh_of_replicas():
    import numpy as np

    mean = sum(rows_of(np.arange(8, dtype="float32"), rank) for rank in range(4)).sum(0) / 4
    for one in found("torch", 4):
        assert_same("gradient", np.stack([mean] * 3), one["trained"])


def two_handles():
    import torch.distributed as dist

    rank = dm.init_distributed().local_ranks[0]
    state = placed(rank, 4)
    state.streams = (None, None)  # CPU devices have none; on a GPU set_exec_device(.., streams=2) makes them
    state.set_federated_scaling(2)
    names = {group.group_name for group in state.federated_group}
    again = state.create_process_group(dist.get_process_group_ranks(state.federated_group[0]))
    names.add(again.group_name)
    sums = [total(group, rank, 4, {}) for group in (*state.federated_group, again)]
    return len(names), sums


def test_every_stream_has_a_communicator_of_its_own():
    value = values_of(4)
    for rank, one in enumerate(found("torch", 4)):
        assert one["handles"] == (3, [value[rank % 2] + value[rank % 2 + 2]] * 3)


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
    for one in found(backend, 4):
        assert len(one["refusals"]) == 2
        for kind, text, is_same in one["refusals"]:
            assert (kind, is_same) == ("RankError", True)
            assert "of 5" in text
            assert "of 4" in text


def everything(world_size):
    """Return what one world finds."""
    found = {
        "federated": [federated(world_size, *layout) for layout in LAYOUTS[world_size]],
        "sharded": sharded(world_size, 2),
    }
    if world_size == 4:
        found["refusals"] = refusals()
    if world_size == 4 and dm.init_distributed().backend == "torch":
        found |= {"trained": trained_on_the_meshes(), "handles": two_handles()}
    return found


@functools.cache
def found(backend, world_size):
    """Return what every process found, in a world that all tests share."""
    return worlds()[backend](everything, world_size, world_size=world_size)
