"""Clients and the scheduler together, over both transports: failures, and what a client forbids."""

import os
import queue

import pytest
from control_job import DEADLINE_S, LOCAL, Node, register_by_hand, silence, wait_for

from p3.config import SCHEDULER, SERVER, WORKER, Settings
from p3.control import ControlClient, PeerFailed, Registration
from p3.errors import InternalError, PeerError, UsageError
from p3.scheduler.messages import decode, encode
from p3.transport import Channel

# ---- failures


def test_a_failing_worker_is_named_to_everybody(new_job):
    job = new_job().begin()
    first, second = job.workers
    silence(job.servers)
    waiting = first.client.ask("never answered", {})
    second.client.fail("ValueError: bad data")
    for node in (first, *job.servers):
        event = node.event(PeerFailed)
        assert event == PeerFailed(WORKER, 1, LOCAL, "ValueError: bad data")
    for future in (waiting, first.client.ask("too late", {})):
        with pytest.raises(PeerError, match=r"worker 1 .*: ValueError: bad data") as caught:
            future.result(DEADLINE_S)
        assert (caught.value.role, caught.value.rank) == (WORKER, 1)
    with pytest.raises(PeerError, match="bad data"):
        first.client.barrier()
    with pytest.raises(PeerError, match="bad data"):
        first.client.goodbye(DEADLINE_S)
    assert second.events.empty()
    assert job.exit_code() == 1
    assert "worker 1" in job.lines[0]


def test_failing_ends_ones_own_waits(new_job):
    job = new_job().begin()
    silence(job.servers)
    client = job.workers[0].client
    waiting = client.ask("never answered", {})
    client.fail("I am out of memory")
    client.fail("and once more")
    with pytest.raises(PeerError, match=r"worker 0 .* out of memory"):
        waiting.result(DEADLINE_S)


def test_a_silent_client_is_named_to_everybody(new_job, new_port):
    job = new_job(num_workers=1, num_servers=2, heartbeat_timeout_s=2.0)
    port = job.new_port()
    register_by_hand(port, job.settings, job.address, SERVER)
    decode(wait_for(port, "waiting"))
    server = job.node(SERVER)
    worker = job.node(WORKER)
    server.begin()
    event = worker.event(PeerFailed)
    assert (event.role, event.rank) == (SERVER, 0)
    assert "not heard for 2 s" in event.reason
    assert server.event(PeerFailed) == event
    assert job.exit_code() == 1
    port.close()


def test_live_clients_outlive_the_timeout(new_job):
    job = new_job(num_workers=1, num_servers=1, heartbeat_timeout_s=1.0).begin()
    with pytest.raises(queue.Empty):
        job.workers[0].events.get(timeout=2.5)
    assert job.workers[0].client.ask("x", {}).result(DEADLINE_S)


def test_a_scheduler_that_falls_silent_is_noticed(new_port):
    port = new_port()
    address = port.listen(Channel.CONTROL, LOCAL)
    settings = Settings(heartbeat_timeout_s=1.0)
    node = Node(new_port(), address, settings, WORKER)
    (message,) = port.recv(DEADLINE_S)
    port.send(Channel.CONTROL, message.peer, encode({"kind": "waiting", "missing": "1 server"}))
    event = node.event(PeerFailed)
    assert (event.role, event.rank) == (SCHEDULER, None)
    assert address in event.reason
    with pytest.raises(PeerError, match="scheduler"):
        node.client.wait_welcome(DEADLINE_S)
    node.client.close()
    port.close()


def test_a_callback_that_raises_fails_the_job(new_job):
    job = new_job().begin()
    job.workers[1].on_event = lambda event: 1 // 0
    job.workers[0].client.order(0, ["a"])
    event = job.servers[0].event(PeerFailed)
    assert (event.role, event.rank) == (WORKER, 1)
    assert "ZeroDivisionError" in event.reason


def test_nonsense_from_a_stranger_changes_nothing(new_job):
    job = new_job(num_workers=1).begin()
    port = job.new_port()
    port.connect(Channel.CONTROL, b"scheduler", job.address, b"stranger")
    for frames in ([b""], [b"{}", b""], [b"[", b"", b""], [b'{"kind":"goodbye"}', b""]):
        port.send(Channel.CONTROL, b"scheduler", frames)
    port_2 = job.new_port()
    register_by_hand(port_2, job.settings, job.address)
    assert "has started" in decode(wait_for(port_2, "refused"))[0]["reason"]
    assert job.workers[0].client.ask("x", {}).result(DEADLINE_S)
    port.close()
    port_2.close()


def test_nonsense_from_the_scheduler_is_dropped(new_port):
    port = new_port()
    address = port.listen(Channel.CONTROL, LOCAL)
    node = Node(new_port(), address, Settings(), WORKER)
    (message,) = port.recv(DEADLINE_S)
    for frames in (
        [b"x", b""],
        encode({"kind": "welcome", "rank": "no"}),
        encode({"kind": "reply", "req": 5}),
        encode({"kind": "dance"}),
        encode({"kind": "command", "req": 1}),
        encode({"kind": "refused", "reason": "go away"}),
    ):
        port.send(Channel.CONTROL, message.peer, frames)
    with pytest.raises(UsageError, match="go away"):
        node.client.wait_welcome(DEADLINE_S)
    node.client.close()
    port.close()


# ---- the client's own rules


def test_close_ends_everything(new_job):
    job = new_job().begin()
    silence(job.servers)
    client = job.workers[0].client
    waiting = client.ask("never answered", {})
    client.close()
    client.close()
    for future in (waiting, client.ask("too late", {})):
        with pytest.raises(UsageError, match="closed"):
            future.result(DEADLINE_S)


def test_close_without_start(new_port):
    node = ControlClient(new_port(), "", Settings(), Registration(WORKER, ""), print, print)
    node.close()


def test_blocking_calls_refuse_the_control_thread(new_job):
    job = new_job(num_workers=1, num_servers=1).begin()
    client = job.workers[0].client
    caught = queue.Queue()

    def on_event(event):
        for call in (client.barrier, lambda: client.goodbye(1), lambda: client.wait_welcome(1)):
            try:
                call()
            except InternalError as error:
                caught.put(str(error))

    job.workers[0].on_event = on_event
    client.order(0, [])
    for _ in range(3):
        assert "control thread" in caught.get(timeout=DEADLINE_S)


def test_a_forked_child_finds_it_inert(new_job):
    job = new_job(num_workers=1, num_servers=1).begin()
    client = job.workers[0].client
    pid = os.fork()
    if pid == 0:  # the child: report by exit code only
        code = 1
        try:
            client.goodbye(DEADLINE_S)
            client.fail("not I")
            client.order(0, [])
            client.reply(0, {})
            client.ready()
            client.close()
            for call in (client.barrier, lambda: client.ask("x", {})):
                try:
                    call()
                except UsageError:
                    code = 0
                else:
                    code = 2
                    break
        finally:
            os._exit(code)
    assert os.WEXITSTATUS(os.waitpid(pid, 0)[1]) == 0
    assert client.ask("x", {}).result(DEADLINE_S)
