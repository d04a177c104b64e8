"""Clients and the scheduler together, over both transports: a whole job, and its start."""

import concurrent.futures
import socket

import pytest
from control_job import DEADLINE_S, LOCAL, Node, wait_missing

from p3.config import SCHEDULER, SERVER, WORKER, Settings
from p3.control import Left, Order, PeerFailed, Stop
from p3.errors import PeerError, UsageError
from p3.scheduler.process import StopFlag, serve_on
from p3.transport import Channel
from p3.transport.zmq_port import ZmqPort

# ---- a whole job


def test_a_job_from_registration_to_the_end(new_job):
    job = new_job().begin()
    for rank, node in enumerate(job.workers):
        assert node.welcome.rank == rank
        assert [info.rank for info in node.welcome.servers] == [0, 1]
        assert {info.data for info in node.welcome.servers} == {"data!"}
        assert node.welcome.num_workers == node.welcome.num_servers == 2
    for rank, node in enumerate(job.servers):
        assert node.welcome.rank == rank
        tokens = [info.token for info in node.welcome.workers]
        assert tokens == [worker.welcome.token for worker in job.workers]
        assert all(len(token) == 16 for token in tokens)
    first, second = (node.client for node in job.workers)

    answers = first.ask("hello", {"n": 1}, b"abc").result(DEADLINE_S)
    assert answers == [
        ({"rank": 0, "from": 0, "n": 1}, b"cba"),
        ({"rank": 1, "from": 0, "n": 1}, b"cba"),
    ]
    waiting = [first.declare(0, key, (100_000,), "float32", "sync", False) for key in "abc"]
    waiting += [second.declare(0, key, (100_000,), "float32", "sync", False) for key in "cba"]
    entries = [future.result(DEADLINE_S) for future in waiting]
    assert entries[:3] == entries[:2:-1]
    assert [entry.key for entry in entries[:3]] == ["a", "b", "c"]
    assert sorted(entry.id for entry in entries[:3]) == [0, 1, 2]
    assert entries[0].shape == (100_000,)
    assert job.servers[1].names == ["hello", "key", "key", "key"]

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(client.barrier, DEADLINE_S) for client in (first, second)]:
            future.result(DEADLINE_S)
    first.order(0, ["b", 1])
    for node in job.workers:
        assert node.event(Order) == Order(0, ("b", 1))

    for node in job.workers:
        node.client.goodbye(DEADLINE_S)
        node.client.close()
    for node in job.servers:
        assert node.event(Left) == Left(0)
        node.event(Stop)
        node.client.goodbye(DEADLINE_S)
        node.client.close()
    assert job.exit_code() == 0
    assert job.lines == []


def test_a_scheduler_that_comes_last(new_port):
    """Clients that start before the scheduler listens find it when it does."""
    with socket.socket() as probe:
        probe.bind((LOCAL, 0))
        number = probe.getsockname()[1]
    port = new_port()
    kind = "tcp" if isinstance(port, ZmqPort) else "inproc"
    address = f"tcp://{LOCAL}:{number}" if kind == "tcp" else f"inproc://{number}"
    settings = Settings(num_workers=1, num_servers=1)
    nodes = [Node(new_port(), address, settings, role) for role in (WORKER, SERVER)]
    flag = StopFlag(port)
    port.listen(Channel.CONTROL, LOCAL, number)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        scheduler = pool.submit(serve_on, port, settings, flag=flag, say=lambda line: None)
        nodes[1].begin()
        nodes[1].client.ready()
        assert nodes[0].begin().rank == 0
        flag.stop("enough")
        assert scheduler.result(DEADLINE_S) == 1
    for node in nodes:
        assert node.event(PeerFailed).reason == "enough"
        node.client.close()


# ---- the start goes wrong


def test_who_is_missing_is_named(new_job):
    job = new_job()
    node = job.node(WORKER, worker_id=1)
    job.node(SERVER)
    text = wait_missing(node, "1 server")
    assert "still misses 1 worker (rank 0), 1 server" in text
    assert job.address in text


def test_a_scheduler_that_never_answers_is_named(new_port):
    port = new_port()
    address = port.listen(Channel.CONTROL, LOCAL)
    node = Node(new_port(), address, Settings(), WORKER)
    with pytest.raises(PeerError, match="no answer from the scheduler at") as caught:
        node.client.wait_welcome(0.2)
    assert address in str(caught.value)
    assert "P3_SECRET" in str(caught.value)
    node.client.close()
    port.close()


def test_a_duplicate_rank_is_refused(new_job):
    job = new_job()
    wait_missing(job.node(WORKER, worker_id=1), "rank 0")
    second = job.node(WORKER, worker_id=1)
    with pytest.raises(UsageError, match="worker_id 1 is taken"):
        second.client.wait_welcome(DEADLINE_S)
    with pytest.raises(UsageError, match="taken"):
        second.client.ask("x", {}).result(DEADLINE_S)


def test_other_settings_are_refused(new_job):
    job = new_job()
    node = job.node(WORKER, settings=Settings(num_workers=2, num_servers=2, slice_elems=7))
    with pytest.raises(UsageError, match=r"slice_elems is 7 here and 50000 .* P3_SLICE_ELEMS"):
        node.client.wait_welcome(DEADLINE_S)


def test_the_scheduler_gives_up_on_the_start(new_job):
    job = new_job(start_timeout_s=0.5)
    node = job.node(SERVER)
    event = node.event(PeerFailed)
    assert "missing 2 workers, 1 server" in event.reason
    with pytest.raises(PeerError, match="missing 2 workers, 1 server") as caught:
        node.client.wait_welcome(DEADLINE_S)
    assert caught.value.role == SCHEDULER
    assert job.exit_code() == 1
    assert len(job.lines) == 1
    assert "missing 2 workers, 1 server" in job.lines[0]
