"""A state in another process, a data loader's worker or a fork: it answers sizes there and refuses to communicate."""

import pytest

import dualmesh as dm
from tests.worlds import torch_world


def answers(state):
    """Return what a state says where its groups do not work: sizes, then how each use is refused."""
    import torch

    def refusal(use):
        try:
            use()
        except dm.StaleStateError as error:
            return str(error)
        return None

    uses = (
        lambda: dm.ops.all_reduce(torch.ones(1), "a", state=state),
        lambda: state.group("a"),
        lambda: state.mesh,
        lambda: dm.host.barrier(state=state),
        lambda: state.warm_up(),
    )
    return state.size("a"), state.ranks("a", rank=0), state.index("a", rank=1), [refusal(use) for use in uses]


class Items:
    """A dataset of what its state says, and of what is ambient."""

    def __init__(self, state):
        self.state = state

    def __len__(self):
        return 2

    def __getitem__(self, place):
        own = answers(self.state)
        return own, answers(dm.get_parallel_state()) if self.state.backend == "torch" else None


def loaded(method):
    import multiprocessing
    import warnings

    import torch
    from torch.utils.data import DataLoader

    warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning)
    state = dm.init_parallel_state(spec=dm.TopologySpec({"a": 2}))
    # This process is a daemon of pytest's, and daemons may have no children.
    multiprocessing.current_process()._config["daemon"] = False
    found = list(DataLoader(Items(state), batch_size=None, num_workers=1, multiprocessing_context=method))
    return found, dm.ops.all_reduce(torch.tensor(state.own_rank() + 1.0), "a").item()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_data_loaders_worker_sees_sizes_and_is_refused_collectives(method):
    words = "a fork" if method == "fork" else "came by pickle from another process"
    for found, total in torch_world(loaded, method, world_size=2):
        assert total == 3.0, "the trainer's own groups still work"
        for own, ambient in found:
            for size, ranks, index, refusals in filter(None, (own, ambient)):
                assert (size, tuple(ranks), index) == (2, (0, 1), 1)
                assert all(refusal is not None and words in refusal for refusal in refusals), refusals
        assert (found[0][1] is not None) == (method == "fork")


def forking():
    import json
    import os

    import torch

    state = dm.init_parallel_state(spec=dm.TopologySpec({"a": 2}))
    read, write = os.pipe()
    child = os.fork()
    if not child:
        said = answers(state)
        dm.clear_parallel_state()
        os.write(write, json.dumps([said, dm.groups_in_use()]).encode())
        os._exit(0)
    os.close(write)
    said = json.loads(os.fdopen(read).read())
    _, status = os.waitpid(child, 0)
    return said, status, dm.ops.all_reduce(torch.tensor(state.own_rank() + 1.0), "a").item(), len(dm.groups_in_use())


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_is_told_by_name_and_its_clearing_ends_no_group_of_its_parent():
    for ((size, ranks, index, refusals), left), status, total, held in torch_world(forking, world_size=2):
        assert (size, ranks, index, status) == (2, [0, 1], 1, 0)
        assert all("State 'base' is another process', of which this one is a fork" in one for one in refusals)
        assert left == []
        assert total == 3.0
        assert held == 1


def copies():
    import copy

    import torch

    state = dm.init_parallel_state(spec=dm.TopologySpec({"a": 2}))

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.state = state
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            return dm.ops.all_reduce(self.weight * x, "a", state=self.state)

    net = Net()
    twin = copy.deepcopy(net)
    twin.weight.data.fill_(2.0)
    return twin.state is state, [model(torch.tensor([1.0 + state.own_rank()])).item() for model in (net, twin)]


def test_a_copied_model_keeps_its_state_and_has_its_own_parameters():
    assert torch_world(copies, world_size=2) == [(True, [3.0, 6.0])] * 2
