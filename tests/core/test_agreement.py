import threading
import time

import pytest

from dualmesh.errors import AgreementError, GroupTimeoutError, LostPeerError
from dualmesh.runtime.agreement import ROUND_KEYS, Matter, agree, leave, roll_call


class MemoryStore:
    """A store between threads, counting what it is asked."""

    def __init__(self):
        self.values, self.counters, self.moved = {}, {}, threading.Condition()
        self.writes = self.waits = 0

    def add(self, key, amount):
        with self.moved:
            self.writes += amount != 0
            self.counters[key] = self.counters.get(key, 0) + amount
            return self.counters[key]

    def set(self, key, value):
        self.settle(key, value)

    def find(self, key):
        return self.values.get(key)

    def settle(self, key, value):
        with self.moved:
            found = self.values.setdefault(key, value)
            self.moved.notify_all()
            return found

    def forget(self, round_):
        with self.moved:
            for key in ROUND_KEYS:
                self.values.pop(f"{round_}/{key}", None)
                self.counters.pop(f"{round_}/{key}", None)

    def wait(self, key, timeout_s, waiting):
        self.waits += 1
        with self.moved:
            return self.moved.wait_for(lambda: key in self.values, timeout_s)


def outcomes(store, said, ranks=None, delays=None, timeout_s=1.0, **settings):
    """Return what each rank that says something got: None or its error."""
    found = {}

    def come(rank):
        time.sleep((delays or {}).get(rank, 0))
        try:
            agree(store, Matter("build", ranks or tuple(said), rank, said[rank], **settings), timeout_s)
        except (AgreementError, GroupTimeoutError, LostPeerError) as error:
            found[rank] = error
        else:
            found[rank] = None

    threads = [threading.Thread(target=come, args=(rank,)) for rank in said]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def test_equal_words_agree_round_after_round():
    store = MemoryStore()
    for round_ in range(3):
        assert outcomes(store, {rank: f"x{round_}" for rank in range(5)}) == dict.fromkeys(range(5))


def test_agreement_costs_one_wait_per_rank_but_the_last():
    store = MemoryStore()
    outcomes(store, dict.fromkeys(range(8), "x"))
    assert store.waits == 7
    assert store.writes == 8 + 2


def test_rounds_after_the_first_cost_no_more_and_leave_no_keys_behind():
    store = MemoryStore()
    for round_ in range(20):
        outcomes(store, dict.fromkeys(range(8), f"x{round_}"))
    assert store.waits == 20 * 7
    assert store.writes == 20 * (8 + 2)
    kept = {key.rsplit("/", 1)[-1] for key in (*store.values, *store.counters)}
    assert kept <= {*ROUND_KEYS, "round"}
    assert len(store.values) + len(store.counters) <= 4


@pytest.mark.parametrize("is_early", [True, False])
def test_a_rank_that_left_before_or_while_others_wait_is_named_long_before_the_time_is_over(is_early):
    store = MemoryStore()
    leaving = threading.Timer(0.0 if is_early else 0.4, leave, (store, 2))
    leaving.start()
    if is_early:
        leaving.join()
    found = outcomes(store, dict.fromkeys((0, 1), "x"), ranks=(0, 1, 2, 3), timeout_s=15.0)
    leaving.join()
    for error in found.values():
        assert isinstance(error, LostPeerError)
        assert (error.left, error.missing) == ((2,), (2, 3))
        assert "rank 2 left the session and will not come, of 4 ranks" in str(error)
    assert outcomes(store, dict.fromkeys((0, 1), "x")) == dict.fromkeys((0, 1)), "the others go on"


def test_what_may_differ_is_told_only_where_ranks_do_not_agree():
    store = MemoryStore()
    found = {}

    def come(rank, said):
        try:
            agree(store, Matter("sum", (0, 1), rank, said, beside=f", at line {rank}", is_traced=True), 1.0)
        except AgreementError as error:
            found[rank] = error

    for said in ({0: "x", 1: "x"}, {0: "x", 1: "y"}):
        threads = [threading.Thread(target=come, args=one) for one in said.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert set(found) == (set() if said[1] == "x" else {0, 1})
    for error in found.values():
        assert "rank 0: x, at line 0" in str(error)
        assert "rank 1: y, at line 1" in str(error)


def test_matters_of_the_same_ranks_do_not_mix_and_each_says_where_the_other_rank_is():
    store, found = MemoryStore(), {}

    def come(rank, topic):
        settings = {"beside": f", at line {rank}", "topic": topic, "is_traced": True, "undone": "Nothing was sent."}
        try:
            agree(store, Matter("sum", (0, 1), rank, "x", **settings), 0.4)
        except GroupTimeoutError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=come, args=one) for one in ((0, "/tp"), (1, "/dp"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    for rank in (0, 1):
        assert f"rank {1 - rank} did not come within 0.4 s, of 2 ranks" in found[rank]
        assert f"rank {1 - rank} came last to sum: x, at line {1 - rank}" in found[rank]
        assert "Nothing was sent" in found[rank]


def test_a_roll_call_gives_the_words_of_those_who_come():
    store = MemoryStore()
    assert roll_call(store, "t", (0, 1, 2), 0, "zero", 0.1) == {0: "zero"}
    assert roll_call(store, "t", (0, 1, 2), 2, "two", 0.1) == {0: "zero", 2: "two"}


def test_different_words_are_an_error_on_every_rank_naming_all():
    found = outcomes(MemoryStore(), {0: "dp=4", 3: "dp=4", 5: "dp=2", 7: "dp=4"})
    for error in found.values():
        assert isinstance(error, AgreementError)
        assert error.opinions == {"dp=4": (0, 3, 7), "dp=2": (5,)}
        assert "ranks 0, 3, 7: dp=4" in str(error)
        assert "rank 5: dp=2" in str(error)


def test_missing_ranks_are_named_in_time_on_every_rank_that_came():
    start = time.monotonic()
    found = outcomes(MemoryStore(), {0: "x", 2: "x"}, ranks=(0, 1, 2, 3), timeout_s=0.5)
    assert time.monotonic() - start < 3
    for error in found.values():
        assert isinstance(error, GroupTimeoutError)
        assert error.missing == (1, 3)
        assert "ranks 1, 3 did not come within 0.5 s, of 4 ranks" in str(error)


def test_a_rank_that_comes_after_the_others_gave_up_is_not_left_alone_with_a_yes():
    store = MemoryStore()
    found = outcomes(store, dict.fromkeys(range(3), "x"), delays={2: 1.2}, timeout_s=0.4)
    assert all(isinstance(error, GroupTimeoutError) for error in found.values())
    assert outcomes(store, dict.fromkeys(range(3), "y")) == dict.fromkeys(range(3))


def test_after_a_disagreement_a_corrected_call_works():
    store = MemoryStore()
    assert all(outcomes(store, {0: "x", 1: "y"}).values())
    assert outcomes(store, {0: "y", 1: "y"}) == {0: None, 1: None}


def test_sets_of_ranks_agree_apart():
    store = MemoryStore()
    assert all(outcomes(store, {0: "x"}, ranks=(0, 1), timeout_s=0.1).values())
    assert outcomes(store, {0: "x", 2: "x"}) == {0: None, 2: None}


def test_one_rank_asks_nobody():
    store = MemoryStore()
    agree(store, Matter("build", (4,), 4, "x"), 0.1)
    assert store.waits == store.writes == 0


@pytest.mark.parametrize("count", [2, 100, 65_000])
def test_the_sum_of_all_fingerprints_fits_a_counter(count):
    from dualmesh.runtime.agreement import _COUNT_BITS, _fingerprint

    highest = max(_fingerprint(str(i), count) for i in range(200))
    assert ((highest << _COUNT_BITS) + 1) * count < 2**63
    assert highest.bit_length() > 24
