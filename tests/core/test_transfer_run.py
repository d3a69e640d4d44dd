"""Plans carried out by threads over queues: values, bounds on memory, checksums; nobody waits in a circle."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import dualmesh as dm
from dualmesh.errors import ChecksumError
from dualmesh.weights.executor import HostBlocks, Wire, carry, message_bytes
from dualmesh.weights.plan import plan_transfer
from tests.core.test_transfer_plan import DP, TP, blocks_of, topology

P = dm.P
PATIENCE_S = 20.0


class QueueWire(Wire):
    """Hands over when both ends are there: nothing is buffered, so a circle would be seen."""

    def __init__(self, spoil=None):
        self._doors, self._lock, self.spoil = {}, threading.Lock(), spoil

    def _door(self, message):
        with self._lock:
            pair = message.sender, message.receiver
            return self._doors.setdefault(pair, (queue.Queue(), queue.Queue()))

    def send(self, message, buffer):
        def wait():
            there, done = self._door(message)
            there.put(buffer, timeout=PATIENCE_S)
            done.get(timeout=PATIENCE_S)

        return wait

    def receive(self, message, buffer):
        def wait():
            there, done = self._door(message)
            buffer[:] = there.get(timeout=PATIENCE_S)
            if self.spoil == message.order:
                buffer[0] ^= 1
            done.put(None)

        return wait


def carried(src, dst, arrays, buffer_bytes, *, checksum=False, spoil=None):
    """Carry out a transfer, one thread per rank; return what arrived, what was expected, the plan and the traffic."""
    known = {path: (x.shape, x.dtype.itemsize) for path, x in arrays.items()}
    plan = plan_transfer(known, src=src, dst=dst, message_bytes=message_bytes(buffer_bytes))
    given, expected = blocks_of(src, arrays), blocks_of(dst, arrays)
    taken = {rank: {path: np.zeros_like(x) for path, x in own.items()} for rank, own in expected.items()}
    wire = QueueWire(spoil(plan) if spoil else None)

    def one(rank):
        blocks = HostBlocks(given, taken)
        return carry(plan, [rank], wire, blocks, buffer_bytes=buffer_bytes, checksum=checksum)

    with ThreadPoolExecutor(len(plan.members)) as threads:
        futures = {rank: threads.submit(one, rank) for rank in plan.members}
    return taken, expected, plan, futures


def trees(seed=0):
    draw = np.random.default_rng(seed)
    shapes = {"a": (8, 12), "b": (24,), "c": (16, 4, 2), "d": (), "e": (0, 8)}
    arrays = {path: draw.normal(size=shape).astype("float32") for path, shape in shapes.items()}
    return {**arrays, "half": draw.normal(size=(8, 8)).astype("float16"), "flags": draw.integers(0, 2, (8,)) > 0}


def specs_for(first, second=None):
    return {
        "a": P(first, second),
        "b": P(first),
        "c": P(None, first),
        "d": P(),
        "e": P(None, first),
        "half": P((first, second) if second else first),
        "flags": P(first),
    }


ENDS = {
    "the same ranks": ((TP, specs_for("tp"), range(4)), (DP, specs_for("tp", "dp"), range(4))),
    "some ranks, out of order": ((TP, specs_for("tp"), (3, 5, 0, 1)), (DP, specs_for("dp", "tp"), (1, 0, 7, 2))),
    "other ranks": ((DP, specs_for("dp"), range(4)), (TP, specs_for("tp"), range(4, 8))),
    "to one rank": ((TP, specs_for("tp"), range(4)), (topology({"x": 1}), specs_for("x"), (9,))),
    "from one rank": ((topology({"x": 1}), specs_for("x"), (9,)), (DP, specs_for("dp", "tp"), range(4))),
}


@pytest.mark.parametrize("buffer_bytes", [64, 400, 1 << 20])
@pytest.mark.parametrize("ends", ENDS)
def test_every_byte_arrives_within_the_bound_on_memory(ends, buffer_bytes):
    source, target = ENDS[ends]
    taken, expected, plan, futures = carried(source, target, trees(), buffer_bytes, checksum=buffer_bytes == 400)
    for rank, future in futures.items():
        traffic = future.result()
        assert traffic.received == plan.bytes_received(rank)
        assert traffic.sent == plan.bytes_sent(rank)
        assert traffic.peak <= buffer_bytes
        for path, x in expected.get(rank, {}).items():
            np.testing.assert_array_equal(taken[rank][path], x, err_msg=f"{rank} {path}")


def test_a_changed_byte_is_named_and_the_rest_arrives():
    source, target = ENDS["other ranks"]

    def spoil(plan):
        return plan.receives(5)[1].order

    taken, expected, plan, futures = carried(source, target, trees(), 400, checksum=True, spoil=spoil)
    wrong = plan.receives(5)[1]
    with pytest.raises(ChecksumError, match=rf"1 messages .* from rank {wrong.sender} to rank 5 with parts of"):
        futures[5].result()
    for rank in (4, 6, 7):
        futures[rank].result()
        for path, x in expected[rank].items():
            np.testing.assert_array_equal(taken[rank][path], x)
