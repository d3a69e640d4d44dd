"""Transfer groups without a framework: generations, who is missing, who left, what is refused."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import dualmesh as dm
from dualmesh._support.ports import free_port
from dualmesh.errors import (
    ArgumentError,
    BackendError,
    GroupTimeoutError,
    RankError,
    SessionError,
    StaleStateError,
)
from dualmesh.weights.group import MemberPlace, _current
from dualmesh.weights.key import find_key
from dualmesh.weights.store import StoreClient, address_of


@pytest.fixture
def store():
    with dm.TransferStore() as served:
        yield f"tcp://localhost:{served.port}"


def join(store, rank, size, **others):
    return dm.transfer_group(
        "weights", rank=rank, size=size, store=store, backend="sim", **{"timeout_s": 20.0, **others}
    )


def joined(store, *ranks, size=None, **others):
    """Join as several processes would, at once; return each one's group or error."""
    size = len(ranks) if size is None else size

    def one(rank):
        try:
            return join(store, rank, size, **others)
        except dm.DualmeshError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(one, ranks))


def close(*groups):
    for group in groups:
        group.close()


def when_stale(group, *parts):
    """Return what a group says once it is stale and says all parts."""
    deadline, said = time.monotonic() + 10, "live"
    while time.monotonic() < deadline:
        try:
            group.require_live("send")
        except StaleStateError as error:
            said = str(error)
            if all(part in said for part in parts):
                return said
        time.sleep(0.01)
    raise AssertionError(said)


def test_ranks_in_any_order_join_one_generation_and_hear_what_each_said(store):
    with ThreadPoolExecutor(3) as threads:
        first = [threads.submit(join, store, rank, 3, said={"rank": rank}) for rank in (2, 0, 1)]
        groups = [one.result() for one in first]
    assert [1, 1, 1] == [group.generation for group in groups]
    for group in groups:
        assert [{"rank": rank} for rank in range(3)] == group.told
        assert ["localhost"] * 3 == group.hosts
        group.require_live("send")
    close(*groups)


def test_the_next_generation_takes_the_old_ones_place(store):
    old = joined(store, 0, 1)
    new = joined(store, 0, 1)
    assert [2, 2] == [group.generation for group in new]
    for group in old:
        with pytest.raises(StaleStateError, match=r"generation 1: it was replaced.*Call dm.transfer_group\('weights'"):
            group.require_live("send")
        with pytest.raises(StaleStateError):
            group.process_group  # noqa: B018
    close(*old)
    for group in new:
        group.require_live("send")
    close(*new)


def test_a_rank_that_left_or_waits_for_the_next_generation_is_named(store):
    staying, leaving = joined(store, 0, 1)
    leaving.close()
    assert when_stale(staying, "rank 1 left").startswith("send: TransferGroup 'weights', rank 0, generation 1: rank 1")
    with ThreadPoolExecutor(1) as threads:
        restarted = threads.submit(join, store, 1, 2)
        when_stale(staying, "rank 1 left, and rank 1 waits for the next generation")
        again = join(store, 0, 2)
        assert (2, 2) == (again.generation, restarted.result().generation)
    close(again, restarted.result())


def test_who_does_not_come_is_named_and_the_place_is_free_again(store):
    for error in joined(store, 1, 3, size=4, timeout_s=0.3):
        assert isinstance(error, GroupTimeoutError)
        assert "rank 0, rank 2 did not come within 0.3 s" in str(error)
    groups = joined(store, 0, 1, 2, 3)
    assert [1] * 4 == [group.generation for group in groups]
    close(*groups)


def door(store):
    return StoreClient(*address_of("test", store), find_key("test", None), 10.0)


def test_who_dies_while_waiting_makes_room(store):
    dead = door(store)
    asked = {
        "what": "join",
        "name": "weights",
        "said": None,
        "timeout_s": 60.0,
        **MemberPlace("", 1, 2, ("",))._asdict(),
    }
    dead._channel.say(asked, 5.0)
    time.sleep(0.2)
    dead.close()
    groups = joined(store, 0, 1)
    assert [1, 1] == [group.generation for group in groups]
    close(*groups)


def test_a_rank_taken_twice_and_sizes_that_differ_are_refused(store):
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(join, store, 0, 2)
        other_process = door(store)
        while other_process.ask("look", "weights")["waiting"] != "rank 0":
            time.sleep(0.01)
        answer = other_process.ask("join", "weights", 1.0, **MemberPlace("", 0, 2, ("",))._asdict(), said=None)
        assert answer["problem"] == "rank 0 is taken by another process, which waits now."
        other_process.close()
        for refused in (str(joined(store, 1, size=3)[0]), str(waiting.exception())):
            assert "rank 1 said 3 ranks, those that wait (rank 0) said 2" in refused
    close(*joined(store, 0, 1))


def test_a_process_that_asks_twice_waits_once(store):
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(join, store, 0, 2)
        while not _current:
            time.sleep(0.01)
        second = threads.submit(join, store, 0, 2)
        assert isinstance(first.exception(), StaleStateError)
        groups = [join(store, 1, 2), second.result()]
        for group in groups:
            group.require_live("send")
        close(*groups)


def test_rank_zero_serves_until_its_last_group_closes():
    port = free_port()
    address = f"tcp://localhost:{port}"
    groups = joined(address, 0, 1)
    again = joined(address, 0, 1)
    assert [2, 2] == [group.generation for group in again]
    close(*groups, *again)
    with pytest.raises(SessionError, match=rf"nobody serves at localhost:{port}.*Transfer rank 0 does"):
        join(address, 1, 2, timeout_s=0.2)


def test_a_store_that_restarts_with_rank_zero_takes_those_that_wait():
    port = free_port()
    address = f"tcp://localhost:{port}"
    first = dm.TransferStore(port)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(join, address, 1, 2)
        time.sleep(0.3)
        first.close()
        group = join(address, 0, 2)
        other = waiting.result()
        assert (1, 1) == (group.generation, other.generation)
    group.close()
    when_stale(other, "it lost its store")
    other.close()


def test_groups_of_other_names_are_other_groups(store):
    one = join(store, 0, 1)
    other = dm.transfer_group("others", rank=0, size=1, store=store, backend="sim")
    assert (1, 1) == (one.generation, other.generation)
    close(one, other)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"rank": 2}, RankError, "rank 2 is none of its ranks. Ranks: 0..1"),
        ({"rank": True}, RankError, "rank True"),
        ({"size": 0}, ArgumentError, "size is 0|size=0"),
        ({"store": "tcp://localhost"}, ArgumentError, "Give 'tcp://host:port'"),
        ({"store": 29500}, ArgumentError, "store=29500"),
        ({"name": ""}, ArgumentError, "name=''"),
        ({"timeout_s": 0}, ArgumentError, "is no time"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_opened(change, error, match):
    given = {"name": "weights", "rank": 0, "size": 2, "store": "tcp://localhost:1", "backend": "sim", **change}
    before = threading.active_count()
    with pytest.raises(error, match=match):
        dm.transfer_group(given.pop("name"), **given)
    assert before == threading.active_count()


def test_a_backend_without_groups_of_processes_says_so(store):
    with join(store, 0, 1) as group:
        assert not group.has_process_group
        with pytest.raises(BackendError, match=r"of the backends sim\. torch makes one where all are torch"):
            group.process_group  # noqa: B018
