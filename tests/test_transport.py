"""One suite over both transports: what p3/transport/interface.py promises."""

from __future__ import annotations

import threading
import time
from typing import Any, Callable, Iterator, List

import pytest

from p3.errors import UsageError
from p3.transport import Channel, Message
from p3.transport.curve import derive
from p3.transport.inproc import InprocNetwork, InprocPort
from p3.transport.zmq_port import ZmqPort

DEADLINE_S = 30.0
LOCAL = "127.0.0.1"


@pytest.fixture(params=["inproc", "zmq", "zmq-encrypted"])
def new_port(request: Any) -> Iterator[Callable[[], Any]]:
    """A factory of ports that can reach each other."""
    network, keys = InprocNetwork(), derive(b"a secret")
    ports: List[Any] = []

    def make() -> Any:
        if request.param == "inproc":
            port: Any = InprocPort(network)
        else:
            port = ZmqPort(keys, encrypt=request.param.endswith("encrypted"))
        ports.append(port)
        return port

    yield make
    for port in ports:
        port.close()


def receive(port: Any, count: int) -> List[Message]:
    """The next ``count`` messages of ``port``."""
    messages: List[Message] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(messages) < count:
        assert time.monotonic() < deadline, f"only {len(messages)} of {count} messages came"
        messages += port.recv(0.1)
    return messages


def pair(new_port: Callable[[], Any], channel: Channel = Channel.DATA) -> Any:
    """A listener that knows its client as b'worker', and the client."""
    server, client = new_port(), new_port()
    server.admit(b"token", b"worker")
    client.connect(channel, b"server", server.listen(channel, LOCAL), b"token")
    return server, client


@pytest.mark.parametrize("channel", list(Channel))
def test_request_and_answer(new_port: Callable[[], Any], channel: Channel) -> None:
    server, client = pair(new_port, channel)
    assert client.send(channel, b"server", [b"head", b"", b"body"])
    (message,) = receive(server, 1)
    assert message.channel is channel
    assert message.peer == (b"token" if channel is Channel.CONTROL else b"worker")
    assert [bytes(frame) for frame in message.frames] == [b"head", b"", b"body"]
    assert server.send(channel, message.peer, [b"answer"])
    (answer,) = receive(client, 1)
    assert (answer.channel, answer.peer) == (channel, b"server")
    assert [bytes(frame) for frame in answer.frames] == [b"answer"]


def test_messages_arrive_whole_in_order_and_once(new_port: Callable[[], Any]) -> None:
    server, client = pair(new_port)
    sizes = [0, 1, 7, 65535, 65536, 65537, 300_000]
    count = 500
    for number in range(count):
        body = bytes([number % 251]) * sizes[number % len(sizes)]
        assert client.send(Channel.DATA, b"server", [b"%d" % number, body], copy=False)
    for number, message in enumerate(receive(server, count)):
        assert bytes(message.frames[0]) == b"%d" % number
        body = bytes([number % 251]) * sizes[number % len(sizes)]
        assert bytes(message.frames[1]) == body


def test_a_copied_frame_is_safe_to_overwrite(new_port: Callable[[], Any]) -> None:
    server, client = pair(new_port)
    memory = bytearray(b"first" * 20_000)
    client.send(Channel.DATA, b"server", [memory], copy=True)
    memory[:] = b"after" * 20_000
    assert bytes(receive(server, 1)[0].frames[0]) == b"first" * 20_000


def test_strangers_are_dropped_and_counted(new_port: Callable[[], Any]) -> None:
    server, client = pair(new_port)
    stranger = new_port()
    address = server.listen(Channel.CREDIT, LOCAL)
    stranger.connect(Channel.CREDIT, b"server", address, b"guess")
    client.connect(Channel.CREDIT, b"server", address, b"token")
    stranger.send(Channel.CREDIT, b"server", [b"stop"])
    deadline = time.monotonic() + DEADLINE_S
    while server.dropped == 0:
        assert time.monotonic() < deadline
        assert server.recv(0.05) == []
    client.send(Channel.CREDIT, b"server", [b"mine"])
    assert receive(server, 1)[0].peer == b"worker"
    assert not server.send(Channel.CREDIT, b"guess", [b"hello"])


def test_sending_to_nobody_is_false(new_port: Callable[[], Any]) -> None:
    server, _ = pair(new_port)
    assert not server.send(Channel.DATA, b"worker", [b"not connected yet"])
    assert not server.send(Channel.DATA, b"nobody", [b"unknown"])


def test_a_listener_that_comes_up_later_is_found(new_port: Callable[[], Any]) -> None:
    first, client, later = new_port(), new_port(), new_port()
    address = first.listen(Channel.CONTROL, LOCAL)
    first.close()
    client.connect(Channel.CONTROL, b"scheduler", address, b"me")
    client.send(Channel.CONTROL, b"scheduler", [b"hello"])
    assert client.recv(0.01) == []
    later.listen(Channel.CONTROL, LOCAL, int(address.rsplit(":", 1)[1].strip("/")))
    arrived: List[Message] = []
    deadline = time.monotonic() + DEADLINE_S
    while not arrived:
        assert time.monotonic() < deadline
        client.recv(0.01)
        arrived = later.recv(0.01)
    assert [bytes(frame) for frame in arrived[0].frames] == [b"hello"]


def test_a_taken_port_is_refused_with_its_address(new_port: Callable[[], Any]) -> None:
    first, second = new_port(), new_port()
    address = first.listen(Channel.CONTROL, LOCAL)
    number = int(address.rsplit(":", 1)[1].strip("/"))
    with pytest.raises(UsageError, match=str(number)):
        second.listen(Channel.CONTROL, LOCAL, number)


def test_wake_from_another_thread_ends_recv(new_port: Callable[[], Any]) -> None:
    port = new_port()
    port.listen(Channel.DATA, LOCAL)
    thread = threading.Thread(target=port.wake)
    thread.start()
    assert port.recv(DEADLINE_S) == []
    thread.join()


def test_a_wake_before_recv_is_not_lost(new_port: Callable[[], Any]) -> None:
    port = new_port()
    for _ in range(3):
        port.wake()
        port.wake()
        start = time.monotonic()
        assert port.recv(DEADLINE_S) == []
        assert time.monotonic() - start < DEADLINE_S / 2


def test_no_wake_is_lost_among_many(new_port: Callable[[], Any]) -> None:
    port, rounds = new_port(), 2000
    asked, seen = [0], threading.Semaphore(0)

    def ask() -> None:
        for _ in range(rounds):
            asked[0] += 1
            port.wake()
            assert seen.acquire(timeout=DEADLINE_S)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    noise = threading.Thread(target=lambda: [port.wake() for _ in range(20_000)])
    noise.start()
    answered, deadline = 0, time.monotonic() + DEADLINE_S
    while answered < rounds:
        port.recv(DEADLINE_S)
        assert time.monotonic() < deadline
        while answered < asked[0]:
            answered += 1
            seen.release()
    thread.join(DEADLINE_S)
    noise.join(DEADLINE_S)


@pytest.mark.parametrize("secret", [b"another secret", None])
def test_control_needs_the_secret(secret: Any) -> None:
    server, stranger, friend = (ZmqPort(derive(s)) for s in (b"ours", secret, b"ours"))
    try:
        address = server.listen(Channel.CONTROL, LOCAL)
        stranger.connect(Channel.CONTROL, b"scheduler", address, b"stranger")
        friend.connect(Channel.CONTROL, b"scheduler", address, b"friend")
        stranger.send(Channel.CONTROL, b"scheduler", [b"register"])
        friend.send(Channel.CONTROL, b"scheduler", [b"register"])
        assert receive(server, 1)[0].peer == b"friend"
        assert server.recv(0.3) == []
    finally:
        for port in (server, stranger, friend):
            port.close()


def test_keys_follow_the_secret_and_hide_it() -> None:
    assert derive(b"a") == derive(b"a") != derive(b"b")
    assert len({*derive(b"a")}) == 4
    assert b"a secret" not in b"".join(derive(b"a secret"))
