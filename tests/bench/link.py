"""Bytes over the connection of a weight link, beside a raw socket and gloo's send and receive of the same bytes.

`python -m tests.bench.link`: two processes of this machine, 256 MiB in messages of 16 MiB, the best of several runs.
"""

import socket
import time

from dualmesh._support.ports import free_port
from dualmesh.testing.pools import Pool
from tests.bench.timing import table

TOTAL, MESSAGE, TIMES = 256 << 20, 16 << 20, 7
COUNT = TOTAL // MESSAGE


def _timed(receiver, way):
    """Return the seconds that each of some rounds took at the receiver."""
    found = []
    for _ in range(TIMES):
        start = time.perf_counter()
        way()
        found.append(time.perf_counter() - start)
    return found if receiver else []


def over_channel(receiver, port):
    """Send as links do."""
    from dualmesh._support.channel import Listener, visit

    buffer = bytearray(MESSAGE)
    if not receiver:
        return _visited(lambda: visit("localhost", port, b"k", 30), lambda channel: _sent(channel, buffer))
    found = []

    def attend(channel, _):
        def way():
            for _ in range(COUNT):
                channel.receive(buffer, 60)
            channel.say("next", 60)

        found.extend(_timed(True, way))
        return False

    listener = Listener("localhost", port, b"k", attend)
    while len(found) < TIMES:
        time.sleep(0.01)
    listener.close()
    return found


def _visited(visit, work):
    deadline = time.monotonic() + 30
    while True:
        try:
            channel = visit()
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    work(channel)
    channel.close()
    return []


def _sent(channel, buffer):
    for _ in range(TIMES):
        for _ in range(COUNT):
            channel.send(buffer, 60)
        channel.hear(60)


def over_socket(receiver, port):
    """Send by hand."""
    buffer = bytearray(MESSAGE)
    view = memoryview(buffer)
    if not receiver:

        def work(peer):
            for _ in range(TIMES):
                for _ in range(COUNT):
                    peer.sendall(buffer)
                peer.recv(1)

        return _visited(lambda: socket.create_connection(("localhost", port)), work)
    with socket.create_server(("localhost", port)) as server, server.accept()[0] as peer:

        def way():
            for _ in range(COUNT):
                done = 0
                while done < MESSAGE:
                    done += peer.recv_into(view[done:])
            peer.sendall(b".")

        return _timed(True, way)


def over_gloo(receiver, port):
    """Send by torch's collectives library."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(receiver), world_size=2)
    buffer, word = torch.zeros(MESSAGE, dtype=torch.uint8), torch.zeros(1)

    def way():
        for _ in range(COUNT):
            dist.recv(buffer, 0) if receiver else dist.send(buffer, 1)
        dist.send(word, 0) if receiver else dist.recv(word, 1)

    found = _timed(receiver, way)
    dist.destroy_process_group()
    return found


def main():
    """Run the three ways in turn, and say how fast each was."""
    pool, best = Pool({}), {}
    try:
        for way in (over_socket, over_channel, over_gloo, over_socket, over_channel, over_gloo):
            port = free_port()
            (_, seconds) = pool.run(way, [(False, port), (True, port)], timeout_s=300.0)
            best[way.__name__] = min([*seconds[1:], best.get(way.__name__, float("inf"))])
    finally:
        pool.close()
    title = f"a link's connection, {TOTAL >> 20} MiB in messages of {MESSAGE >> 20} MiB"
    table(title, best, {"over_channel": min(("over_socket", "over_gloo"), key=best.__getitem__)})


if __name__ == "__main__":
    main()
