"""Who may connect to stores and links: strangers, garbage, idlers and replays disturb nobody, and every wait ends."""

import contextlib
import os
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import dualmesh as dm
from dualmesh._support.channel import HELLO, Channel, ForeignError, Listener, route_to, visit
from dualmesh.errors import ArgumentError, SessionError
from dualmesh.weights.group import MemberPlace
from dualmesh.weights.key import VARIABLE, find_key
from dualmesh.weights.store import StoreClient

KEY = find_key("test", "of the test")


def joined(store, size=2, key="of the test", timeout_s=20.0):
    """Join as several processes would; return the generation that each is in."""
    address = f"tcp://localhost:{store.port}"

    def one(rank):
        arguments = {"rank": rank, "size": size, "store": address, "backend": "sim", "key": key}
        with dm.transfer_group("weights", timeout_s=timeout_s, **arguments) as group:
            group.require_live("test")
            both.wait(20)
            return group.generation

    both = threading.Barrier(size)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(one, range(size)))


@pytest.fixture
def store():
    with dm.TransferStore(key="of the test") as served:
        yield served


def call(store):
    return socket.create_connection(("localhost", store.port), timeout=10)


def framed(payload):
    return len(payload).to_bytes(4, "big") + payload


STRANGERS = {
    "closes at once": b"",
    "speaks HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "speaks TLS": bytes([22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3]) + bytes(512),
    "announces two gibibytes": b"\x7f\xff\xff\xff" + b"x" * 1000,
    "announces more than that": b"\xff\xff\xff\xff" + b"\x7f" * 8 + b"x" * 1000,
    "has another version": framed(b"dualmesh 0"),
    "says hello, then plain data": framed(HELLO) + framed(b'{"what": "join"}'),
    "speaks the language of before": b'{"what": "join", "name": "weights", "said": null, "timeout_s": 60}\n',
}


@pytest.mark.parametrize("says", STRANGERS.values(), ids=STRANGERS)
def test_strangers_are_dropped_and_the_group_forms_beside_them(store, says):
    with contextlib.ExitStack() as calls:
        for _ in range(5):
            stranger = calls.enter_context(call(store))
            with contextlib.suppress(OSError):
                stranger.sendall(says)
        assert joined(store) == [1, 1]


def test_visitors_that_say_nothing_or_a_byte_now_and_then_hold_nobody_up(store):
    with contextlib.ExitStack() as calls:
        idle = [calls.enter_context(call(store)) for _ in range(50)]
        for number, one in enumerate(idle):
            one.sendall(framed(HELLO)[: number % 12])
        start = time.monotonic()
        assert joined(store) == [1, 1]
        assert time.monotonic() - start < 4.0, "idlers have five seconds each, and nobody waits for them"


def test_who_does_not_know_the_key_is_refused_at_once_and_by_name(store):
    with pytest.raises(SessionError, match=rf"localhost:{store.port} is not this group's store: .*key.*{VARIABLE}"):
        joined(store, size=1, key="another")
    assert joined(store) == [1, 1]


def test_a_recorded_greeting_is_worth_nothing(store):
    """A relay records what a process says that knows the key; said again, word for word, nothing is answered."""
    said, relay = [], socket.create_server(("localhost", 0))

    def pass_on(source, sink, heard):
        with contextlib.suppress(OSError):
            while part := source.recv(4096):
                heard.append(part)
                sink.sendall(part)

    def serve():
        visitor, _ = relay.accept()
        server = call(store)
        threads = [threading.Thread(target=pass_on, args=(visitor, server, said))]
        threads += [threading.Thread(target=pass_on, args=(server, visitor, []))]
        for thread in threads:
            thread.start()
        threads[0].join()
        for one in (server, visitor):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        threads[1].join()
        server.close()
        visitor.close()

    relaying = threading.Thread(target=serve)
    relaying.start()
    door = StoreClient(*relay.getsockname()[:2], KEY, 10.0)
    place = MemberPlace("", 0, 1, ("",))._asdict()
    assert door.ask("join", "weights", 5.0, said=None, **place)["generation"] == 1
    door.close()
    relaying.join()
    relay.close()
    with call(store) as again:
        again.sendall(b"".join(said))
        heard = b""
        with contextlib.suppress(OSError):
            while part := again.recv(4096):
                heard += part
    assert b"generation" not in heard
    door = StoreClient("localhost", store.port, KEY, 10.0)
    assert door.ask("look", "weights")["generation"] == 1
    door.close()


def test_one_end_cannot_prove_itself_with_what_the_other_end_proves(store):
    """A stranger that sends the listener's challenge back, on a second connection, learns no answer to it."""
    with call(store) as first, call(store) as second:
        for one in (first, second):
            one.sendall(framed(HELLO))
        length = int.from_bytes(first.recv(4, socket.MSG_WAITALL), "big")
        challenge = first.recv(length, socket.MSG_WAITALL)
        second.recv(4 + length, socket.MSG_WAITALL)
        second.sendall(framed(challenge))
        answer = second.recv(4096)
        assert b"FAILURE" in answer


BAD = {
    "no mapping": [1, 2],
    "text": "join",
    "another request": {"what": "leave", "name": "weights"},
    "a name that is a list": {"what": "join", "name": ["weights"]},
    "no name": {"what": "join", "name": ""},
    "a long name": {"what": "look", "name": "x" * 5000},
    "a total beyond all bounds": {"total": 10**30},
    "a place beyond its total": {"place": 7},
    "a place below 0": {"place": -1},
    "a place that is true": {"place": True},
    "a total that is a text": {"total": "2"},
    "sides that are a text": {"sides": "ab"},
    "sides of lists": {"sides": [["a"]]},
    "a side of its own": {"side": "third"},
    "a timeout that never ends": {"timeout_s": float("inf")},
    "a timeout that is no number": {"timeout_s": "soon"},
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_malformed_request_is_refused_whole_and_poisons_nothing(store, bad):
    """Also from who knows the key: it may be of another version."""
    good = {"what": "join", "name": "weights", "said": None, "timeout_s": 1.0, **MemberPlace("", 0, 2, ("",))._asdict()}
    channel = visit("localhost", store.port, KEY, 10.0)
    channel.say({**good, **bad} if isinstance(bad, dict) else bad, 5.0)
    assert channel.hear(5.0)["problem"].startswith("The store refused it: ")
    channel.close()
    assert joined(store) == [1, 1]


@pytest.mark.parametrize(
    "says", [b"[" * 100_000, b"\xff\xfe", b"{", b'"' + b"x" * 100], ids=["deep", "bytes", "half", "open"]
)
def test_what_is_no_plain_data_ends_its_own_connection_only(store, says):
    channel = visit("localhost", store.port, KEY, 10.0)
    channel._connection.send_bytes(says)
    with pytest.raises(ConnectionError):
        channel.hear(10.0)
    channel.close()
    assert joined(store) == [1, 1]


def closing(visitor):
    visitor.close()


def trickling(visitor):
    with contextlib.suppress(OSError):
        while True:
            visitor.sendall(b"\0")
            time.sleep(0.05)


def endless(visitor):
    with contextlib.suppress(OSError):
        while True:
            visitor.sendall(b"x" * 65536)


def silent(visitor):
    with contextlib.suppress(OSError):
        visitor.recv(1 << 20)
        visitor.recv(1)


def http(visitor):
    with contextlib.suppress(OSError):
        visitor.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
        visitor.recv(1 << 16)
    visitor.close()


@pytest.mark.parametrize("behave", [closing, trickling, endless, silent, http])
def test_the_timeout_is_a_deadline_whatever_listens_at_the_address(behave):
    with socket.create_server(("localhost", 0)) as server:
        visitors = []

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    visitors.append(server.accept()[0])
                    threading.Thread(target=behave, args=(visitors[-1],), daemon=True).start()

        serving = threading.Thread(target=serve)
        serving.start()
        start, port = time.monotonic(), server.getsockname()[1]
        with pytest.raises(SessionError, match=f"localhost:{port}"):
            dm.transfer_group("w", rank=1, size=2, store=f"tcp://localhost:{port}", timeout_s=1.0, backend="sim")
        assert time.monotonic() - start < 6.0
        server.shutdown(socket.SHUT_RDWR)
        for one in visitors:
            one.close()
        serving.join(10)


def test_a_store_listens_at_its_address_and_at_no_other(store):
    host = "127.0.0.2"  # the loopback has many addresses
    with pytest.raises(ConnectionError):
        socket.create_connection((host, store.port), timeout=2)
    with dm.TransferStore(host=host) as elsewhere:
        socket.create_connection((host, elsewhere.port), timeout=2).close()
        with pytest.raises(ConnectionError):
            socket.create_connection(("127.0.0.1", elsewhere.port), timeout=2)


def test_who_reaches_the_store_by_the_loopback_listens_there():
    assert route_to("localhost", 1) in ("127.0.0.1", "::1")


def test_descriptors_above_a_thousand_are_as_good_as_others(store):
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1400:
        pytest.skip(f"this process may have {soft} descriptors")
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1200)]
    try:
        assert joined(store) == [1, 1]
    finally:
        for one in held:
            os.close(one)


def test_the_key_is_the_argument_else_the_variable_else_a_file_of_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    with ThreadPoolExecutor(8) as threads:
        own = set(threads.map(lambda _: find_key("test", None), range(32)))
    assert len(own) == 1, "processes that come at once find the same key"
    (file,) = (tmp_path / "dualmesh").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    with pytest.raises(SessionError, match="can be read by others"):
        find_key("test", None)
    monkeypatch.setenv(VARIABLE, "shared")
    assert find_key("test", None) == find_key("test", "shared") != own.pop()
    for bad in ("", 7, ["x"]):
        with pytest.raises(ArgumentError, match="key is a"):
            find_key("test", bad)


def test_a_group_is_not_larger_than_a_store_can_hold(store):
    with pytest.raises(ArgumentError, match="at most 1048576 ranks"):
        dm.transfer_group("w", rank=0, size=10**30, store=f"tcp://localhost:{store.port}", backend="sim")


@pytest.mark.parametrize("bad", [-1, 1 << 16, "29500", None, 2.5, True])
def test_a_store_needs_a_port_that_is_one(bad):
    with pytest.raises(ArgumentError, match="port="):
        dm.TransferStore(bad)


def test_messages_are_bounded_and_arrays_pass_as_they_are():
    came = []

    def attend(channel, host):
        came.append(channel.hear(5.0))
        buffer = bytearray(1 << 20)
        channel.receive(buffer, 5.0)
        came.append(bytes(buffer))
        channel.say("thanks", 5.0)
        with pytest.raises(ForeignError):
            channel.hear(5.0, most_bytes=100)
        came.append("bounded")
        return False

    listener = Listener("localhost", 0, KEY, attend)
    channel: Channel = visit("localhost", listener.port, KEY, 5.0)
    sent = os.urandom(1 << 20)
    channel.say({"a": [1]}, 5.0)
    channel.send(sent, 5.0)
    assert channel.hear(5.0) == "thanks"
    channel.say("x" * 200, 5.0)
    with pytest.raises(ConnectionError):
        channel.hear(5.0)
    assert came == [{"a": [1]}, sent, "bounded"]
    channel.close()
    listener.close()
