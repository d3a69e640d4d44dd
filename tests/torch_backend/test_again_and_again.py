"""States made and cleared over and over, and used from several threads at once: nothing hangs, nothing stays."""

import itertools

import dualmesh as dm
from tests.bench import cycles
from tests.worlds import torch_world

TIMES = 50


def plans(own):
    """Return the states by kind, as (name, arguments)."""
    return {
        "partial": ("partial", {"spec": dm.TopologySpec({"a": 3}), "ranks": (0, 1, 2)}),
        "permuted": ("permuted", {"spec": dm.TopologySpec({"b": 2, "c": 2}), "ranks": (3, 1, 0, 2)}),
        "members": (
            f"members {own // 2}",
            {"spec": dm.TopologySpec({"d": 2}), "ranks": (own // 2 * 2 + 1, own // 2 * 2)},
        ),
    }


def made_over_and_over():
    """Return, after each tenth of the rounds, how many groups, threads, descriptors and sockets this rank has."""
    import os

    import torch
    import torch.distributed as dist

    from dualmesh.backend import discovery

    own = dist.get_rank()
    orders = list(itertools.permutations(plans(own)))
    held = []
    for round_ in range(TIMES):
        for kind in orders[round_ % len(orders)]:
            name, settings = plans(own)[kind]
            if own in settings["ranks"]:
                state = dm.init_parallel_state(name=name, **settings)
                axis = state.axis_names[0]
                assert dm.ops.all_reduce(torch.ones(1), axis, state=state).item() == state.size(axis)
        dm.clear_parallel_state()
        if round_ % 10 == 9:
            dist.barrier()
            links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
            sockets = sum(link.startswith("socket") for link in links)
            held.append((len(discovery.load("torch").pool), len(os.listdir("/proc/self/task")), len(links), sockets))
    return held


def _is_open(fd):
    import os

    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_fifty_partial_permuted_and_members_only_states_in_all_orders_leave_nothing():
    """The first rounds may still open what the world keeps; after that nothing grows."""
    for held in torch_world(made_over_and_over, world_size=4, timeout_s=200):
        groups, threads, descriptors, sockets = zip(*held, strict=True)
        assert groups == (0,) * 5
        for counts in (threads, descriptors, sockets):
            assert max(counts[1:]) <= counts[1] + 1, held


def test_states_cleared_at_once_while_others_still_build_leave_nothing_even_in_the_store():
    """Sixty cycles; `python -m tests.bench.cycles` makes ten thousand of them."""
    for rows in cycles.run(60, 4):
        groups, threads, descriptors, _, keys = zip(*rows, strict=True)
        assert set(groups) == {1}
        assert max(keys) - min(keys) <= 1, rows  # who has left is counted from the first time that a rank waits
        assert (max(threads), max(descriptors)) <= (threads[1], descriptors[1]), rows


def from_two_threads(debug):
    """Use two states, each with groups of its own, from a thread each, in another order on each rank."""
    import threading
    import time

    import torch
    import torch.distributed as dist

    for name in ("left", "right"):
        dm.init_parallel_state(spec=dm.TopologySpec({name: 2}), name=name, own_groups=True)
    own, found = dist.get_rank(), {"left": [], "right": []}

    def work(name):
        for step in range(20):
            with dm.use_parallel_state(name):
                found[name].append(dm.ops.all_reduce(torch.tensor(float(own + step)), name).item())

    with dm.debug(debug):
        threads = [threading.Thread(target=work, args=(name,)) for name in ("left", "right")[:: -1 if own else 1]]
        for thread in threads:
            thread.start()
            time.sleep(0.01)  # the first is under way, alone, when the second starts
        for thread in threads:
            thread.join(60)
    return found


def test_states_with_groups_of_their_own_work_at_once_from_two_threads_in_opposite_orders():
    expected = [2.0 * step + 1 for step in range(20)]
    for debug in (False, True):
        for found in torch_world(from_two_threads, debug, world_size=2):
            assert found == {"left": expected, "right": expected}
