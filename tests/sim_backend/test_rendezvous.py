"""Ranks that do not meet end in an error that says which rank did what; nobody waits for ever."""

import threading
import time

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import AgreementError, ArgumentError, GroupTimeoutError, MembershipError

X = np.arange(4.0)


@pytest.fixture
def world():
    with dm.session(backend="sim", world_size=4, timeout_s=20):
        yield dm.init_parallel_state(spec=dm.TopologySpec({"dp": 2, "tp": 2}))


def called(each):
    return dm.to_numpy(dm.shard_map(each, dm.P("world"), dm.P("world"))(X))


def test_a_rank_that_raises_frees_the_others_at_once_and_its_error_surfaces(world):
    def each(x):
        if dm.ops.axis_index("world") == 2:
            raise OSError("disk")
        return dm.ops.all_reduce(x, "world")

    began = time.monotonic()
    with pytest.raises(OSError, match="disk") as caught:
        called(each)
    assert time.monotonic() - began < 5
    assert caught.value.__notes__ == ["shard_map: raised on rank 2."]


def test_a_rank_is_freed_past_code_that_catches_every_exception(world):
    went_on = []

    def each(x):
        if dm.ops.axis_index("world") == 2:
            raise OSError("disk")
        try:
            return dm.ops.all_reduce(x, "world")
        except Exception:
            went_on.append(dm.ops.axis_index("world"))
            return x

    with pytest.raises(OSError, match="disk"):
        called(each)
    assert went_on == []


def test_of_several_errors_the_first_ranks_surfaces(world):
    barrier = threading.Barrier(4)

    def each(x):
        barrier.wait(10)
        raise OSError(f"rank {dm.ops.axis_index('world')}")

    with pytest.raises(OSError, match="rank 0") as caught:
        called(each)
    assert caught.value.__notes__ == ["shard_map: raised on rank 0 (and rank 1, 2, 3)."]


def test_different_collectives_are_an_error_that_names_both(world):
    def each(x):
        return dm.ops.all_reduce(x, "dp") if dm.ops.axis_index("world") else dm.ops.broadcast(x, "dp")

    with pytest.raises(AgreementError, match=r"ranks 0, 2 do not.*rank 0: broadcast\(src=0\).*rank 2: all_reduce"):
        called(each)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda x: x.astype("float32"), r"float64\[1\].*float32\[1\]"),
        (lambda x: x[None], r"float64\[1\].*float64\[1, 1\]"),
    ],
    ids=["dtype", "shape"],
)
def test_other_shapes_and_dtypes_are_an_error_that_names_both(world, change, text):
    def each(x):
        return dm.ops.all_reduce(change(x) if dm.ops.axis_index("world") == 3 else x, "tp")

    with pytest.raises(AgreementError, match=rf"ranks 2, 3 .*{text}"):
        called(each)


def test_a_rank_that_returns_without_calling_is_named_at_once(world):
    began = time.monotonic()
    with pytest.raises(AgreementError, match=r"can never meet\. rank 0, 1, 2: waiting in all_reduce.*rank 3: returned"):
        called(lambda x: x if dm.ops.axis_index("world") == 3 else dm.ops.all_reduce(x, "world"))
    assert time.monotonic() - began < 5


def test_ranks_that_wait_for_each_other_in_another_order_are_named_at_once(world):
    def each(x):
        first, second = ("dp", "tp") if dm.ops.axis_index("world") in (0, 3) else ("tp", "dp")
        return dm.ops.all_reduce(dm.ops.all_reduce(x, first), second)

    with pytest.raises(AgreementError, match=r"rank 0: waiting in .* for ranks 0, 2; rank 1: waiting in .*ranks 0, 1"):
        called(each)


def test_a_rank_that_is_busy_runs_into_the_timeout():
    done = threading.Event()

    def each(x):
        if dm.ops.axis_index("world") == 1:
            done.wait(20)
        return dm.ops.all_reduce(x, "world")

    with dm.session(backend="sim", world_size=2, timeout_s=0.2):
        dm.init_parallel_state(dp_size=2)
        with pytest.raises(GroupTimeoutError, match=r"did not meet within 0.2 s.*rank 1: in its own code"):
            dm.shard_map(each, dm.P("world"), dm.P("world"))(X)
        done.set()


def test_one_group_under_two_names_meets(world):
    def each(x):
        return dm.ops.all_reduce(x, "world" if dm.ops.axis_index("world") else ("dp", "tp"))

    assert called(each).tolist() == [6.0] * 4


def test_ranks_outside_the_state_cannot_be_met(world):
    some = dm.init_parallel_state(spec=dm.TopologySpec({"a": 2}), ranks=(0, 1), name="some")
    lifted = dm.shard_map(lambda x: dm.ops.all_reduce(x, "tp", state=world), dm.P("a"), dm.P("a"), state=some)
    assert dm.to_numpy(lifted(X)).tolist() == [2.0, 4.0, 2.0, 4.0]
    lifted = dm.shard_map(lambda x: dm.ops.all_reduce(x, "dp", state=world), dm.P("a"), dm.P("a"), state=some)
    with pytest.raises(MembershipError, match=r"ranks 0, 2 must meet, but 2 take no part.*ranks: 0, 1"):
        lifted(X)


def test_a_rank_that_is_no_member_of_another_state_is_named(world):
    some = dm.init_parallel_state(spec=dm.TopologySpec({"a": 2}), ranks=(2, 1), name="some")

    def each(x):
        return dm.ops.all_gather(x, "a", state=some) if some.is_member else x.repeat(2)

    assert called(each).tolist() == [0, 0, 2, 1, 2, 1, 3, 3]
    with pytest.raises(MembershipError, match=r"this process \(rank 0\) is no member of State 'some'"):
        called(lambda x: dm.ops.all_reduce(x, "a", state=some))


def test_lifted_functions_do_not_nest(world):
    with pytest.raises(ArgumentError, match="inside a shard_map"):
        called(lambda _block: called(lambda block: block))
